"""Gradients of elementwise operators, with broadcasting."""

import math
from collections.abc import Mapping

import numpy as np
import onnx

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.activations import share_of_greater, step
from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import unbroadcast, zeros
from onnxgc.model.core.ir import Array

# The largest finite number of each type.
_MAX_FINITE: Mapping[int, float] = {
    onnx.TensorProto.FLOAT: float(np.finfo(np.float32).max),
    onnx.TensorProto.DOUBLE: float(np.finfo(np.float64).max),
    onnx.TensorProto.FLOAT16: float(np.finfo(np.float16).max),
    onnx.TensorProto.BFLOAT16: 3.3895313892515355e38,
}

# Exponent, mapped to the number of factors x (y if negative) in its derivative.
_FACTOR_COUNTS = {2.0: 1, 3.0: 2, -1.0: 2, -0.5: 3}


def _give_broadcast(g: GradientContext, index: int, gradient: str) -> None:
    """Sets the gradient of input `index` to the sum of `gradient`, which has the output's shape."""
    g.give(index, unbroadcast(g, gradient, g.output_shape(), g.input_shape(index)))


def add(g: GradientContext) -> None:
    """y = a + b: da = dy, db = dy."""
    for index in (0, 1):
        if g.wants(index):
            _give_broadcast(g, index, g.dy)


def sub(g: GradientContext) -> None:
    """y = a - b: da = dy, db = -dy."""
    if g.wants(0):
        _give_broadcast(g, 0, g.dy)
    if g.wants(1):
        summed = unbroadcast(g, g.dy, g.output_shape(), g.input_shape(1))
        g.give(1, g.emit("Neg", summed))


def mul(g: GradientContext) -> None:
    """y = a b: da = dy b, db = dy a."""
    for index in (0, 1):
        if g.wants(index):
            _give_broadcast(g, index, g.emit("Mul", g.dy, g.x(1 - index)))


def div(g: GradientContext) -> None:
    """y = a / b: da = dy / b, db = -(dy y) / b, summed before the division."""
    if g.wants(1):
        summed = unbroadcast(g, g.emit("Mul", g.dy, g.y()), g.output_shape(), g.input_shape(1))
        g.give(1, g.emit("Neg", g.emit("Div", summed, g.x(1))))
    if g.wants(0):
        _give_broadcast(g, 0, g.emit("Div", g.dy, g.x(1)))


def sum_(g: GradientContext) -> None:
    """y = sum of all inputs: each gets dy."""
    for index in range(len(g.node.inputs)):
        if g.wants(index):
            _give_broadcast(g, index, g.dy)


def max_(g: GradientContext) -> None:
    """y = max(a, b, ...), from left to right: the greater one gets dy, two equal ones half of it each."""
    _extreme(g, "Max")


def min_(g: GradientContext) -> None:
    """y = min(a, b, ...): as max, for the smaller one."""
    _extreme(g, "Min")


def _extreme(g: GradientContext, operator: str) -> None:
    """Backward through y = f(f(f(a, b), c), ...), whose inner results are recomputed."""
    count = len(g.node.inputs)
    results, shapes = [g.x(0)], [g.input_shape(0)]
    for index in range(1, count - 1):
        results.append(g.emit(operator, results[-1], g.x(index)))
        shapes.append(np.broadcast_shapes(shapes[-1], g.input_shape(index)))
    gradient, shape = g.dy, g.output_shape()
    for index in range(count - 1, 0, -1):
        left, right = results[index - 1], g.x(index)
        if not any(g.wants(earlier) for earlier in range(index)):
            if g.wants(index):
                product = g.emit("Mul", gradient, _share(g, operator, right, left, index))
                g.give(index, unbroadcast(g, product, shape, g.input_shape(index)))
            return
        product = g.emit("Mul", gradient, _share(g, operator, left, right, index))
        if g.wants(index):
            remainder = g.emit("Sub", gradient, product)
            g.give(index, unbroadcast(g, remainder, shape, g.input_shape(index)))
        gradient, shape = unbroadcast(g, product, shape, shapes[index - 1]), shapes[index - 1]
    g.give(0, gradient)


