"""Gradients of activation functions and of Dropout.

Most derivatives are a chain of unary operators, so that at most two tensors are live in addition to dy.
Where the sign of y equals that of x, rules read y, since the next operator usually keeps y anyway.
"""

import math

import numpy as np
import onnx

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import as_number, unbroadcast

# Near the largest float32: HardSigmoid with this slope is a step function.
_STEP_SLOPE = 3e38
# In float16 that slope is infinite, and zero times infinity is NaN; bfloat16 has no HardSigmoid.
_STEEP_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def _may_be_steep(g: GradientContext) -> bool:
    """Whether HardSigmoid is a step function; OpenVINO computes that of beta 0 with 0.5."""
    return g.input_type(0).dtype in _STEEP_TYPES and not g.is_portable


def step(g: GradientContext, tensor: str) -> str:
    """1 where `tensor` is above zero, else 0; ONNX Runtime computes it in place."""
    if _may_be_steep(g):
        return g.emit("HardSigmoid", tensor, alpha=_STEP_SLOPE, beta=0.0)
    return g.emit("Relu", g.emit("Sign", tensor))


def share_of_greater(g: GradientContext, difference: str) -> str:
    """1 where `difference` is above zero, 1/2 where it is zero, else 0."""
    if _may_be_steep(g):
        return g.emit("HardSigmoid", difference, alpha=_STEP_SLOPE, beta=0.5)
    return g.emit("Mul", g.emit("Add", g.emit("Sign", difference), g.scalar(1.0)), g.scalar(0.5))


def _above(g: GradientContext, tensor: str, threshold: float) -> str:
    """`tensor` where it is above `threshold`, else 0; discontinuous for a nonzero threshold."""
    if g.input_type(0).dtype == onnx.TensorProto.BFLOAT16:
        # CUDA has no ThresholdedRelu of bfloat16.
        return g.emit("Mul", tensor, step(g, g.emit("Sub", tensor, g.scalar(threshold))))
    return g.emit("ThresholdedRelu", tensor, alpha=threshold)


def relu(g: GradientContext) -> None:
    """y = max(x, 0): dx = dy where y > 0."""
    # y is never negative, so its sign is the step function.
    positive = step(g, g.y()) if _may_be_steep(g) else g.emit("Sign", g.y())
    g.give(0, g.emit("Mul", g.dy, positive))


def relu_on_cuda(g: GradientContext) -> None:
    """As `relu`, with a mask of bools instead of numbers: 3.5 passes over tensors of y's size, not 5."""
    zero = g.scalar(0.0)
    g.give(0, g.emit("Where", g.emit("Greater", g.y(), zero), g.dy, zero))


def leaky_relu(g: GradientContext) -> None:
    """y = x where x > 0, else a x: dx = dy or a dy. For a >= 0, y > 0 exactly where x > 0."""
    slope = float(g.attribute("alpha", 0.01))
    if slope == 1.0:
        g.give(0, g.dy)
        return
    factor = step(g, g.y() if slope >= 0.0 else g.x(0))
    if 0.0 < slope < 1.0:
        factor = g.emit("Clip", factor, g.scalar(slope))
    elif slope != 0.0:
        factor = g.emit("Add", g.emit("Mul", factor, g.scalar(1.0 - slope)), g.scalar(slope))
    g.give(0, g.emit("Mul", g.dy, factor))


def prelu(g: GradientContext) -> None:
    """y = x where x > 0, else s x, with s broadcast to x: dx = dy or s dy, ds = sum of dy min(x, 0)."""
    if g.wants(1):
        product = g.emit("Mul", g.dy, g.emit("Clip", g.x(0), "", g.scalar(0.0)))
        g.give(1, unbroadcast(g, product, g.output_shape(), g.input_shape(1)))
    if g.wants(0):
        positive = step(g, g.x(0))
        negative = g.emit("Sub", g.scalar(1.0), positive)
        # One of the two terms is zero, so the sum is exact.
        slope = g.emit("Add", g.emit("Mul", negative, g.x(1)), positive)
        g.give(0, g.emit("Mul", g.dy, slope))


def elu(g: GradientContext) -> None:
    """y = x where x > 0, else a (exp(x) - 1)."""
    _exponential_unit(g, 1.0, float(g.attribute("alpha", 1.0)))


def selu(g: GradientContext) -> None:
    """y = c x where x > 0, else c a (exp(x) - 1)."""
    alpha = float(g.attribute("alpha", 1.67326319217681884765625))
    _exponential_unit(g, float(g.attribute("gamma", 1.05070102214813232421875)), alpha)


