"""Gradient of GridSample: interpolation at the points of a grid."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import is_narrow, reduce_sum, reshape, zeros

# Weights of the elements around a point, by offset from the middle one, as polynomials in the distance t
# from the middle element to the point.
# Source: Keys 1981, equation 4, with a = -0.75.
_POLYNOMIALS: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "nearest": {0: (1,)},
    "linear": {0: (1, -1), 1: (0, 1)},
    "cubic": {-1: (0, -0.75, 1.5, -0.75), 0: (1, 0, -2.25, 1.25), 1: (0, 0.75, 1.5, -1.25), 2: (0, 0, -0.75, 0.75)},
}
_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@dataclass(frozen=True, slots=True)
class _Tap:
    """One of the elements along one axis of x that each point reads: tensors [N, 1, P].

    The element's index, its weight and the slope of the weight along the axis. None means that the index is
    always 0, the weight 1, the slope 0.
    """

    index: str | None
    weight: str | None
    slope: str | None


def grid_sample(g: GradientContext) -> None:
    """y = x interpolated at the points of a grid: the weighted sum of the elements around each point.

    x: [N, C, sizes...], grid: [N, points..., d]; the last coordinate belongs to the first size; P is the
    number of points. dx = dy times the weights, added at the elements; dgrid = dy times the elements and the
    slopes of the weights, summed over the channels. As in ONNX Runtime, padding maps the index of each
    element, not the point, and narrower types are computed in float32.
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
    dy = _widened(g, reshape(g, g.dy, sampled))
    if g.wants(1):
        x = _widened(g, reshape(g, g.x(0), (batch, channels, math.prod(sizes))))
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


def _widened(g: GradientContext, tensor: str) -> str:
    return g.emit("Cast", tensor, to=onnx.TensorProto.FLOAT) if is_narrow(g) else tensor


def _narrowed(g: GradientContext, tensor: str) -> str:
    return g.emit("Cast", tensor, to=g.input_type(0).dtype) if is_narrow(g) else tensor


def _taps_along(g: GradientContext, axis: int, coordinate: int) -> list[_Tap]:
    """The taps along one axis, in order."""
    extent, grid = g.input_shape(0)[2 + axis], g.input_shape(1)
    count, mode = math.prod(grid[1:-1]), g.attribute("mode", "linear")
    mode = _MODES.get(mode, mode)
    if extent == 1 and g.attribute("padding_mode", "zeros") != "zeros":
        return [_Tap(None, None, None)]
    points = _widened(g, reshape(g, g.x(1), (grid[0], count, grid[-1])))
    along = g.emit("Slice", points, g.ints(coordinate), g.ints(coordinate + 1), g.ints(2))
    position = _position(g, reshape(g, along, (grid[0], 1, count)), extent)
    middle = g.emit("Round" if mode == "nearest" else "Floor", position)
    distance = "" if mode == "nearest" else g.emit("Sub", position, middle)
    stride = math.prod(g.input_shape(0)[3 + axis :])
    taps = []
    for offset, polynomial in _POLYNOMIALS[mode].items():
        index = g.emit("Add", middle, _number(g, offset)) if offset else middle
        index, inside = _padded_index(g, index, extent)
        weight, slope = _product(g, [_polynomial(g, polynomial, distance), inside]), None
        if g.wants(1) and mode != "nearest":
            slopes = [power * factor for power, factor in enumerate(polynomial)][1:]
            slope = _product(g, [_polynomial(g, slopes, distance), inside]) or _number(g, 1.0)
        index = g.emit("Cast", index, to=onnx.TensorProto.INT32)
        if stride > 1:
            index = g.emit("Mul", index, g.constants.add(np.asarray(stride, np.int32)))
        taps.append(_Tap(index, weight, slope))
    return taps


def _position(g: GradientContext, points: str, extent: int) -> str:
    """Points in [-1, 1] as positions along an axis, bit for bit as ONNX Runtime computes them."""
    from_zero = g.emit("Add", points, _number(g, 1.0))
    if g.attribute("align_corners", 0):
        return g.emit("Mul", g.emit("Mul", from_zero, _number(g, 0.5)), _number(g, extent - 1))
    scaled = g.emit("Sub", g.emit("Mul", from_zero, _number(g, extent)), _number(g, 1.0))
    return g.emit("Mul", scaled, _number(g, 0.5))


def _padded_index(g: GradientContext, index: str, extent: int) -> tuple[str, str | None]:
    """The index that is read after padding, and, for mode zeros, 1 where it is inside x, else 0."""
    mode = g.attribute("padding_mode", "zeros")
    if mode == "reflection" and extent > 1:
        # A triangle wave between the ends of x: its first and last element, or half an element beyond them.
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


def _polynomial(g: GradientContext, polynomial: Sequence[float], at: str) -> str | None:
    """The polynomial by Horner's rule; None means 1."""
    *lower, highest = polynomial
    value = None if highest == 1 else _number(g, highest)
    for factor in reversed(lower):
        value = at if value is None else g.emit("Mul", value, at)
        value = g.emit("Add", value, _number(g, factor)) if factor else value
    return value


def _product(g: GradientContext, factors: Sequence[str | None]) -> str | None:
    """The product of the factors; None means 1."""
    product = None
    for factor in filter(None, factors):
        product = g.emit("Mul", product, factor) if product else factor
    return product


def _flat_index(g: GradientContext, around: Sequence[_Tap]) -> str:
    index, *others = [tap.index for tap in around if tap.index is not None] or [g.constants.add(np.zeros(1, np.int32))]
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
