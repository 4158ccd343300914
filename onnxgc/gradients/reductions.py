"""Gradients of reductions and of softmax."""

from __future__ import annotations

import math

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.broadcasting import expand, reciprocal_or_zero, reduce_sum, reshape
from onnxgc.gradients.engine import GradientContext


def _reduced_axes(g: GradientContext) -> tuple[int, ...]:
    """Axes that the reduction removes or leaves as 1. Source: ONNX opset 18, ReduceSum.

    Raises:
        UnsupportedOperatorError: the axes are computed in the graph.
    """
    rank = len(g.input_shape(0))
    if not g.has_input(1):
        return () if g.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    axes = g.constant_input(1)
    if axes is None:
        raise UnsupportedOperatorError(
            f"{g.node.place} computes its axes in the graph, which has no "
            "gradient rule; export the model with constant axes"
        )
    if axes.size:
        return tuple(sorted(int(axis) % rank for axis in axes.reshape(-1)))
    return () if g.attribute("noop_with_empty_axes", 0) else tuple(range(rank))


def _kept(g: GradientContext, axes: tuple[int, ...], tensor: str) -> str:
    """y or its gradient with the reduced axes as 1, so that it broadcasts over x."""
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(g.input_shape(0)))
    return tensor if kept == g.output_shape() else reshape(g, tensor, kept)


def _spread(g: GradientContext, gradient: str, axes: tuple[int, ...]) -> str:
    """dy repeated along the reduced axes."""
    shape = g.input_shape(0)
    gradient = _kept(g, axes, gradient)
    return gradient if all(shape[axis] == 1 for axis in axes) else expand(g, gradient, shape)


def reduce_sum_rule(g: GradientContext) -> None:
    """y = sum of x over axes: dx = dy repeated."""
    g.give(0, _spread(g, g.dy, _reduced_axes(g)))


def reduce_mean(g: GradientContext) -> None:
    """y = mean of x over axes: dx = dy / count, repeated."""
    axes = _reduced_axes(g)
    count = math.prod(g.input_shape(0)[axis] for axis in axes)
    # The count itself may be beyond float16.
    g.give(0, _spread(g, g.emit("Mul", g.dy, g.scalar(1.0 / count if count else 0.0)), axes))


def reduce_extreme(g: GradientContext) -> None:
    """y = largest or smallest x over axes: dx = dy where x is y, evenly where several are."""
    axes = _reduced_axes(g)
    dy = _kept(g, axes, g.dy)
    if all(g.input_shape(0)[axis] == 1 for axis in axes):
        g.give(0, dy)
        return
    chosen = g.emit("Cast", g.emit("Equal", g.x(0), _kept(g, axes, g.y())), to=g.input_type(0).dtype)
    count = reduce_sum(g, chosen, axes, keepdims=True)
    g.give(0, g.emit("Mul", chosen, g.emit("Div", dy, count)))


def reduce_l1(g: GradientContext) -> None:
    """y = sum of |x| over axes: dx = dy sign(x), zero at zero."""
    dy = _kept(g, _reduced_axes(g), g.dy)
    g.give(0, g.emit("Mul", g.emit("Sign", g.x(0)), dy))


def reduce_l2(g: GradientContext) -> None:
    """y = square root of the sum of x^2 over axes: dx = x dy / y, zero where all x are zero."""
    axes = _reduced_axes(g)
    share = g.emit("Mul", g.dy, reciprocal_or_zero(g, g.y()))
    g.give(0, g.emit("Mul", g.x(0), _kept(g, axes, share)))


def reduce_sum_square(g: GradientContext) -> None:
    """y = sum of x^2 over axes: dx = 2 x dy."""
    twice = g.emit("Mul", g.dy, g.scalar(2.0))
    g.give(0, g.emit("Mul", g.x(0), _kept(g, _reduced_axes(g), twice)))


def reduce_log_sum(g: GradientContext) -> None:
    """y = log of the sum of x over axes: dx = dy / exp(y), repeated."""
    g.give(0, _spread(g, g.emit("Div", g.dy, g.emit("Exp", g.y())), _reduced_axes(g)))


def reduce_log_sum_exp(g: GradientContext) -> None:
    """y = log of the sum of exp(x) over axes: dx = dy exp(x - y)."""
    axes = _reduced_axes(g)
    share = g.emit("Exp", g.emit("Sub", g.x(0), _kept(g, axes, g.y())))
    g.give(0, g.emit("Mul", share, _kept(g, axes, g.dy)))


def reduce_prod(g: GradientContext) -> None:
    """y = product of x over axes: dx = dy times the product of all others.

    With P the product of what is not zero, that is P / x without a zero, P at the only zero and 0
    beside it, and 0 everywhere where two are zero.
    """
    axes = _reduced_axes(g)
    dy = _kept(g, axes, g.dy)
    if all(g.input_shape(0)[axis] == 1 for axis in axes):
        g.give(0, dy)
        return
    is_zero = g.emit("Cast", g.emit("Equal", g.x(0), g.scalar(0.0)), to=g.input_type(0).dtype)
    filled = g.emit("Add", g.x(0), is_zero)
    product = g.emit("ReduceProd", filled, g.ints(*axes), keepdims=1)
    zeros_in_all = reduce_sum(g, is_zero, axes, keepdims=True)
    others = g.emit("Div", g.emit("Mul", dy, product), filled)
    counts = g.emit("Cast", g.emit("Equal", is_zero, zeros_in_all), to=g.input_type(0).dtype)
    g.give(0, g.emit("Mul", others, counts))


def softmax(g: GradientContext) -> None:
    """y = softmax(x) along an axis: dx = y dy - y sum(y dy)."""
    axis = int(g.attribute("axis", -1)) % len(g.output_shape())
    weighted = g.emit("Mul", g.dy, g.y())
    total = reduce_sum(g, weighted, (axis,), keepdims=True)
    g.give(0, g.emit("Sub", weighted, g.emit("Mul", g.y(), total)))


def masked_softmax(g: GradientContext) -> None:
    """The same where rows without any finite x are NaN, which the model replaces: their dx is 0."""
    axis = int(g.attribute("axis", -1)) % len(g.output_shape())
    y = g.emit("Where", g.emit("IsNaN", g.y()), g.scalar(0.0), g.y())
    weighted = g.emit("Mul", g.dy, y)
    total = reduce_sum(g, weighted, (axis,), keepdims=True)
    g.give(0, g.emit("Sub", weighted, g.emit("Mul", y, total)))


def log_softmax(g: GradientContext) -> None:
    """y = log softmax(x) along an axis: dx = dy - exp(y) sum(dy)."""
    axis = int(g.attribute("axis", -1)) % len(g.output_shape())
    total = reduce_sum(g, g.dy, (axis,), keepdims=True)
    g.give(0, g.emit("Sub", g.dy, g.emit("Mul", g.emit("Exp", g.y()), total)))
