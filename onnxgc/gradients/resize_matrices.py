"""The matrix [out, in] by which Resize multiplies each axis of a tensor.

The matrices follow ONNX Runtime's CPU kernel, in float32 as there: a coordinate rounded in another way
would select another element.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgc.model.core.ir import Array


@dataclass(frozen=True, slots=True)
class ResizeNode:
    """A Resize of static shapes; `setting` returns the value of its input `roi`, `scales` or `sizes`."""

    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    setting: Callable[[str], Array | None]

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


@dataclass(frozen=True, slots=True)
class AxisResampling:
    """A Resize along one axis.

    Each element of y is a weighted sum of elements of x: those at `places` [taps, out], with `weights`
    [taps, out].
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
        """How many times y repeats each element of x, if it repeats all equally often and in order."""
        times = self.count // self.extent
        is_even = len(self.places) == 1 and self.count == times * self.extent and (self.weights == 1).all()
        repeated = np.repeat(np.arange(self.extent), times)
        return times if is_even and np.array_equal(self.places[0], repeated) else None


@dataclass(frozen=True, slots=True)
class _Axis:
    """The numbers of one axis on which coordinates depend, in float32."""

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


def axis_resamplings(resize: ResizeNode) -> tuple[AxisResampling, ...]:
    """The resampling of each axis, in order."""
    mode = resize.attribute("mode", "nearest")
    transformation = resize.attribute("coordinate_transformation_mode", "half_pixel")
    scales, regions = _scales(resize), _regions(resize)
    found = []
    for index, (extent, count) in enumerate(zip(resize.shape, resize.output_shape, strict=True)):
        start, end = regions[index]
        axis = _Axis(np.float32(extent), np.float32(count), scales[index], start, end)
        y = np.arange(count, dtype=np.float32)
        x = y if axis.scale == 1 else np.asarray(_COORDINATES[transformation](y, axis), np.float32)
        if resize.attribute("antialias", 0):
            places, weights = _antialiased(resize, x, axis, extent)
        else:
            places, weights = _TAPS[mode](resize, x, extent)
        if transformation == "tf_crop_and_resize":
            # Outside x, y is a constant.
            weights = np.where((x < 0) | (x > extent - 1), 0, weights)
        used = weights.any(axis=1)
        places = np.clip(places[used], 0, extent - 1).astype(np.int64)
        found.append(AxisResampling(index, extent, places, weights[used]))
    return tuple(found)


def _axes(resize: ResizeNode) -> list[int]:
    rank = len(resize.shape)
    return [int(axis) % rank for axis in resize.attribute("axes") or range(rank)]


def _scales(resize: ResizeNode) -> list[np.float32]:
    """The scale of each axis, given or computed from sizes. Source: ONNX opset 18, Resize."""
    shape, axes = resize.shape, _axes(resize)
    scales = [np.float32(1)] * len(shape)
    given = resize.setting("scales")
    if given is not None and given.size:
        for axis, scale in zip(axes, given, strict=True):
            scales[axis] = np.float32(scale)
        return scales
    policy = resize.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        sizes = zip(resize.output_shape, shape, strict=True)
        return [np.float32(count) / np.float32(extent) for count, extent in sizes]
    sizes_given = resize.setting("sizes")
    assert sizes_given is not None, "a Resize has scales or sizes"
    wanted = [np.float32(size) / np.float32(shape[axis]) for axis, size in zip(axes, sizes_given, strict=True)]
    for axis in axes:
        scales[axis] = min(wanted) if policy == "not_larger" else max(wanted)
    return scales


def _regions(resize: ResizeNode) -> list[tuple[np.float32, np.float32]]:
    """Start and end of the part of each axis of x that y covers, as fractions of the axis."""
    regions = [(np.float32(0), np.float32(1))] * len(resize.shape)
    ends = None
    if resize.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        ends = resize.setting("roi")
    if ends is not None:
        axes = _axes(resize)
        for place, axis in enumerate(axes):
            regions[axis] = np.float32(ends[place]), np.float32(ends[len(axes) + place])
    return regions


def _nearest(resize: ResizeNode, x: Array, extent: int) -> tuple[Array, Array]:
    rounded = _NEAREST[resize.attribute("nearest_mode", "round_prefer_floor")](x.astype(np.float64))
    return rounded[None], np.ones((1, len(x)))


def _linear(resize: ResizeNode, x: Array, extent: int) -> tuple[Array, Array]:
    x = np.clip(x, 0, np.float32(extent - 1))
    low = np.floor(x)
    return np.stack([low, low + 1]), np.stack([1 - (x - low), x - low])


def _cubic(resize: ResizeNode, x: Array, extent: int) -> tuple[Array, Array]:
    """Source: Keys 1981, equation 4, with cubic_coeff_a as a."""
    low = np.floor(x)
    places = low + np.arange(-1, 3, dtype=np.float32)[:, None]
    weights = _cubic_weight(np.abs(x - places), float(resize.attribute("cubic_coeff_a", -0.75)))
    if resize.attribute("exclude_outside", 0):
        weights = np.where((places < 0) | (places >= extent), 0, weights)
        weights = weights / weights.sum(0)
    return places, weights


def _linear_weight(distance: Array, _: float) -> Array:
    return np.asarray(np.maximum(1 - distance, 0))


def _cubic_weight(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


_TAPS: Mapping[str, Callable[[ResizeNode, Array, int], tuple[Array, Array]]] = {
    "nearest": _nearest,
    "linear": _linear,
    "cubic": _cubic,
}
_ANTIALIAS_WEIGHTS: Mapping[str, tuple[Callable[[Array, float], Array], int]] = {
    "linear": (_linear_weight, 1),
    "cubic": (_cubic_weight, 2),
}


def _antialiased(resize: ResizeNode, x: Array, axis: _Axis, extent: int) -> tuple[Array, Array]:
    """With antialias: the mode's weights, stretched to cover all of x when it shrinks.

    Taps outside x read its first or last element; exclude_outside drops them.
    """
    if axis.count == axis.extent:
        return np.arange(extent)[None], np.ones((1, extent))
    weight, radius = _ANTIALIAS_WEIGHTS[resize.attribute("mode")]
    stretch = max(np.float32(1) / axis.scale, np.float32(1))
    centre, support = x + np.float32(0.5), radius * stretch
    first = np.floor(centre - support + np.float32(0.5))
    last = np.floor(centre + support + np.float32(0.5))
    places = first + np.arange(2 * math.ceil(support) + 1, dtype=np.float32)[:, None]
    distance = np.abs(places - centre + np.float32(0.5)) / stretch
    weights = np.where(places < last, weight(distance, float(resize.attribute("cubic_coeff_a", -0.75))), 0)
    if resize.attribute("exclude_outside", 0):
        weights = np.where((places < 0) | (places >= extent), 0, weights)
    total = weights.sum(0)
    return places, weights / np.where(total == 0, 1, total)
