"""Elementwise products of two values."""

from __future__ import annotations

from onnxgc.matching.normal_form.affine import cover_in_result, scaled, weighted_along
from onnxgc.matching.normal_form.alignment import before_expansion, both_orders
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.recognized_forms import InverseDeviation, Power, Product, Weighted
from onnxgc.matching.normal_form.recognized_products import quotient_by_deviation, recognized_product
from onnxgc.matching.normal_form.terms import OfValue, unordered
from onnxgc.matching.normal_form.value_graph import Structure


def product(structure: Structure, x: View, y: View) -> View | None:
    """x * y; None where their dimensions do not fit."""
    x, y = before_expansion(structure, x, y), before_expansion(structure, y, x)
    for one, other in both_orders(x, y):
        weighted = structure.facts.get(one.value)
        if isinstance(weighted, Weighted) and isinstance(
            structure.facts.get(weighted.value), Power | InverseDeviation
        ):
            return _weighted_last(structure, one, weighted, other)
    recognized = recognized_product(structure, x, y)
    if recognized is not None:
        return recognized
    aligned, crossing = structure.separated([(OfValue(view.value), view.dims) for view in (x, y)])
    broadcast = structure.broadcast(*aligned)
    if broadcast is None:
        return None
    dims, joined = broadcast
    fact = quotient_by_deviation(structure, x, y) or Product(x, y)
    operands = unordered(OfValue(x.value), OfValue(y.value))
    value = structure.value("product", operands, joined, *crossing, fact=fact)
    return View(value, dims, x.scale * y.scale)


def _weighted_last(structure: Structure, x: View, weighted: Weighted, y: View) -> View | None:
    """A weighted power times y, as the power times y, weighted: the weight may belong to a normalisation."""
    inner = product(structure, View(weighted.value, x.dims), y)
    if inner is None:
        return None
    cover = cover_in_result(weighted.cover, x.dims, inner.dims)
    result = weighted_along(structure, inner, weighted.weight, cover)
    return scaled(structure, result, x.scale * weighted.scale)
