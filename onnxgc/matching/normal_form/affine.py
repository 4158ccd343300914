"""Values times and plus numbers, weights and constants.

A number that multiplies a value is its view's scale, not part of the value: it does not matter where an
exporter multiplies.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onnxgc.matching.normal_form.constant_tables import AxisContents, Table
from onnxgc.matching.normal_form.dimensions import Dim, Dims, as_set
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.recognized_forms import Expanded, Layer, Plus, Shifted, Weighted
from onnxgc.matching.normal_form.terms import OfValue, Unordered, in_terms, set_in_terms, unordered
from onnxgc.matching.normal_form.value_graph import Structure, padded

MULTIPLIED, ADDED = "weighted", "shifted"


def scaled(structure: Structure, x: View, factor: float) -> View:
    if factor == 0:
        return View(structure.value("zero", OfValue(x.value)), x.dims)
    return replace(x, scale=x.scale * factor)


def plus_number(structure: Structure, x: View, number: float) -> View:
    """s v + c as s (v + c / s)."""
    offset, value = number / x.scale, x.value
    match structure.facts.get(value):
        case Plus(inner, before):
            value, offset = inner, before + offset
    if offset == 0:
        return replace(x, value=value)
    fact = Plus(value, offset)
    return View(structure.value("plus", OfValue(value), offset, fact=fact), x.dims, x.scale)


def broadcast_with(structure: Structure, x: View, shape: Sequence[int]) -> tuple[View, Dims, list[Dim]]:
    """x padded to its rank after a broadcast with `shape`, the result's dimensions and the new ones."""
    rank = max(len(x.dims), len(shape))
    x = replace(x, dims=padded(x.dims, rank))
    dims, new = list(x.dims), list[Dim]()
    for position, size in enumerate(shape, rank - len(shape)):
        if size > 1 and not dims[position]:
            dims[position] = structure.axis("broadcast", size)
            new.append(dims[position])
    return x, tuple(dims), new


def expanded(structure: Structure, x: View, dims: Dims, new: Sequence[Dim]) -> View:
    """x repeated along `new` dimensions, which are among `dims`."""
    value = structure.value("expand", OfValue(x.value), set_in_terms(*new), fact=Expanded(x.value, x.dims))
    return replace(x, value=value, dims=dims)


# -- weights --


def with_weight(structure: Structure, x: View, weight: WeightTensor, *, is_added: bool) -> View:
    x, dims, new = broadcast_with(structure, x, weight.shape)
    if weight.number is not None and new:
        apply = plus_number if is_added else scaled
        return expanded(structure, apply(structure, x, weight.number), dims, new)
    shape = (1,) * (len(dims) - len(weight.shape)) + weight.shape
    cover = as_set(*(dim for dim, size in zip(dims, shape, strict=True) if size > 1))
    return weighted_along(structure, replace(x, dims=dims), weight, cover, is_added=is_added)


def weighted_along(structure: Structure, x: View, weight: WeightTensor, cover: Dim, *, is_added: bool = False) -> View:
    """x plus or times a weight that extends along the `cover` of x.

    A multiplied weight absorbs the scale of x. For an added weight, the weights that produced x do; if x has
    none along these axes, the view keeps the scale.
    """
    outside = 1.0
    if is_added and not _has_weights_along(structure, x.value, cover):
        outside, x = x.scale, replace(x, scale=1.0)
    value = structure.value(
        ADDED if is_added else MULTIPLIED,
        OfValue(x.value),
        set_in_terms(cover),
        weights=(weight.name, x.scale),
        cover=cover,
        fact=(Shifted if is_added else Weighted)(x.value, weight, cover, x.scale),
    )
    return View(value, x.dims, outside)


def _has_weights_along(structure: Structure, value: int, cover: Dim) -> bool:
    """Whether weights along these axes, which can absorb a factor, made a value."""
    entity = structure.entities[value]
    if not cover or set(entity.cover) != set(cover):
        return False
    match structure.facts.get(value):
        case Shifted(inner) if entity.op == ADDED:
            return _has_weights_along(structure, inner, cover)
    return bool(entity.weights)


def cover_in_result(cover: Dim, dims: Dims, result: Dims) -> Dim:
    """The cover of a weight in a result with which the dimensions of its operand are aligned at the right."""
    aligned = zip(reversed(dims), reversed(result), strict=False)
    return as_set(*(there for here, there in aligned if here and set(here) <= set(cover)))


def linear(
    structure: Structure, x: View, over: Dim, size: int, weight: str, axes: tuple[int, ...] = ()
) -> tuple[int, Dim]:
    """x times a matrix, summed over a dimension; and the dimension of `size` that replaces it."""
    # The axes of the weight that are summed only distinguish two uses of one weight.
    weights = (weight, x.scale, in_terms(over), axes)
    return layer(structure, "linear", weights, size, OfValue(x.value), set_in_terms(over))


def layer(
    structure: Structure, op: str, weights: tuple[Any, ...], size: int, *operands: Any, is_dense: bool = True
) -> tuple[int, Dim]:
    """A product with weights and its channels; `weights` begins with the name of the weight.

    In an `is_dense` layer every channel reads the same elements.
    """
    channels = structure.axis("channels", size, *operands, weights=weights)
    fact = Layer(channels, op, weights, operands) if is_dense else None
    return structure.value(op, *operands, size, weights=weights, cover=channels, fact=fact), channels


# -- constants that are identified by their contents --


def with_table(structure: Structure, x: View, shape: tuple[int, ...], table: Table, *, is_added: bool) -> View:
    """x plus a table, or times a table that is scaled so that its largest number is 1."""
    x, dims, new = broadcast_with(structure, x, shape)
    largest = 1.0 if math.isinf(table.largest()) else table.largest()
    factor = 1 / x.scale if is_added else 1 / largest
    contents = table.scaled(factor).contents_by_axis()
    op = "plus table" if is_added else "times table"
    term = (OfValue(x.value), table_in_terms(dims, contents), set_in_terms(*new))
    scale = x.scale if is_added else x.scale * largest
    return View(structure.value(op, *term), marked_by_table(structure, dims, contents), scale)


def table_in_terms(dims: Dims, contents: AxisContents) -> Unordered:
    """A table as part of a term: its contents along each dimension of the tensor."""
    return unordered(*((in_terms(dims[-position]), content) for position, content in contents))


def marked_by_table(structure: Structure, dims: Dims, contents: AxisContents) -> Dims:
    """Dimensions with the table recorded on those that a product created, to tell keys from queries."""
    result = list(dims)
    for position, content in contents:
        result[-position] = tuple(
            structure.axis("joined", atom.size, in_terms((atom,)), content)[0]
            if structure.entities[atom.axis].op in ("own", "joined")
            else atom
            for atom in result[-position]
        )
    return tuple(result)
