"""Gradients of resampling: images in another size, or read at given points.

Resize works along each axis by a fixed matrix [out, in], since shapes and scales are static, so its
gradient is the product with the transposed one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.broadcasting import Sums, is_narrow, reduce_sum, reshape, zeros
from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.resizing import Resampling, Resize, resamplings
from onnxgc.model.core.ir import Array

# The matrix has few elements beside its diagonal, so that it is cut into blocks along x: with these, its
# product takes about as long as Resize does. Longer axes would have too large blocks, or too many.
_SMALLEST_BLOCK = 32
_MOST_BLOCKS = 16
_LONGEST_BY_BLOCKS = 4096
_POOLED_AXES = 3


def resize(g: GradientContext) -> None:
    """y = x in another size: dx = dy times the transposed matrix of each axis.

    Raises:
        UnsupportedOperatorError: scales, region or sizes are computed in the graph and decide more than
            the shape of y.
    """
    shape = g.input_shape(0)
    if 0 in shape or 0 in g.output_shape():
        g.give(0, zeros(g, shape))
        return
    # With no size changed the kernel copies, whatever the scales are.
    resampled = () if g.output_shape() == shape else resamplings(_resize(g))
    changed = [along for along in resampled if along.repeats != 1]
    # The axis that shrinks most comes first, so that what lies between is small.
    changed.sort(key=lambda along: (-along.count / along.extent, along.axis))
    if _suits_pooling(changed, len(shape)):
        g.give(0, _pooled(g, changed))
        return
    gradient, sizes = g.dy, list(g.output_shape())
    for along in changed:
        form = _by_blocks if along.extent <= _LONGEST_BY_BLOCKS else _by_taps
        gradient = form(g, along, gradient, sizes)
        sizes[along.axis] = along.extent
    g.give(0, gradient)


_SETTINGS = {"roi": (1, "region"), "scales": (2, "scales"), "sizes": (3, "sizes")}


def _resize(g: GradientContext) -> Resize:
    def setting(name: str) -> Array | None:
        index, what = _SETTINGS[name]
        is_given = g.has_input(index) and g.input_shape(index) != (0,)
        return _constant(g, index, what) if is_given else None

    return Resize(g.input_shape(0), g.output_shape(), g.node.attributes, setting)


def _constant(g: GradientContext, index: int, what: str) -> Array:
    value = g.constant_input(index)
    if value is None:
        raise UnsupportedOperatorError(
            f"{g.node.place} computes its {what} in the graph, which has no "
            f"gradient rule; export the model with constant {what}"
        )
    return value.reshape(-1)


def _suits_pooling(changed: Sequence[Resampling], rank: int) -> bool:
    """Whether every element of x is repeated along some of the last axes."""
    return bool(changed) and all(
        along.repeats is not None and along.axis >= max(rank - _POOLED_AXES, 0) for along in changed
    )


def _pooled(g: GradientContext, changed: Sequence[Resampling]) -> str:
    """Sums of blocks of dy, as means times their size: pooling is the fastest that runtimes have."""
    shape, first = g.output_shape(), min(along.axis for along in changed)
    times = {along.axis: along.count // along.extent for along in changed}
    kernel = [times.get(axis, 1) for axis in range(first, len(shape))]
    images = shape[:first] if first == 2 else (1, math.prod(shape[:first]))
    gradient = g.dy if first == 2 else reshape(g, g.dy, (*images, *shape[first:]))
    gradient = g.emit("AveragePool", gradient, kernel_shape=kernel, strides=kernel)
    gradient = g.emit("Mul", gradient, g.scalar(float(math.prod(kernel))))
    return gradient if first == 2 else reshape(g, gradient, g.input_shape(0))


def _by_blocks(g: GradientContext, along: Resampling, gradient: str, sizes: Sequence[int]) -> str:
    """For each block of x, the product of what it is part of in y with the matrix between them."""
    lead, tail = math.prod(sizes[: along.axis]), math.prod(sizes[along.axis + 1 :])
    is_last, matrix = tail == 1, along.matrix
    flat = reshape(g, gradient, (lead, along.count) if is_last else (lead, along.count, tail))
    parts = []
    size = max(_SMALLEST_BLOCK, math.ceil(along.extent / _MOST_BLOCKS))
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
    return reshape(g, joined, _replaced(sizes, along))


def _by_taps(g: GradientContext, along: Resampling, gradient: str, sizes: Sequence[int]) -> str:
    """Additions to zeros, one tap of the window at a time: the matrix would be large and almost empty."""
    lead, tail = math.prod(sizes[: along.axis]), math.prod(sizes[along.axis + 1 :])
    flat = reshape(g, gradient, (lead, along.count, tail))
    total = Sums.from_zeros(g, (lead, along.extent, tail), 1)
    for places, weights in zip(along.places, along.weights, strict=True):
        values = flat
        if (weights != 1).any():
            values = g.emit("Mul", flat, g.tensor(weights[:, None]))
        indices = g.constants.add(places[:, None].astype(np.int32))
        total.add(g.emit("Expand", indices, g.ints(lead, along.count, tail)), values)
    return reshape(g, total.result(), _replaced(sizes, along))


def _replaced(sizes: Sequence[int], along: Resampling) -> tuple[int, ...]:
    return tuple(along.extent if axis == along.axis else size for axis, size in enumerate(sizes))


# Weights of the elements around a point at t behind the middle one, as polynomials in t, by their offset.
# Source: Keys 1981, equation 4, with a = -0.75.
_POLYNOMIALS: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "nearest": {0: (1,)},
    "linear": {0: (1, -1), 1: (0, 1)},
    "cubic": {
        -1: (0, -0.75, 1.5, -0.75),
        0: (1, 0, -2.25, 1.25),
        1: (0, 0.75, 1.5, -1.25),
        2: (0, 0, -0.75, 0.75),
    },
}
_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@dataclass(frozen=True, slots=True)
class _Tap:
    """One element along one axis of x that a point reads: tensors [N, 1, P].

    Its index, its weight, and the slope of the weight along the axis; none where it is always 0, 1 and 0.
    """

    index: str | None
    weight: str | None
    slope: str | None


def grid_sample(g: GradientContext) -> None:
    """y = x at the points of a grid, by the elements around each: y = sum of weights times elements.

    x: [N, C, sizes...], grid: [N, points..., d], where the last coordinate belongs to the first size, and P
    is the number of points. dx = dy times the weights, added to the elements; dgrid = dy times the elements
    and the slopes of the weights, summed over the channels. Padding is that of ONNX Runtime: it maps each
    element's index, not the point. As there, narrower types are computed in float32.
    """
    shape, grid = g.input_shape(0), g.input_shape(1)
    if 0 in (*shape, *grid):
        for index in (0, 1):
            if g.wants(index):
                g.give(index, zeros(g, g.input_shape(index)))
        return
    batch, channels, *sizes = shape
    count = math.prod(grid[1:-1])
    sampled = (batch, channels, count)
    taps = [_taps_along(g, axis, len(sizes) - 1 - axis) for axis in range(len(sizes))]
    dy = _wide(g, reshape(g, g.dy, sampled))
    if g.wants(1):
        x = _wide(g, reshape(g, g.x(0), (batch, channels, math.prod(sizes))))
        g.give(1, _narrowed(g, _grid_gradient(g, x, dy, taps)))
    if not g.wants(0):
        return
    total = _zeros(g, (batch, channels, math.prod(sizes)))
    for around in itertools.product(*taps):
        weight = _product(g, [tap.weight for tap in around])
        values = dy if weight is None else g.emit("Mul", dy, weight)
        places = g.emit("Expand", _flat_index(g, around), g.ints(*sampled))
        total = g.emit("ScatterElements", total, places, values, axis=2, reduction="add")
    g.give(0, _narrowed(g, reshape(g, total, shape)))


def _number(g: GradientContext, value: float) -> str:
    return g.constants.add(np.asarray(value, np.float32)) if is_narrow(g) else g.scalar(value)


def _zeros(g: GradientContext, shape: tuple[int, ...]) -> str:
    return g.emit("Expand", _number(g, 0.0), g.ints(*shape))


def _wide(g: GradientContext, tensor: str) -> str:
    return g.emit("Cast", tensor, to=onnx.TensorProto.FLOAT) if is_narrow(g) else tensor


def _narrowed(g: GradientContext, tensor: str) -> str:
    return g.emit("Cast", tensor, to=g.input_type(0).dtype) if is_narrow(g) else tensor


def _taps_along(g: GradientContext, axis: int, coordinate: int) -> list[_Tap]:
    """The elements along one axis, from first to last."""
    extent, grid = g.input_shape(0)[2 + axis], g.input_shape(1)
    count, mode = math.prod(grid[1:-1]), g.attribute("mode", "linear")
    mode = _MODES.get(mode, mode)
    if extent == 1 and g.attribute("padding_mode", "zeros") != "zeros":
        return [_Tap(None, None, None)]
    points = _wide(g, reshape(g, g.x(1), (grid[0], count, grid[-1])))
    along = g.emit("Slice", points, g.ints(coordinate), g.ints(coordinate + 1), g.ints(2))
    place = _place(g, reshape(g, along, (grid[0], 1, count)), extent)
    middle = g.emit("Round" if mode == "nearest" else "Floor", place)
    behind = "" if mode == "nearest" else g.emit("Sub", place, middle)
    stride = math.prod(g.input_shape(0)[3 + axis :])
    taps = []
    for offset, polynomial in _POLYNOMIALS[mode].items():
        index = g.emit("Add", middle, _number(g, offset)) if offset else middle
        index, inside = _padded_index(g, index, extent)
        weight, slope = _product(g, [_evaluated(g, polynomial, behind), inside]), None
        if g.wants(1) and mode != "nearest":
            slopes = [power * factor for power, factor in enumerate(polynomial)][1:]
            slope = _product(g, [_evaluated(g, slopes, behind), inside]) or _number(g, 1.0)
        index = g.emit("Cast", index, to=onnx.TensorProto.INT32)
        if stride > 1:
            index = g.emit("Mul", index, g.constants.add(np.asarray(stride, np.int32)))
        taps.append(_Tap(index, weight, slope))
    return taps


def _place(g: GradientContext, points: str, extent: int) -> str:
    """Points in [-1, 1] as places in an axis, computed as ONNX Runtime does, to the last bit."""
    from_zero = g.emit("Add", points, _number(g, 1.0))
    if g.attribute("align_corners", 0):
        return g.emit("Mul", g.emit("Mul", from_zero, _number(g, 0.5)), _number(g, extent - 1))
    scaled = g.emit("Sub", g.emit("Mul", from_zero, _number(g, extent)), _number(g, 1.0))
    return g.emit("Mul", scaled, _number(g, 0.5))


def _padded_index(g: GradientContext, index: str, extent: int) -> tuple[str, str | None]:
    """Where an index is read that may lie outside of x, and for zeros where it does not (1, else 0)."""
    mode = g.attribute("padding_mode", "zeros")
    if mode == "reflection" and extent > 1:
        # A wave between both ends of x, which lie on its first and last element or half of one beyond.
        low = 0.0 if g.attribute("align_corners", 0) else -0.5
        span = extent - 1 - 2 * low
        distance = g.emit("Abs", g.emit("Sub", index, _number(g, low)) if low else index)
        wave = g.emit("Mod", distance, _number(g, 2 * span), fmod=1)
        wave = g.emit("Abs", g.emit("Sub", wave, _number(g, span)))
        index = g.emit("Sub", _number(g, low + span), wave)
    clipped = g.emit("Clip", index, _number(g, 0.0), _number(g, extent - 1))
    if mode != "zeros":
        return clipped, None
    dtype = onnx.TensorProto.FLOAT if is_narrow(g) else g.input_type(0).dtype
    return clipped, g.emit("Cast", g.emit("Equal", index, clipped), to=dtype)


def _evaluated(g: GradientContext, polynomial: Sequence[float], at: str) -> str | None:
    """The polynomial by Horner's rule; None stands for 1."""
    *lower, highest = polynomial
    value = None if highest == 1 else _number(g, highest)
    for factor in reversed(lower):
        value = at if value is None else g.emit("Mul", value, at)
        value = g.emit("Add", value, _number(g, factor)) if factor else value
    return value


