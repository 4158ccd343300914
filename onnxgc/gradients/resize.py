"""Gradient of Resize.

Shapes and scales are static, so Resize is a product with a fixed matrix [out, in] along each axis, and its
gradient is the product with the transposed matrix.
"""

import math
from collections.abc import Sequence

import numpy as np

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.resize_matrices import AxisResampling, ResizeNode, axis_resamplings
from onnxgc.gradients.rule_helpers import Sums, reshape, zeros
from onnxgc.model.core.ir import Array

# The matrix is nearly diagonal, so it is split into blocks along x: their products take about as long as
# Resize itself. Longer axes would need too many blocks, or too large ones.
_MIN_BLOCK_SIZE = 32
_MAX_BLOCKS = 16
_MAX_EXTENT_BY_BLOCKS = 4096
_MAX_POOLED_AXES = 3


def resize(g: GradientContext) -> None:
    """y = x resized: dx = dy times the transposed matrix of each axis.

    Raises:
        UnsupportedOperatorError: scales, region or sizes are computed in the graph and affect more than the
            shape of y.
    """
    shape = g.input_shape(0)
    if 0 in shape or 0 in g.output_shape():
        g.give(0, zeros(g, shape))
        return
    # If no size changes, the kernel copies regardless of the scales.
    resampled = () if g.output_shape() == shape else axis_resamplings(_node(g))
    changed = [along for along in resampled if along.repeats != 1]
    # The axis that shrinks most comes first, to keep intermediate tensors small.
    changed.sort(key=lambda along: (-along.count / along.extent, along.axis))
    if _is_repetition(changed, len(shape)):
        g.give(0, _block_sums(g, changed))
        return
    gradient, sizes = g.dy, list(g.output_shape())
    for along in changed:
        form = _by_blocks if along.extent <= _MAX_EXTENT_BY_BLOCKS else _by_taps
        gradient = form(g, along, gradient, sizes)
        sizes[along.axis] = along.extent
    g.give(0, gradient)


_SETTINGS = {"roi": (1, "region"), "scales": (2, "scales"), "sizes": (3, "sizes")}


def _node(g: GradientContext) -> ResizeNode:
    def setting(name: str) -> Array | None:
        index, what = _SETTINGS[name]
        is_given = g.has_input(index) and g.input_shape(index) != (0,)
        return g.required_constant(index, what).reshape(-1) if is_given else None

    return ResizeNode(g.input_shape(0), g.output_shape(), g.node.attributes, setting)


def _is_repetition(changed: Sequence[AxisResampling], rank: int) -> bool:
    """Whether y repeats every element of x equally often, along some of the last axes."""
    return bool(changed) and all(
        along.repeats is not None and along.axis >= max(rank - _MAX_POOLED_AXES, 0) for along in changed
    )


def _block_sums(g: GradientContext, changed: Sequence[AxisResampling]) -> str:
    """Sums of blocks of dy, as means times block size: pooling is the fastest kernel that runtimes have."""
    shape, first = g.output_shape(), min(along.axis for along in changed)
    times = {along.axis: along.count // along.extent for along in changed}
    kernel = [times.get(axis, 1) for axis in range(first, len(shape))]
    images = shape[:first] if first == 2 else (1, math.prod(shape[:first]))
    gradient = g.dy if first == 2 else reshape(g, g.dy, (*images, *shape[first:]))
    gradient = g.emit("AveragePool", gradient, kernel_shape=kernel, strides=kernel)
    gradient = g.emit("Mul", gradient, g.scalar(float(math.prod(kernel))))
    return gradient if first == 2 else reshape(g, gradient, g.input_shape(0))


def _by_blocks(g: GradientContext, along: AxisResampling, gradient: str, sizes: Sequence[int]) -> str:
    """Product with the matrix, block by block of x: each reads only the part of dy that it contributes to."""
    lead, tail = math.prod(sizes[: along.axis]), math.prod(sizes[along.axis + 1 :])
    is_last, matrix = tail == 1, along.matrix
    flat = reshape(g, gradient, (lead, along.count) if is_last else (lead, along.count, tail))
    parts = []
    size = max(_MIN_BLOCK_SIZE, math.ceil(along.extent / _MAX_BLOCKS))
    for start in range(0, along.extent, size):
        block = matrix[:, start : start + size]
        rows = np.flatnonzero(block.any(axis=1)) if along.extent > size else np.arange(along.count)
        low, high = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 1)
        part = flat
        if high - low < along.count:
            part = g.emit("Slice", flat, g.ints(low), g.ints(high), g.ints(1))
        factor = block[low:high]
        operands = (part, g.tensor(factor)) if is_last else (g.tensor(factor.T), part)
        parts.append(g.emit("MatMul", *operands))
    joined = parts[0] if len(parts) == 1 else g.emit("Concat", *parts, axis=1)
    return reshape(g, joined, _resampled_shape(sizes, along))


def _by_taps(g: GradientContext, along: AxisResampling, gradient: str, sizes: Sequence[int]) -> str:
    """Additions to zeros, one tap of the window at a time: the matrix would be large and sparse."""
    lead, tail = math.prod(sizes[: along.axis]), math.prod(sizes[along.axis + 1 :])
    flat = reshape(g, gradient, (lead, along.count, tail))
    total = Sums.from_zeros(g, (lead, along.extent, tail), 1)
    for places, weights in zip(along.places, along.weights, strict=True):
        values = flat
        if (weights != 1).any():
            values = g.emit("Mul", flat, g.tensor(weights[:, None]))
        indices = g.constants.add(places[:, None].astype(np.int32))
        total.add(g.emit("Expand", indices, g.ints(lead, along.count, tail)), values)
    return reshape(g, total.result(), _resampled_shape(sizes, along))


def _resampled_shape(sizes: Sequence[int], along: AxisResampling) -> tuple[int, ...]:
    return tuple(along.extent if axis == along.axis else size for axis, size in enumerate(sizes))
