"""Gradients of reductions and of softmax."""

from __future__ import annotations

import math

from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import reduce_sum, reshape


def _reduced_axes(g: GradientContext) -> tuple[int, ...]:
    """Axes that the reduction removes or leaves as 1. Source: ONNX opset 18, ReduceSum."""
    rank = len(g.input_shape(0))
    axes = g.constant_input(1)
    if axes is not None and axes.size:
        return tuple(sorted(int(axis) % rank for axis in axes))
    return () if g.attribute("noop_with_empty_axes", 0) else tuple(range(rank))


def _spread(g: GradientContext, gradient: str, axes: tuple[int, ...]) -> str:
    """dy repeated along the reduced axes."""
    shape = g.input_shape(0)
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    if kept != g.output_shape():
        gradient = reshape(g, gradient, kept)
    return gradient if kept == shape else g.emit("Expand", gradient, g.ints(*shape))


def reduce_sum_rule(g: GradientContext) -> None:
    """y = sum of x over axes: dx = dy repeated."""
    g.give(0, _spread(g, g.dy, _reduced_axes(g)))


def reduce_mean(g: GradientContext) -> None:
    """y = mean of x over axes: dx = dy / count, repeated."""
    axes = _reduced_axes(g)
    count = math.prod(g.input_shape(0)[axis] for axis in axes)
    g.give(0, _spread(g, g.emit("Div", g.dy, g.scalar(count)), axes))


def softmax(g: GradientContext) -> None:
    """y = softmax(x) along an axis: dx = y dy - y sum(y dy)."""
    axis = int(g.attribute("axis", -1)) % len(g.output_shape())
    weighted = g.emit("Mul", g.dy, g.y())
    total = reduce_sum(g, weighted, (axis,), keepdims=True)
    g.give(0, g.emit("Sub", weighted, g.emit("Mul", g.y(), total)))


def log_softmax(g: GradientContext) -> None:
    """y = log softmax(x) along an axis: dx = dy - exp(y) sum(dy)."""
    axis = int(g.attribute("axis", -1)) % len(g.output_shape())
    total = reduce_sum(g, g.dy, (axis,), keepdims=True)
    g.give(0, g.emit("Sub", g.dy, g.emit("Mul", g.emit("Exp", g.y()), total)))
