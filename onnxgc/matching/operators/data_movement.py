"""Operators that rearrange, select, concatenate, pad and resize."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgc.matching.normal_form.affine import broadcast_with, expanded
from onnxgc.matching.normal_form.builder import Builder, Ref, Result, of_view
from onnxgc.matching.normal_form.channel_slices import part_of_layer
from onnxgc.matching.normal_form.dimensions import Dim, as_set, extent, reshaped
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.functions import unary
from onnxgc.matching.normal_form.recognized_forms import Concatenated, Padded
from onnxgc.matching.normal_form.terms import OfValue, in_terms, unordered
from onnxgc.model.core.ir import Node


@of_view
def alias(builder: Builder, node: Node, x: View) -> View:
    return x


@of_view
def transpose(builder: Builder, node: Node, x: View) -> View:
    order = node.attribute("perm") or reversed(range(len(x.dims)))
    return replace(x, dims=tuple(x.dims[axis] for axis in order))


@of_view
def reshape(builder: Builder, node: Node, x: View) -> View | None:
    return _with_shape(x, builder.shape(node.outputs[0]))


def _with_shape(x: View, shape: Sequence[int]) -> View | None:
    dims = reshaped(x.dims, shape)
    return None if dims is None else replace(x, dims=dims)


@of_view
def expand(builder: Builder, node: Node, x: View) -> View:
    x, dims, new = broadcast_with(builder.structure, x, builder.shape(node.outputs[0]))
    return expanded(builder.structure, x, dims, new) if new else x


@of_view
def cast(builder: Builder, node: Node, x: View) -> View:
    if builder.is_boolean(node.inputs[0]):
        builder.flags.add(x.value)
    elif builder.is_boolean(node.outputs[0]):
        if x.value in builder.flags:
            return replace(x, scale=1.0)
        return View(builder.structure.value("is not zero", OfValue(x.value)), x.dims)
    elif builder.is_floating(node.inputs[0]) and not builder.is_floating(node.outputs[0]):
        return unary(builder.structure, "truncate", x)
    return x


@of_view
def dropout(builder: Builder, node: Node, x: View) -> View:
    return replace(x, dropouts=x.dropouts + 1)


def gather(builder: Builder, node: Node) -> View | None:
    axis = int(node.attribute("axis", 0))
    table, indices = builder.weight(node, 0), builder.view(node, 1)
    if table is not None and indices is not None and axis == 0:
        term = (OfValue(indices.value), indices.scale, table.shape)
        new = tuple(
            builder.structure.axis("entries", size, *term, number, weights=(table.name,))
            for number, size in enumerate(table.shape[1:])
        )
        value = builder.structure.value("entries of", *term, weights=(table.name,), cover=as_set(*new))
        return View(value, (*indices.dims, *new))
    x, chosen = builder.view(node), builder.array(node.inputs[1])
    if x is None or chosen is None:
        return None
    axis %= len(x.dims)
    size = extent(x.dims[axis])
    taken = _taken(builder, x, axis, [int(item) % size for item in chosen.reshape(-1)])
    dims = reshaped((taken.dims[axis],), chosen.shape)
    if dims is None:
        return None
    return replace(taken, dims=(*taken.dims[:axis], *dims, *taken.dims[axis + 1 :]))


@of_view
def gather_nd(builder: Builder, node: Node, x: View) -> View | None:
    """Only indices that select each element once and in order, as of masks."""
    indices = builder.array(node.inputs[1])
    if indices is None or node.attribute("batch_dims", 0):
        return None
    depth = indices.shape[-1]
    every = list(np.ndindex(*map(extent, x.dims[:depth])))
    is_each_once = [tuple(row) for row in indices.reshape(-1, depth).tolist()] == every
    return _with_shape(x, builder.shape(node.outputs[0])) if is_each_once else None


def _taken(builder: Builder, x: View, axis: int, positions: Sequence[int]) -> View:
    dim = x.dims[axis]
    if list(positions) == list(range(extent(dim))):
        return x
    part = part_of_layer(builder.structure, x, axis, positions)
    if part is not None:
        return part
    steps = {later - earlier for earlier, later in itertools.pairwise(positions)}
    selection = (positions[0], len(positions), *steps) if len(steps) <= 1 else (tuple(positions),)
    new = builder.structure.axis("taken", len(positions), in_terms(dim), selection)
    value = builder.structure.value("taken", OfValue(x.value), in_terms(dim), selection)
    return replace(x, value=value, dims=(*x.dims[:axis], new, *x.dims[axis + 1 :]))


@of_view
def sliced(builder: Builder, node: Node, x: View) -> View | None:
    starts, ends, axes, steps = (builder.ints(node, index) for index in range(1, 5))
    if starts is None or ends is None:
        return None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(x.dims)
        positions = range(extent(x.dims[axis]))[slice(start, end if end > -(1 << 31) else None, step)]
        if not positions:
            return None
        x = _taken(builder, x, axis, list(positions))
    return x


@of_view
def split(builder: Builder, node: Node, x: View) -> list[View] | None:
    axis, start = int(node.attribute("axis", 0)) % len(x.dims), 0
    parts: list[View] = []
    for name in node.outputs:
        size = builder.shape(name)[axis] if name else 0
        if not size:
            return None
        parts.append(_taken(builder, x, axis, list(range(start, start + size))))
        start += size
    return parts


def concat(builder: Builder, node: Node) -> Result:
    refs = builder.refs(node)
    if len(refs) == 1:
        return alias(builder, node)
    shape = builder.shape(node.outputs[0])
    axis = int(node.attribute("axis", 0)) % len(shape)
    rests = [(*ref.dims[:axis], *ref.dims[axis + 1 :]) for ref in refs if isinstance(ref, View)]
    broadcast = builder.structure.broadcast(*rests)
    if broadcast is None:
        return None
    dims, joined = broadcast
    parts: tuple[Any, ...] = ()
    weights: tuple[str, ...] = ()
    for ref in refs:
        if ref is None:
            return None
        inner = _parts_of(builder, ref, axis)
        parts += inner[0]
        weights += inner[1]
    for position, size in enumerate(size for index, size in enumerate(shape) if index != axis):
        if size > 1 and not dims[position]:
            dims = (*dims[:position], builder.structure.axis("broadcast", size), *dims[position + 1 :])
    new = builder.structure.axis("concatenated", shape[axis], parts, weights=weights)
    fact = Concatenated(new, parts, weights)
    value = builder.structure.value("concatenated", parts, joined, weights=weights, fact=fact)
    return View(value, (*dims[:axis], new, *dims[axis:]))


def _parts_of(builder: Builder, ref: Ref, axis: int) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """An operand of a concatenation, or the parts that it is concatenated of itself; and their weights."""
    if isinstance(ref, WeightTensor):
        return ((tuple(sorted(ref.shape)), ref.number),), (ref.name,)
    match builder.structure.facts.get(ref.value):
        case Concatenated(inner, parts, weights) if inner == ref.dims[axis] and ref.scale == 1:
            return parts, weights
    return ((OfValue(ref.value), ref.scale, in_terms(ref.dims[axis])),), ()


@of_view
def pad(builder: Builder, node: Node, x: View) -> View | None:
    pads, number, axes = builder.ints(node, 1), builder.number(node, 2, 0.0), builder.ints(node, 3)
    if pads is None or node.attribute("mode", "constant") != "constant" or number is None:
        return None
    axes = list(range(len(x.dims))) if axes is None else [axis % len(x.dims) for axis in axes]
    dims = list(x.dims)
    origins: dict[Dim, tuple[Dim, int, int]] = {}
    for axis, begin, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        if begin < 0 or end < 0:
            return None
        if begin or end:
            size = extent(x.dims[axis]) + begin + end
            dims[axis] = builder.structure.axis("padded", size, in_terms(x.dims[axis]), begin, end)
            origins[dims[axis]] = (x.dims[axis], begin, end)
    # Before a maximum, the lowest number of a type is minus infinity.
    fill = -math.inf if number < -1e30 else number
    term = unordered(*((in_terms(dim), begin, end) for dim, begin, end in origins.values()))
    fact = Padded(x.value, origins, fill)
    value = builder.structure.value("padded", OfValue(x.value), term, fill / x.scale, fact=fact)
    return View(value, tuple(dims), x.scale)


@of_view
def resize(builder: Builder, node: Node, x: View) -> View | None:
    """Interpolation along the axes whose size changes."""
    out = builder.shape(node.outputs[0])
    if len(x.dims) != len(out) or builder.view(node, 1) is not None:
        return None
    mode = node.attribute("mode", "nearest")
    sizes = [extent(dim) for dim in x.dims]
    how: tuple[Any, ...] = (node.attribute("coordinate_transformation_mode", "half_pixel"),)
    factors = _factors(builder, node, sizes, out)
    if mode == "nearest":
        how += (node.attribute("nearest_mode", "round_prefer_floor"),)
        is_whole = not any(factors) and all(size % before == 0 for size, before in zip(out, sizes, strict=True))
        if is_whole and how in _REPEATING:
            how = ("repeated",)
    elif how == ("pytorch_half_pixel",) and min(out) > 1:
        how = ("half_pixel",)
    if node.attribute("antialias", 0) and any(size < before for size, before in zip(out, sizes, strict=True)):
        how += ("antialias", int(node.attribute("exclude_outside", 0)))
    if mode == "cubic" or how[0] == "tf_crop_and_resize":
        how += tuple(sorted((key, repr(value)) for key, value in node.attributes.items()))
    dims = tuple(
        dim
        if size == before and not factor
        else builder.structure.axis("resized", size, in_terms(dim), mode, how, factor)
        for dim, size, before, factor in zip(x.dims, out, sizes, factors, strict=True)
    )
    changed = (
        (in_terms(dim), extent(new), factor)
        for dim, new, factor in zip(x.dims, dims, factors, strict=True)
        if dim != new
    )
    value = builder.structure.value("resized", OfValue(x.value), mode, how, unordered(*changed))
    return View(value, dims, x.scale)


def _factors(builder: Builder, node: Node, sizes: Sequence[int], out: Sequence[int]) -> list[float]:
    """The factor along each dimension; zero if the sizes determine the sampled positions."""
    given = builder.array(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    is_by_sizes = node.attribute("coordinate_transformation_mode", "half_pixel") == "align_corners"
    if given is None or is_by_sizes or len(given) != len(sizes):
        return [0.0] * len(sizes)
    return [
        0.0 if math.isclose(factor, size / before, rel_tol=1e-5) else factor
        for factor, size, before in zip(given.tolist(), out, sizes, strict=True)
    ]


# Coordinates and rounding that repeat each element where the new extent is a multiple.
_REPEATING = frozenset(
    {
        ("asymmetric", "floor"),
        ("half_pixel", "round_prefer_floor"),
        ("half_pixel", "round_prefer_ceil"),
        ("pytorch_half_pixel", "round_prefer_floor"),
    }
)
