"""Shape helpers that gradient rules share."""

from __future__ import annotations

from onnxgc.gradients.engine import GradientContext


def reshape(g: GradientContext, tensor: str, shape: tuple[int, ...]) -> str:
    """A view of `tensor` with a static shape; costs no memory."""
    if 0 in shape:
        return g.emit("Reshape", tensor, g.ints(*shape), allowzero=1)
    return g.emit("Reshape", tensor, g.ints(*shape))


def zeros(g: GradientContext, shape: tuple[int, ...]) -> str:
    """Zeros of the element type of input 0."""
    return g.emit("Expand", g.scalar(0.0), g.ints(*shape))


def reduce_sum(g: GradientContext, tensor: str, axes: tuple[int, ...], *, keepdims: bool = False) -> str:
    return g.emit("ReduceSum", tensor, g.ints(*axes), keepdims=int(keepdims))


def unbroadcast(g: GradientContext, tensor: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Sum `tensor` of `shape` over the axes along which `target` was broadcast to it."""
    if shape == target:
        return tensor
    lead = len(shape) - len(target)
    axes = tuple(range(lead)) + tuple(
        lead + axis for axis, size in enumerate(target) if size == 1 and shape[lead + axis] != 1
    )
    if axes:
        tensor = reduce_sum(g, tensor, axes, keepdims=True)
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tensor if shape == target else reshape(g, tensor, target)


def per_channel(g: GradientContext, vector: str, rank: int) -> str:
    """A vector [C] as [1, C, 1, ...] of the given rank, to broadcast over [N, C, ...].

    By Reshape: a runtime would merge an Unsqueeze with the barrier in front of it and lose both.
    """
    return reshape(g, vector, (1, g.input_shape(0)[1], *(1,) * (rank - 2)))