def _exponential_unit(g: GradientContext, scale: float, alpha: float) -> None:
    """y = c x where x > 0, else c a (exp(x) - 1): dx = c dy, or dy (y + c a).

    The slope is c minus a function that is J - y, J = c - c a, for y <= 0, and zero for y > 0. Where the
    signs of y and x may differ, the rule reads x instead: dx = c a dy exp(x) for x <= 0.
    """
    left = scale * alpha
    if scale <= 0.0 or alpha < 0.0:
        positive = step(g, g.x(0))
        decay = g.emit("Exp", g.emit("Clip", g.x(0), "", g.scalar(0.0)))
        negative = g.emit("Mul", g.emit("Sub", g.scalar(1.0), positive), g.scalar(left))
        slope = g.emit("Mul", negative, decay)
        slope = g.emit("Add", slope, g.emit("Mul", positive, g.scalar(scale)))
    elif scale == alpha == 1.0:
        slope = g.emit("HardSigmoid", g.y(), alpha=1.0, beta=1.0)
    else:
        # Just below J, so that the slope at zero is that of x <= 0, as in PyTorch. A positive y that rounds
        # away in J - y counts as zero.
        threshold = float(np.nextafter(np.float32(scale - left), np.float32(-np.inf)))
        falling = _above(g, g.emit("Sub", g.scalar(scale - left), g.y()), threshold)
        slope = g.emit("Sub", g.scalar(scale), falling)
    g.give(0, g.emit("Mul", g.dy, slope))


def hard_sigmoid(g: GradientContext) -> None:
    """y = min(max(a x + b, 0), 1): dx = a dy where 0 < y < 1.

    That is where y - 1, with 0 in place of -1, is negative.
    """
    below = _above(g, g.emit("Sub", g.y(), g.scalar(1.0)), -1.0)
    if _may_be_steep(g):
        inside = g.emit("HardSigmoid", below, alpha=-_STEP_SLOPE, beta=0.0)
    else:
        inside = g.emit("Abs", g.emit("Sign", below))
    scaled = g.emit("Mul", g.dy, inside)
    g.give(0, g.emit("Mul", scaled, g.scalar(float(g.attribute("alpha", 0.2)))))


def hard_swish(g: GradientContext) -> None:
    """y = x min(max(x / 6 + 1/2, 0), 1): dx = dy (x / 3 + 1/2) for |x| < 3, zero below and dy above.

    Below -3, x / 3 + 1/2 is replaced by 0; above 3, one minus it is.
    """
    line = g.emit("Add", g.emit("Mul", g.x(0), g.scalar(1 / 3)), g.scalar(0.5))
    rising = _above(g, line, -0.5)
    falling = _above(g, g.emit("Sub", g.scalar(1.0), rising), -0.5)
    g.give(0, g.emit("Mul", g.dy, g.emit("Sub", g.scalar(1.0), falling)))


def thresholded_relu(g: GradientContext) -> None:
    """y = x where x > a, else 0: dx = dy where x > a, which for a >= 0 is where y > 0."""
    threshold = float(g.attribute("alpha", 1.0))
    excess = g.y() if threshold >= 0.0 else g.emit("Sub", g.x(0), g.scalar(threshold))
    g.give(0, g.emit("Mul", g.dy, step(g, excess)))


def shrink(g: GradientContext) -> None:
    """y = x + b for x < -l, x - b for x > l, else 0: dx = dy where |x| > l.

    For b <= l that is where y is not zero.
    """
    limit, bias = float(g.attribute("lambd", 0.5)), float(g.attribute("bias", 0.0))
    if limit < 0.0:
        g.give(0, g.dy)
        return
    excess = g.emit("Abs", g.y() if bias <= limit else g.x(0))
    if bias > limit:
        excess = g.emit("Sub", excess, g.scalar(limit))
    g.give(0, g.emit("Mul", g.dy, step(g, excess)))


def softsign(g: GradientContext) -> None:
    """y = x / (1 + |x|): dx = dy (1 - |y|)^2."""
    root = g.emit("Sub", g.scalar(1.0), g.emit("Abs", g.y()))
    g.give(0, g.emit("Mul", g.dy, g.emit("Mul", root, root)))


def sigmoid(g: GradientContext) -> None:
    """y = 1 / (1 + exp(-x)): dx = dy y (1 - y)."""
    scaled = g.emit("Mul", g.dy, g.y())
    g.give(0, g.emit("Mul", scaled, g.emit("Sub", g.scalar(1.0), g.y())))


def tanh(g: GradientContext) -> None:
    """y = tanh(x): dx = dy (1 - y^2)."""
    square = g.emit("Mul", g.y(), g.y())
    g.give(0, g.emit("Mul", g.dy, g.emit("Sub", g.scalar(1.0), square)))