def _share(g: GradientContext, operator: str, one: str, other: str, index: int) -> str:
    """The share of the gradient of f(one, other) that belongs to `one`: 1, 1/2 or 0."""
    minuend, subtrahend = (one, other) if operator == "Max" else (other, one)
    # The difference of two infinite operands is NaN.
    if not any(_is_finite(g.constant_input(place)) for place in (index, *((0,) if index == 1 else ()))):
        minuend, subtrahend = _limited(g, minuend), _limited(g, subtrahend)
    return share_of_greater(g, g.emit("Sub", minuend, subtrahend))


def _is_finite(value: Array | None) -> bool:
    return value is not None and bool(np.isfinite(value.astype(np.float64)).all())


def _limited(g: GradientContext, tensor: str) -> str:
    """`tensor` with infinite elements replaced by the largest finite numbers."""
    dtype = g.input_type(0).dtype
    low, high = g.scalar(-_MAX_FINITE[dtype]), g.scalar(_MAX_FINITE[dtype])
    if dtype == onnx.TensorProto.BFLOAT16:
        # CUDA has no Clip of bfloat16.
        return g.emit("Min", g.emit("Max", tensor, low), high)
    return g.emit("Clip", tensor, low, high)


def neg(g: GradientContext) -> None:
    """y = -x: dx = -dy."""
    g.give(0, g.emit("Neg", g.dy))


def abs_(g: GradientContext) -> None:
    """y = |x|: dx = dy sign(x), zero at zero as in PyTorch."""
    g.give(0, g.emit("Mul", g.dy, g.emit("Sign", g.x(0))))


def exp(g: GradientContext) -> None:
    """y = exp(x): dx = dy y."""
    g.give(0, g.emit("Mul", g.dy, g.y()))


def log(g: GradientContext) -> None:
    """y = log(x): dx = dy / x."""
    g.give(0, g.emit("Div", g.dy, g.x(0)))


def sqrt(g: GradientContext) -> None:
    """y = sqrt(x): dx = dy / (2 y)."""
    g.give(0, g.emit("Div", g.emit("Mul", g.dy, g.scalar(0.5)), g.y()))


def identity(g: GradientContext) -> None:
    """y = x: dx = dy."""
    g.give(0, g.dy)


def cast(g: GradientContext) -> None:
    """y = x in another floating type: dx = dy in x's."""
    g.give(0, g.emit("Cast", g.dy, to=g.input_type(0).dtype))


def reciprocal(g: GradientContext) -> None:
    """y = 1 / x: dx = -dy y^2."""
    g.give(0, g.emit("Neg", g.emit("Mul", g.emit("Mul", g.dy, g.y()), g.y())))


def erf(g: GradientContext) -> None:
    """y = erf(x): dx = 2 / sqrt(pi) dy exp(-x^2)."""
    bell = g.emit("Exp", g.emit("Neg", g.emit("Mul", g.x(0), g.x(0))))
    g.give(0, g.emit("Mul", g.emit("Mul", g.dy, bell), g.scalar(2.0 / math.sqrt(math.pi))))


def pow_(g: GradientContext) -> None:
    """y = a^b: da = dy b a^(b - 1), zero where b = 0; db = dy y log(a), zero where a <= 0."""
    if g.wants(1):
        product = g.emit("Mul", g.emit("Mul", g.dy, g.y()), _logarithm(g))
        summed = unbroadcast(g, product, g.output_shape(), g.input_shape(1))
        g.give(1, _in_type_of(g, summed, 1, 0))
    if g.wants(0):
        gradient = _gradient_of_base(g)
        if gradient is None:
            g.give(0, zeros(g, g.input_shape(0)))
        else:
            _give_broadcast(g, 0, gradient)