def _product(g: GradientContext, factors: Sequence[str | None]) -> str | None:
    """None stands for 1."""
    product = None
    for factor in filter(None, factors):
        product = g.emit("Mul", product, factor) if product else factor
    return product


def _flat_index(g: GradientContext, around: Sequence[_Tap]) -> str:
    index, *others = [tap.index for tap in around if tap.index is not None] or [
        g.constants.add(np.zeros(1, np.int32))
    ]
    for other in others:
        index = g.emit("Add", index, other)
    return index


def _grid_gradient(g: GradientContext, x: str, dy: str, taps: Sequence[Sequence[_Tap]]) -> str:
    grid = g.input_shape(1)
    batch, channels = g.input_shape(0)[:2]
    count = math.prod(grid[1:-1])
    totals = [""] * len(taps)
    if all(tap.slope is None for along in taps for tap in along):
        return _zeros(g, grid)
    for around in itertools.product(*taps):
        places = g.emit("Expand", _flat_index(g, around), g.ints(batch, channels, count))
        elements = g.emit("GatherElements", x, places, axis=2)
        share = reduce_sum(g, g.emit("Mul", elements, dy), (1,), keepdims=True)
        for axis, tap in enumerate(around):
            if tap.slope is None:
                continue
            others = (other.weight for other in around if other is not tap)
            term = str(_product(g, [share, tap.slope, *others]))
            totals[axis] = g.emit("Add", totals[axis], term) if totals[axis] else term
    coordinates = []
    for axis, total in reversed(list(enumerate(totals))):
        if not total:
            coordinates.append(_zeros(g, (batch, count, 1)))
            continue
        extent = g.input_shape(0)[2 + axis]
        scale = (extent - 1) / 2 if g.attribute("align_corners", 0) else extent / 2
        coordinates.append(reshape(g, g.emit("Mul", total, _number(g, scale)), (batch, count, 1)))
    return reshape(g, g.emit("Concat", *coordinates, axis=2), grid)