def softplus(g: GradientContext) -> None:
    """y = log(1 + exp(x)): dx = dy sigmoid(x)."""
    g.give(0, g.emit("Mul", g.dy, g.emit("Sigmoid", g.x(0))))


def swish(g: GradientContext) -> None:
    """y = x s, s = sigmoid(a x): dx = dy s (1 + a x (1 - s))."""
    alpha = float(g.attribute("alpha", 1.0))
    scaled = g.x(0) if alpha == 1.0 else g.emit("Mul", g.x(0), g.scalar(alpha))
    gate = g.emit("Sigmoid", scaled)
    inner = g.emit("Mul", g.emit("Sub", g.scalar(1.0), gate), scaled)
    slope = g.emit("Mul", g.emit("Add", inner, g.scalar(1.0)), gate)
    g.give(0, g.emit("Mul", g.dy, slope))


def gelu(g: GradientContext) -> None:
    """y = x (1 + erf(x / sqrt(2))) / 2: dx = dy (1 + erf(t) + 2 t exp(-t^2) / sqrt(pi)) / 2, t = x / sqrt(2).

    With approximate = "tanh" y = x (1 + h) / 2, h = tanh(x p), p = c (1 + k x^2): the derivative of x p is
    3 p - 2 c, and dx = dy (1 + h + x (1 - h^2) (3 p - 2 c)) / 2.
    """
    if g.attribute("approximate", "none") == "tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        square = g.emit("Mul", g.x(0), g.x(0))
        factor = g.emit("Add", g.emit("Mul", square, g.scalar(c * k)), g.scalar(c))
        gate = g.emit("Tanh", g.emit("Mul", g.x(0), factor))
        derivative = g.emit("Sub", g.emit("Mul", factor, g.scalar(3.0)), g.scalar(2 * c))
        bend = g.emit("Sub", g.scalar(1.0), g.emit("Mul", gate, gate))
        spread = g.emit("Mul", g.emit("Mul", derivative, bend), g.x(0))
    else:
        t = g.emit("Mul", g.x(0), g.scalar(math.sqrt(0.5)))
        bell = g.emit("Exp", g.emit("Neg", g.emit("Mul", t, t)))
        spread = g.emit("Mul", g.emit("Mul", t, bell), g.scalar(2 / math.sqrt(math.pi)))
        gate = g.emit("Erf", t)
    doubled = g.emit("Add", g.emit("Add", gate, spread), g.scalar(1.0))
    g.give(0, g.emit("Mul", g.emit("Mul", g.dy, doubled), g.scalar(0.5)))


def clip(g: GradientContext) -> None:
    """y = min(max(x, l), h): dx = dy strictly inside the limits, as torch's ReLU6.

    The limits get the rest: dh = sum of dy where x >= h or l >= h, dl = sum of dy where x <= l < h. Computed
    limits are compared with x, since a runtime may round y and the limits differently.
    """
    is_constant = all(g.constant_input(index) is not None for index in (1, 2) if g.has_input(index))
    source = g.y() if is_constant else g.x(0)
    has_both = g.has_input(1) and g.has_input(2)
    if g.wants(2):
        above = g.emit("GreaterOrEqual", source, g.x(2))
        if has_both:
            above = g.emit("Or", above, g.emit("GreaterOrEqual", g.x(1), g.x(2)))
        _give_limit(g, 2, above)
    if g.wants(1):
        below = g.emit("LessOrEqual", source, g.x(1))
        if has_both:
            below = g.emit("And", below, g.emit("Less", g.x(1), g.x(2)))
        _give_limit(g, 1, below)
    if g.wants(0):
        inside = None
        for index, comparison in ((1, "Greater"), (2, "Less")):
            if g.has_input(index):
                within = g.emit(comparison, source, g.x(index))
                inside = within if inside is None else g.emit("And", inside, within)
        g.give(0, g.dy if inside is None else g.emit("Mul", g.dy, as_number(g, inside)))


def _give_limit(g: GradientContext, index: int, reached: str) -> None:
    product = g.emit("Mul", g.dy, as_number(g, reached))
    g.give(index, unbroadcast(g, product, g.output_shape(), g.input_shape(index)))


def dropout(g: GradientContext) -> None:
    """y = x mask / (1 - ratio): dx = dy mask / (1 - ratio), with the mask of forward.

    Raises:
        UnsupportedOperatorError: the ratio is computed in the graph.
    """
    kept = 1.0 - float(g.required_constant(1, "ratio").reshape(()))
    mask = as_number(g, g.y(1))
    if kept <= 0.0:
        g.give(0, g.emit("Mul", g.dy, mask))
        return
    g.give(0, g.emit("Mul", g.emit("Mul", g.dy, mask), g.scalar(1.0 / kept)))
