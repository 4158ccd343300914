"""Gradients of resampling: images in another size, or read at given points.

Resize works along each axis by a fixed matrix [out, in], since shapes and scales are static, so its
gradient is the product with the transposed one. The matrices follow ONNX Runtime's CPU kernel, in
float32 as there: a coordinate that is rounded otherwise picks another element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import Sums, is_narrow, reduce_sum, reshape, zeros
from onnxgc.model.ir import Array


@dataclass(frozen=True, slots=True)
class Resampling:
    """What a Resize does along one axis.

    Each of the elements of y is the sum of some elements of x: `places` [taps, out] says which, and
    `weights` [taps, out] with what weights.
    """

    axis: int
    extent: int
    places: Array
    weights: Array

    @property
    def count(self) -> int:
        return int(self.places.shape[1])

    @property
    def matrix(self) -> Array:
        """[out, in]."""
        matrix = np.zeros((self.count, self.extent))
        for places, weights in zip(self.places, self.weights, strict=True):
            np.add.at(matrix, (np.arange(self.count), places), weights)
        return matrix

    @property
    def repeats(self) -> int | None:
        """How often each element of x is in y, where all of them are as often, in order."""
        times = self.count // self.extent
        is_even = len(self.places) == 1 and self.count == times * self.extent and (self.weights == 1).all()
        repeated = np.repeat(np.arange(self.extent), times)
        return times if is_even and np.array_equal(self.places[0], repeated) else None


@dataclass(frozen=True, slots=True)
class _Axis:
    """Numbers of one axis that coordinates depend on, in float32."""

    extent: np.float32
    count: np.float32
    scale: np.float32
    start: np.float32
    end: np.float32


def _half_pixel(y: Array, axis: _Axis) -> Array:
    return (y + np.float32(0.5)) / axis.scale - np.float32(0.5)


def _half_pixel_symmetric(y: Array, axis: _Axis) -> Array:
    adjustment = axis.count / (axis.scale * axis.extent)
    offset = axis.extent / np.float32(2) * (np.float32(1) - adjustment)
    return np.asarray(offset + (y.astype(np.float64) + 0.5) / axis.scale - 0.5, np.float32)


def _align_corners(y: Array, axis: _Axis) -> Array:
    return y * (axis.extent - 1) / (axis.count - 1) if axis.count > 1 else np.zeros_like(y)


def _crop_and_resize(y: Array, axis: _Axis) -> Array:
    last = axis.extent - 1
    if axis.count > 1:
        return axis.start * last + y * (axis.end - axis.start) * last / (axis.count - 1)
    return np.full_like(y, 0.5 * (axis.start + axis.end) * last)


# Source: ONNX opset 18, Resize, coordinate_transformation_mode.
_COORDINATES: Mapping[str, Callable[[Array, _Axis], Array]] = {
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": lambda y, axis: _half_pixel(y, axis) if axis.count > 1 else np.zeros_like(y),
    "align_corners": _align_corners,
    "asymmetric": lambda y, axis: y / axis.scale,
    "tf_half_pixel_for_nn": lambda y, axis: (y + np.float32(0.5)) / axis.scale,
    "tf_crop_and_resize": _crop_and_resize,
}
_NEAREST: Mapping[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}
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
    resampled = () if g.output_shape() == shape else _resamplings(g)
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


def _resamplings(g: GradientContext) -> tuple[Resampling, ...]:
    mode = g.attribute("mode", "nearest")
    transformation = g.attribute("coordinate_transformation_mode", "half_pixel")
    scales, regions = _scales(g), _regions(g)
    found = []
    for index, (extent, count) in enumerate(zip(g.input_shape(0), g.output_shape(), strict=True)):
        start, end = regions[index]
        axis = _Axis(np.float32(extent), np.float32(count), scales[index], start, end)
        y = np.arange(count, dtype=np.float32)
        x = y if axis.scale == 1 else np.asarray(_COORDINATES[transformation](y, axis), np.float32)
        if g.attribute("antialias", 0):
            places, weights = _window(g, x, axis, extent)
        else:
            places, weights = _TAPS[mode](g, x, extent)
        if transformation == "tf_crop_and_resize":
            # Outside of x y is a constant.
            weights = np.where((x < 0) | (x > extent - 1), 0, weights)
        used = weights.any(axis=1)
        places = np.clip(places[used], 0, extent - 1).astype(np.int64)
        found.append(Resampling(index, extent, places, weights[used]))
    return tuple(found)


def _axes(g: GradientContext) -> list[int]:
    rank = len(g.input_shape(0))
    return [int(axis) % rank for axis in g.attribute("axes") or range(rank)]


def _scales(g: GradientContext) -> list[np.float32]:
    """The scale of each axis: as given, or from the sizes. Source: ONNX opset 18, Resize."""
    shape, axes = g.input_shape(0), _axes(g)
    scales = [np.float32(1)] * len(shape)
    if g.has_input(2) and g.input_shape(2) != (0,):
        for axis, scale in zip(axes, _constant(g, 2, "scales"), strict=True):
            scales[axis] = np.float32(scale)
        return scales
    policy = g.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        sizes = zip(g.output_shape(), shape, strict=True)
        return [np.float32(count) / np.float32(extent) for count, extent in sizes]
    wanted = [
        np.float32(size) / np.float32(shape[axis])
        for axis, size in zip(axes, _constant(g, 3, "sizes"), strict=True)
    ]
    for axis in axes:
        scales[axis] = min(wanted) if policy == "not_larger" else max(wanted)
    return scales


def _regions(g: GradientContext) -> list[tuple[np.float32, np.float32]]:
    """Start and end of the part of each axis of x that y shows, in shares of it."""
    regions = [(np.float32(0), np.float32(1))] * len(g.input_shape(0))
    if g.attribute("coordinate_transformation_mode") == "tf_crop_and_resize" and g.has_input(1):
        axes, ends = _axes(g), _constant(g, 1, "region")
        for place, axis in enumerate(axes):
            regions[axis] = np.float32(ends[place]), np.float32(ends[len(axes) + place])
    return regions


def _constant(g: GradientContext, index: int, what: str) -> Array:
    value = g.constant_input(index)
    if value is None:
        raise UnsupportedOperatorError(
            f"{g.node.op} '{g.node.origin or g.node.name}' computes its {what} in the graph, which has no "
            f"gradient rule; export the model with constant {what}"
        )
    return value.reshape(-1)


def _nearest(g: GradientContext, x: Array, extent: int) -> tuple[Array, Array]:
    rounded = _NEAREST[g.attribute("nearest_mode", "round_prefer_floor")](x.astype(np.float64))
    return rounded[None], np.ones((1, len(x)))


def _linear(g: GradientContext, x: Array, extent: int) -> tuple[Array, Array]:
    x = np.clip(x, 0, np.float32(extent - 1))
    low = np.floor(x)
    return np.stack([low, low + 1]), np.stack([1 - (x - low), x - low])


def _cubic(g: GradientContext, x: Array, extent: int) -> tuple[Array, Array]:
    """Source: Keys 1981, equation 4, with the coefficient for a."""
    low = np.floor(x)
    places = low + np.arange(-1, 3, dtype=np.float32)[:, None]
    weights = _cubic_weight(np.abs(x - places), float(g.attribute("cubic_coeff_a", -0.75)))
    if g.attribute("exclude_outside", 0):
        weights = np.where((places < 0) | (places >= extent), 0, weights)
        weights = weights / weights.sum(0)
    return places, weights


def _linear_weight(distance: Array, _: float) -> Array:
    return np.asarray(np.maximum(1 - distance, 0))


def _cubic_weight(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


_TAPS: Mapping[str, Callable[[GradientContext, Array, int], tuple[Array, Array]]] = {
    "nearest": _nearest,
    "linear": _linear,
    "cubic": _cubic,
}


_STRETCHED: Mapping[str, tuple[Callable[[Array, float], Array], int]] = {
    "linear": (_linear_weight, 1),
    "cubic": (_cubic_weight, 2),
}


def _window(g: GradientContext, x: Array, axis: _Axis, extent: int) -> tuple[Array, Array]:
    """With antialias: the mode's weights, stretched so that they reach all of x when it shrinks.

    What lies outside of x counts for its first or last element, or with exclude_outside not at all.
    """
    if axis.count == axis.extent:
        return np.arange(extent)[None], np.ones((1, extent))
    weight, radius = _STRETCHED[g.attribute("mode")]
    stretch = max(np.float32(1) / axis.scale, np.float32(1))
    centre, support = x + np.float32(0.5), radius * stretch
    first = np.floor(centre - support + np.float32(0.5))
    last = np.floor(centre + support + np.float32(0.5))
    places = first + np.arange(2 * math.ceil(support) + 1, dtype=np.float32)[:, None]
    distance = np.abs(places - centre + np.float32(0.5)) / stretch
    weights = np.where(places < last, weight(distance, float(g.attribute("cubic_coeff_a", -0.75))), 0)
    if g.attribute("exclude_outside", 0):
        weights = np.where((places < 0) | (places >= extent), 0, weights)
    total = weights.sum(0)
    return places, weights / np.where(total == 0, 1, total)


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
