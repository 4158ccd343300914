"""Operators that move elements, choose some, or put tensors together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgc.matching.normal_form.builder import Builder, Ref, Result
from onnxgc.matching.normal_form.channel_slices import part_of_layer
from onnxgc.matching.normal_form.dimensions import Dim, Dims, as_set, extent, reshaped
from onnxgc.matching.normal_form.structure import Fixed, OfValue, View, in_terms, set_in_terms, unordered
from onnxgc.matching.normal_form.terms import INFINITY
from onnxgc.model.core.ir import Node


def alias(t: Builder, node: Node) -> Result:
    x = t.view(node)
    return None if x is None else [x]


def transpose(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    order = node.attribute("perm") or list(reversed(range(len(x.dims))))
    return [replace(x, dims=tuple(x.dims[axis] for axis in order))]


def reshape(t: Builder, node: Node) -> Result:
    x = t.view(node)
    dims = None if x is None else reshaped(x.dims, t.shape(node.outputs[0]))
    return None if x is None or dims is None else [replace(x, dims=dims)]


def expand(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    shape = t.shape(node.outputs[0])
    dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    # A flag told apart from the tensor that it is a copy of: it has other elements.
    new = [
        t.structure.axis("broadcast", size) if size > 1 and not d else d
        for size, d in zip(shape, dims, strict=True)
    ]
    if tuple(new) == dims:
        return [replace(x, dims=dims)]
    value = t.structure.value(
        "expand",
        OfValue(x.value),
        set_in_terms(*(d for d, o in zip(new, dims, strict=True) if not o)),
        known=("expanded", x.value, dims),
    )
    return [replace(x, value=value, dims=tuple(new))]


def cast(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    if t.is_boolean(node.inputs[0]):
        t.flags.add(x.value)
    elif t.is_boolean(node.outputs[0]):
        if x.value in t.flags:
            return [replace(x, scale=1.0)]
        return [View(t.structure.value("is not zero", OfValue(x.value)), x.dims)]
    elif t.is_floating(node.inputs[0]) and not t.is_floating(node.outputs[0]):
        return [t.terms.unary("truncate", x)]
    return [x]


def dropout(t: Builder, node: Node) -> Result:
    x = t.view(node)
    return None if x is None else [replace(x, dropouts=x.dropouts + 1)]


def gather(t: Builder, node: Node) -> Result:
    axis = int(node.attribute("axis", 0))
    table, indices = t.fixed(node, 0), t.view(node, 1)
    if table is not None and indices is not None and axis == 0:
        term = (OfValue(indices.value), indices.scale, table.shape)
        new = tuple(
            t.structure.axis("entries", size, *term, place, weights=(table.name,))
            for place, size in enumerate(table.shape[1:])
        )
        value = t.structure.value("entries of", *term, weights=(table.name,), cover=as_set(*new))
        return [View(value, (*indices.dims, *new))]
    x, chosen = t.view(node), t.array(node.inputs[1])
    if x is None or chosen is None:
        return None
    axis %= len(x.dims)
    size = extent(x.dims[axis])
    taken = _taken(t, x, axis, [int(item) % size for item in chosen.reshape(-1)])
    places = reshaped((taken.dims[axis],), chosen.shape)
    if places is None:
        return None
    return [replace(taken, dims=(*taken.dims[:axis], *places, *taken.dims[axis + 1 :]))]


def gather_nd(t: Builder, node: Node) -> Result:
    """Only where each element is taken once and in its order, as masks are indexed."""
    x, indices = t.view(node), t.array(node.inputs[1])
    if x is None or indices is None or node.attribute("batch_dims", 0):
        return None
    depth = indices.shape[-1]
    places = list(np.ndindex(*(extent(dim) for dim in x.dims[:depth])))
    if [tuple(row) for row in indices.reshape(-1, depth).tolist()] != places:
        return None
    dims = reshaped(x.dims, t.shape(node.outputs[0]))
    return None if dims is None else [replace(x, dims=dims)]


def _taken(t: Builder, x: View, axis: int, places: Sequence[int]) -> View:
    """Some places of a dimension."""
    dim = x.dims[axis]
    if list(places) == list(range(extent(dim))):
        return x
    part = part_of_layer(t.terms, x, axis, places)
    if part is not None:
        return part
    steps = {later - earlier for earlier, later in itertools.pairwise(places)}
    what = (places[0], len(places), *steps) if len(steps) <= 1 else (tuple(places),)
    term = (OfValue(x.value), in_terms(dim), what)
    new = t.structure.axis("taken", len(places), in_terms(dim), what)
    value = t.structure.value("taken", *term)
    return replace(x, value=value, dims=(*x.dims[:axis], new, *x.dims[axis + 1 :]))


def sliced(t: Builder, node: Node) -> Result:
    x = t.view(node)
    starts, ends = t.ints(node, 1, "starts"), t.ints(node, 2, "ends")
    if x is None or starts is None or ends is None:
        return None
    axes = t.ints(node, 3, "axes") or list(range(len(starts)))
    steps = t.ints(node, 4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(x.dims)
        places = range(extent(x.dims[axis]))[slice(start, end if end > -(1 << 31) else None, step)]
        if not places:
            return None
        x = _taken(t, x, axis, list(places))
    return [x]


def split(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    axis, start = int(node.attribute("axis", 0)) % len(x.dims), 0
    parts: list[View | None] = []
    for name in node.outputs:
        size = t.shape(name)[axis] if name else 0
        if not size:
            return None
        parts.append(_taken(t, x, axis, list(range(start, start + size))))
        start += size
    return parts


def concat(t: Builder, node: Node) -> Result:
    refs = t.refs(node)
    if len(refs) == 1:
        return alias(t, node)
    rank = len(t.shape(node.outputs[0]))
    axis = int(node.attribute("axis", 0)) % rank
    dims: Dims = ((),) * (rank - 1)
    operands: list[Any] = []
    met: list[Any] = []
    for ref in refs:
        if isinstance(ref, Fixed):
            operands.append((tuple(sorted(ref.shape)), ref.number))
        elif isinstance(ref, View):
            rest = t.structure.broadcast(dims, (*ref.dims[:axis], *ref.dims[axis + 1 :]))
            if rest is None:
                return None
            dims = rest[0]
            met += rest[1].items
            operands += _parts_of(t, ref, ref.dims[axis])
        else:
            return None
    weights: tuple[str, ...] = ()
    for ref in refs:
        weights += (ref.name,) if isinstance(ref, Fixed) else _weights_of(t, ref, axis)
    size = t.shape(node.outputs[0])[axis]
    for place, wanted in enumerate((s for i, s in enumerate(t.shape(node.outputs[0])) if i != axis)):
        if wanted > 1 and not dims[place]:
            dims = (*dims[:place], t.structure.axis("broadcast", wanted), *dims[place + 1 :])
    new = t.structure.axis("concatenated", size, tuple(operands), weights=weights)
    known = ("concatenated", new, tuple(operands), weights)
    value = t.structure.value("concatenated", tuple(operands), unordered(*met), weights=weights, known=known)
    return [View(value, (*dims[:axis], new, *dims[axis:]))]


def _parts_of(t: Builder, x: View, dim: Dim) -> tuple[Any, ...]:
    """What is put together with others: a tensor, or the parts that it was itself put together of."""
    known = t.structure.known_as.get(x.value, ("",))
    if known[0] == "concatenated" and known[1] == dim and x.scale == 1:
        parts: tuple[Any, ...] = known[2]
        return parts
    return ((OfValue(x.value), x.scale, in_terms(dim)),)


def _weights_of(t: Builder, x: Ref | None, axis: int) -> tuple[str, ...]:
    known = t.structure.known_as.get(x.value, ("",)) if isinstance(x, View) else ("",)
    if isinstance(x, View) and known[0] == "concatenated" and known[1] == x.dims[axis]:
        weights: tuple[str, ...] = known[3]
        return weights
    return ()


def pad(t: Builder, node: Node) -> Result:
    x, pads = t.view(node), t.ints(node, 1, "pads")
    number = t.number(node, 2, float(node.attribute("value", 0.0)))
    axes = t.ints(node, 3, "axes")
    if x is None or pads is None or node.attribute("mode", "constant") != "constant" or number is None:
        return None
    axes = list(range(len(x.dims))) if axes is None else [axis % len(x.dims) for axis in axes]
    dims = list(x.dims)
    padded: dict[Dim, tuple[Dim, int, int]] = {}
    for axis, begin, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        if begin < 0 or end < 0:
            return None
        if begin or end:
            size = extent(x.dims[axis]) + begin + end
            dims[axis] = t.structure.axis("padded", size, in_terms(x.dims[axis]), begin, end)
            padded[dims[axis]] = (x.dims[axis], begin, end)
    # The lowest number of a type is that of a maximum.
    fill = -INFINITY if number < -1e30 else number
    what = unordered(*((in_terms(dim), begin, end) for dim, begin, end in padded.values()))
    value = t.structure.value(
        "padded",
        OfValue(x.value),
        what,
        fill / x.scale,
        known=("padded", x.value, padded, fill),
    )
    return [View(value, tuple(dims), x.scale)]


def resize(t: Builder, node: Node) -> Result:
    """Interpolation along the axes whose size changes."""
    x, out = t.view(node), t.shape(node.outputs[0])
    if x is None or len(x.dims) != len(out) or t.view(node, 1) is not None:
        return None
    mode = node.attribute("mode", "nearest")
    sizes = [extent(dim) for dim in x.dims]
    how: tuple[Any, ...] = (node.attribute("coordinate_transformation_mode", "half_pixel"),)
    factors = _factors(t, node, sizes, out)
    if mode == "nearest":
        how += (node.attribute("nearest_mode", "round_prefer_floor"),)
        is_whole = not any(factors) and all(
            size % before == 0 for size, before in zip(out, sizes, strict=True)
        )
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
        else t.structure.axis("resized", size, in_terms(dim), mode, how, factor)
        for dim, size, before, factor in zip(x.dims, out, sizes, factors, strict=True)
    )
    changed = (
        (in_terms(dim), extent(new), factor)
        for dim, new, factor in zip(x.dims, dims, factors, strict=True)
        if dim != new
    )
    value = t.structure.value("resized", OfValue(x.value), mode, how, unordered(*changed))
    return [View(value, dims, x.scale)]


def _factors(t: Builder, node: Node, sizes: Sequence[int], out: Sequence[int]) -> list[float]:
    """The factor along each dimension; zero where sizes alone say where its elements are taken."""
    given = t.array(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    is_by_sizes = node.attribute("coordinate_transformation_mode", "half_pixel") == "align_corners"
    if given is None or is_by_sizes or len(given) != len(sizes):
        return [0.0] * len(sizes)
    return [
        0.0 if math.isclose(factor, size / before, rel_tol=1e-5) else factor
        for factor, size, before in zip(given.tolist(), out, sizes, strict=True)
    ]


# Where an extent is a multiple, these all repeat each element.
_REPEATING = frozenset(
    {
        ("asymmetric", "floor"),
        ("half_pixel", "round_prefer_floor"),
        ("half_pixel", "round_prefer_ceil"),
        ("pytorch_half_pixel", "round_prefer_floor"),
    }
)