def _in_type_of(g: GradientContext, tensor: str, index: int, source: int) -> str:
    """`tensor`, of the type of input `source`, in the type of input `index`."""
    dtype = g.input_type(index).dtype
    return tensor if dtype == g.input_type(source).dtype else g.emit("Cast", tensor, to=dtype)


def _logarithm(g: GradientContext) -> str:
    """log(a), or 0 where a <= 0."""
    base = g.constant_input(0)
    if base is not None:
        return g.tensor(np.log(np.where(base > 0, base, 1).astype(np.float64)))
    fallback = g.emit("Sub", g.scalar(1.0), step(g, g.x(0)))
    return _emit_widened(g, "Log", g.emit("Max", g.x(0), fallback))


def _emit_widened(g: GradientContext, operator: str, tensor: str) -> str:
    """Emits a unary operator, in float32 for bfloat16, for which CUDA has no kernel."""
    if g.input_type(0).dtype != onnx.TensorProto.BFLOAT16:
        return g.emit(operator, tensor)
    result = g.emit(operator, g.emit("Cast", tensor, to=onnx.TensorProto.FLOAT))
    return g.emit("Cast", result, to=onnx.TensorProto.BFLOAT16)


def _gradient_of_base(g: GradientContext) -> str | None:
    """dy b a^(b - 1) in the output's shape, or None if it is zero.

    Where b = 0 the power is a^0, which is finite at a = 0.
    """
    exponent = g.constant_input(1)
    if exponent is None:
        exponents = _in_type_of(g, g.x(1), 0, 1)
        lowered = g.emit("Sub", exponents, g.emit("Abs", g.emit("Sign", exponents)))
    else:
        values = exponent.astype(np.float64)
        if values.size and (values == values.flat[0]).all():
            return _gradient_of_power(g, float(values.flat[0]))
        exponents = g.tensor(values)
        lowered = g.tensor(values - (values != 0.0))
    return g.emit("Mul", g.emit("Mul", g.dy, g.emit("Pow", g.x(0), lowered)), exponents)


def _gradient_of_power(g: GradientContext, exponent: float) -> str | None:
    """dy p x^(p - 1) for one exponent p, by multiplications or a division where these suffice."""
    if exponent == 0.0:
        return None
    if exponent == 1.0:
        return g.dy
    if exponent == 0.5:
        return g.emit("Div", g.emit("Mul", g.dy, g.scalar(0.5)), g.y())
    if exponent in _FACTOR_COUNTS:
        factor = g.x(0) if exponent > 0.0 else g.y()
        product = g.dy
        for _ in range(_FACTOR_COUNTS[exponent]):
            product = g.emit("Mul", product, factor)
    else:
        product = g.emit("Mul", g.dy, g.emit("Pow", g.x(0), g.scalar(exponent - 1.0)))
    return g.emit("Mul", product, g.scalar(exponent))


def sin(g: GradientContext) -> None:
    """y = sin(x): dx = dy cos(x)."""
    g.give(0, g.emit("Mul", g.dy, g.emit("Cos", g.x(0))))


def cos(g: GradientContext) -> None:
    """y = cos(x): dx = -dy sin(x)."""
    g.give(0, g.emit("Neg", g.emit("Mul", g.dy, g.emit("Sin", g.x(0)))))


def tan(g: GradientContext) -> None:
    """y = tan(x): dx = dy (1 + y^2)."""
    g.give(0, g.emit("Mul", g.dy, g.emit("Add", g.emit("Mul", g.y(), g.y()), g.scalar(1.0))))


def asin(g: GradientContext) -> None:
    """y = asin(x): dx = dy / sqrt(1 - x^2)."""
    g.give(0, g.emit("Div", g.dy, g.emit("Sqrt", _one_less_square(g))))


def acos(g: GradientContext) -> None:
    """y = acos(x): dx = -dy / sqrt(1 - x^2)."""
    g.give(0, g.emit("Neg", g.emit("Div", g.dy, g.emit("Sqrt", _one_less_square(g)))))


