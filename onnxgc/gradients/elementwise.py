"""Gradients of elementwise operators and of the sums and products with broadcasting."""

from __future__ import annotations

import onnx

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import unbroadcast

# The largest slope that float32 holds: HardSigmoid with it is the step function of y > 0.
_STEP_SLOPE = 3e38


def _give_broadcast(g: GradientContext, index: int, gradient: str) -> None:
    """Gradient of input `index`, given that of the (broadcast) output."""
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
    """y = a / b: da = dy / b, db = -dy y / b."""
    if g.wants(1):
        scaled = g.emit("Div", g.emit("Mul", g.dy, g.y()), g.x(1))
        summed = unbroadcast(g, scaled, g.output_shape(), g.input_shape(1))
        g.give(1, g.emit("Neg", summed))
    if g.wants(0):
        _give_broadcast(g, 0, g.emit("Div", g.dy, g.x(1)))


def sum_(g: GradientContext) -> None:
    """y = sum of all inputs: each gets dy."""
    for index in range(len(g.node.inputs)):
        if g.wants(index):
            _give_broadcast(g, index, g.dy)


def relu(g: GradientContext) -> None:
    """y = max(x, 0): dx = dy where y > 0, by a step that ONNX Runtime computes in place."""
    if g.input_type(0).dtype == onnx.TensorProto.FLOAT:
        step = g.emit("HardSigmoid", g.y(), alpha=_STEP_SLOPE, beta=0.0)
    else:
        step = _as_number(g, g.emit("Greater", g.y(), g.scalar(0.0)))
    g.give(0, g.emit("Mul", g.dy, step))


def clip(g: GradientContext) -> None:
    """y = min(max(x, low), high): dx = dy strictly inside the limits, as torch's ReLU6."""
    inside = None
    for index, comparison in ((1, "Greater"), (2, "Less")):
        if g.has_input(index):
            within = g.emit(comparison, g.y(), g.x(index))
            inside = within if inside is None else g.emit("And", inside, within)
    g.give(0, g.dy if inside is None else g.emit("Mul", g.dy, _as_number(g, inside)))


def _as_number(g: GradientContext, condition: str) -> str:
    return g.emit("Cast", condition, to=g.input_type(0).dtype)


def sigmoid(g: GradientContext) -> None:
    """y = 1 / (1 + exp(-x)): dx = dy y (1 - y)."""
    slope = g.emit("Mul", g.y(), g.emit("Sub", g.scalar(1.0), g.y()))
    g.give(0, g.emit("Mul", g.dy, slope))


def tanh(g: GradientContext) -> None:
    """y = tanh(x): dx = dy (1 - y^2)."""
    square = g.emit("Mul", g.y(), g.y())
    g.give(0, g.emit("Mul", g.dy, g.emit("Sub", g.scalar(1.0), square)))


def softplus(g: GradientContext) -> None:
    """y = log(1 + exp(x)): dx = dy sigmoid(x)."""
    g.give(0, g.emit("Mul", g.dy, g.emit("Sigmoid", g.x(0))))


def neg(g: GradientContext) -> None:
    """y = -x: dx = -dy."""
    g.give(0, g.emit("Neg", g.dy))


def abs_(g: GradientContext) -> None:
    """y = |x|: dx = dy sign(x), zero at zero as in torch."""
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


def dropout(g: GradientContext) -> None:
    """y = x mask / (1 - ratio): dx = dy mask / (1 - ratio), with forward's own mask.

    Raises:
        UnsupportedOperatorError: the ratio is computed in the graph.
    """
    ratio = g.constant_input(1)
    if ratio is None:
        raise UnsupportedOperatorError(
            f"Dropout '{g.node.origin or g.node.name}' computes its ratio in the graph, which has no "
            "gradient rule; export the model with a constant ratio"
        )
    kept = 1.0 - float(ratio.reshape(()))
    mask = _as_number(g, g.y(1))
    if kept <= 0.0:
        g.give(0, g.emit("Mul", g.dy, mask))
        return
    g.give(0, g.emit("Mul", g.emit("Mul", g.dy, mask), g.scalar(1.0 / kept)))
