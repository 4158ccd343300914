"""Gradients of reductions and of softmax."""

import math

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import as_number, expand, reciprocal_or_zero, reduce_sum, reshape


def _reduced_axes(g: GradientContext) -> tuple[int, ...]:
    """Axes that the reduction removes or keeps with extent 1. Source: ONNX opset 18, ReduceSum.

    Raises:
        UnsupportedOperatorError: the axes are computed in the graph.
    """
    rank = len(g.input_shape(0))
    if not g.has_input(1):
        return () if g.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    if axes := g.constant_integers(1, "axes"):
        return tuple(sorted(axis % rank for axis in axes))
    return () if g.attribute("noop_with_empty_axes", 0) else tuple(range(rank))


def _broadcastable(g: GradientContext, axes: tuple[int, ...], tensor: str) -> str:
    """`tensor` of y's shape, with extent 1 for each reduced axis, so that it broadcasts over x."""
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(g.input_shape(0)))
    return tensor if shape == g.output_shape() else reshape(g, tensor, shape)


def _spread(g: GradientContext, gradient: str, axes: tuple[int, ...]) -> str:
    """dy repeated along the reduced axes."""
    shape = g.input_shape(0)
    gradient = _broadcastable(g, axes, gradient)
    return gradient if all(shape[axis] == 1 for axis in axes) else expand(g, gradient, shape)


def reduce_sum_rule(g: GradientContext) -> None:
    """y = sum of x over axes: dx = dy repeated."""
    g.give(0, _spread(g, g.dy, _reduced_axes(g)))


def reduce_mean(g: GradientContext) -> None:
    """y = mean of x over axes: dx = dy / count, repeated."""
    axes = _reduced_axes(g)
    count = math.prod(g.input_shape(0)[axis] for axis in axes)
    # The count itself may exceed float16.
    g.give(0, _spread(g, g.emit("Mul", g.dy, g.scalar(1.0 / count if count else 0.0)), axes))


def reduce_extreme(g: GradientContext) -> None:
    """y = largest or smallest x over axes: dx = dy where x equals y, in equal shares where several do."""
    axes = _reduced_axes(g)
    dy = _broadcastable(g, axes, g.dy)
    if all(g.input_shape(0)[axis] == 1 for axis in axes):
        g.give(0, dy)
        return
    is_extreme = as_number(g, g.emit("Equal", g.x(0), _broadcastable(g, axes, g.y())))
    count = reduce_sum(g, is_extreme, axes, keepdims=True)
    g.give(0, g.emit("Mul", is_extreme, g.emit("Div", dy, count)))


def reduce_l1(g: GradientContext) -> None:
    """y = sum of |x| over axes: dx = dy sign(x), zero at zero."""
    dy = _broadcastable(g, _reduced_axes(g), g.dy)
    g.give(0, g.emit("Mul", g.emit("Sign", g.x(0)), dy))


def reduce_l2(g: GradientContext) -> None:
    """y = square root of the sum of x^2 over axes: dx = x dy / y, zero where all x are zero."""
    axes = _reduced_axes(g)
    share = g.emit("Mul", g.dy, reciprocal_or_zero(g, g.y()))
    g.give(0, g.emit("Mul", g.x(0), _broadcastable(g, axes, share)))


def reduce_sum_square(g: GradientContext) -> None:
    """y = sum of x^2 over axes: dx = 2 x dy."""
    twice = g.emit("Mul", g.dy, g.scalar(2.0))
    g.give(0, g.emit("Mul", g.x(0), _broadcastable(g, _reduced_axes(g), twice)))


def reduce_log_sum(g: GradientContext) -> None:
    """y = log of the sum of x over axes: dx = dy / exp(y), repeated."""
    g.give(0, _spread(g, g.emit("Div", g.dy, g.emit("Exp", g.y())), _reduced_axes(g)))


def reduce_log_sum_exp(g: GradientContext) -> None:
    """y = log of the sum of exp(x) over axes: dx = dy exp(x - y)."""
    axes = _reduced_axes(g)
    share = g.emit("Exp", g.emit("Sub", g.x(0), _broadcastable(g, axes, g.y())))
    g.give(0, g.emit("Mul", share, _broadcastable(g, axes, g.dy)))


def reduce_prod(g: GradientContext) -> None:
    """y = product of x over axes: dx = dy times the product of all other factors.

    With P the product of the nonzero factors, that product is P / x if no factor is zero; if one is, P at the
    zero and 0 elsewhere; if several are, 0.
    """
    axes = _reduced_axes(g)
    dy = _broadcastable(g, axes, g.dy)
    if all(g.input_shape(0)[axis] == 1 for axis in axes):
        g.give(0, dy)
        return
    is_zero = as_number(g, g.emit("Equal", g.x(0), g.scalar(0.0)))
    filled = g.emit("Add", g.x(0), is_zero)
    product = g.emit("ReduceProd", filled, g.ints(*axes), keepdims=1)
    zero_count = reduce_sum(g, is_zero, axes, keepdims=True)
    others = g.emit("Div", g.emit("Mul", dy, product), filled)
    is_nonzero = as_number(g, g.emit("Equal", is_zero, zero_count))
    g.give(0, g.emit("Mul", others, is_nonzero))


def softmax(g: GradientContext) -> None:
    """y = softmax(x) along an axis: dx = y dy - y sum(y dy)."""
    axis = int(g.attribute("axis", -1)) % len(g.output_shape())
    weighted = g.emit("Mul", g.dy, g.y())
    total = reduce_sum(g, weighted, (axis,), keepdims=True)
    g.give(0, g.emit("Sub", weighted, g.emit("Mul", g.y(), total)))


def masked_softmax(g: GradientContext) -> None:
    """Softmax whose rows without a finite x are NaN, which the model then replaces: their dx is 0."""
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