def atan(g: GradientContext) -> None:
    """y = atan(x): dx = dy / (1 + x^2)."""
    g.give(0, g.emit("Div", g.dy, g.emit("Add", g.emit("Mul", g.x(0), g.x(0)), g.scalar(1.0))))


def sinh(g: GradientContext) -> None:
    """y = sinh(x): dx = dy cosh(x), by exponentials, since CUDA has no Cosh."""
    batch_dependent = g.emit("Exp", g.x(0))
    doubled = g.emit("Add", batch_dependent, g.emit("Reciprocal", batch_dependent))
    g.give(0, g.emit("Mul", g.emit("Mul", g.dy, g.scalar(0.5)), doubled))


def cosh(g: GradientContext) -> None:
    """y = cosh(x): dx = dy sinh(x) = dy y tanh(x)."""
    g.give(0, g.emit("Mul", g.emit("Mul", g.dy, g.y()), g.emit("Tanh", g.x(0))))


def asinh(g: GradientContext) -> None:
    """y = asinh(x): dx = dy / sqrt(x^2 + 1)."""
    square = g.emit("Mul", g.x(0), g.x(0))
    g.give(0, g.emit("Div", g.dy, g.emit("Sqrt", g.emit("Add", square, g.scalar(1.0)))))


def acosh(g: GradientContext) -> None:
    """y = acosh(x): dx = dy / sqrt(x^2 - 1)."""
    square = g.emit("Mul", g.x(0), g.x(0))
    g.give(0, g.emit("Div", g.dy, g.emit("Sqrt", g.emit("Sub", square, g.scalar(1.0)))))


def atanh(g: GradientContext) -> None:
    """y = atanh(x): dx = dy / (1 - x^2)."""
    g.give(0, g.emit("Div", g.dy, _one_less_square(g)))


def _one_less_square(g: GradientContext) -> str:
    """1 - x^2."""
    return g.emit("Sub", g.scalar(1.0), g.emit("Mul", g.x(0), g.x(0)))


def where(g: GradientContext) -> None:
    """y = a where c, else b: da = dy where c, db = dy where not c, elsewhere zero.

    Selected, not multiplied by c: models often guard an operand in this way because dy is infinite or NaN
    where the other operand is selected.
    """
    for index in (1, 2):
        if g.wants(index):
            zero = g.scalar(0.0, like=index)
            choices = (g.dy, zero) if index == 1 else (zero, g.dy)
            _give_broadcast(g, index, g.emit("Where", g.x(0), *choices))


def mod(g: GradientContext) -> None:
    """y = a - b t with t = trunc(a / b): da = dy, db = -dy t. t is computed as round((a - y) / b).

    Raises:
        UnsupportedOperatorError: fmod is 0, which ONNX has for integers only.
    """
    if not g.attribute("fmod", 0):
        raise UnsupportedOperatorError(
            f"{g.node.location} has fmod=0, which ONNX defines for integers only; export the model with fmod=1"
        )
    if g.wants(1):
        quotient = _emit_widened(g, "Round", g.emit("Div", g.emit("Sub", g.x(0), g.y()), g.x(1)))
        summed = unbroadcast(g, g.emit("Mul", g.dy, quotient), g.output_shape(), g.input_shape(1))
        g.give(1, g.emit("Neg", summed))
    if g.wants(0):
        _give_broadcast(g, 0, g.dy)


def cum_sum(g: GradientContext) -> None:
    """y = cumulative sums of x along an axis: dx = cumulative sums of dy from the other end."""
    exclusive, reverse = (int(g.attribute(name, 0)) for name in ("exclusive", "reverse"))
    g.give(0, g.emit("CumSum", g.dy, g.x(1), exclusive=exclusive, reverse=1 - reverse))


def trilu(g: GradientContext) -> None:
    """y = the upper or lower triangle of x: dx = the same triangle of dy."""
    diagonal = (g.x(1),) if g.has_input(1) else ()
    g.give(0, g.emit("Trilu", g.dy, *diagonal, upper=int(g.attribute("upper", 1))))
