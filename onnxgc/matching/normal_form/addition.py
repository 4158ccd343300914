"""Sums of values and weights, in any order and nesting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.affine import scaled, with_weight
from onnxgc.matching.normal_form.dimensions import Dims
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.recognized_forms import PartialSum, Shifted
from onnxgc.matching.normal_form.recognized_sums import recognized_sum
from onnxgc.matching.normal_form.terms import OfValue, unordered
from onnxgc.matching.normal_form.value_graph import Structure

MAX_FLATTENED = 16


def total(
    structure: Structure,
    views: Sequence[View],
    weights: Sequence[WeightTensor] = (),
    *,
    is_partial: bool = False,
) -> View | None:
    """The sum of values and weights; None where their dimensions do not fit.

    An `is_partial` sum has one consumer, which is a sum too. The two are flattened: the order in which an
    exporter adds has no effect.
    """
    recognized = recognized_sum(structure, *views) if len(views) == 2 else None
    views = views if recognized is None else [recognized]
    partial_sums = structure.partial_sums
    count = sum(partial_sums[view.value].count if view.value in partial_sums else 1 for view in views)
    # A long partial sum is a term over its two operands: a sum of n values does not get n ** 2 references.
    is_flattened = not is_partial or count <= MAX_FLATTENED
    terms, inner_weights = _flattened(structure, views) if is_flattened else (list(views), [])
    all_weights = [*weights, *inner_weights]
    x = _sum_of_terms(structure, terms)
    if x is None:
        return None
    for weight in _combined(all_weights):
        x = with_weight(structure, x, weight, is_added=True)
    if not is_partial or len(terms) + len(all_weights) == 1 or _is_layer_with_bias(structure, x):
        return x
    part = structure.value("partial sum", OfValue(x.value), fact=structure.facts.get(x.value))
    unscaled = tuple(scaled(structure, term, 1 / x.scale) for term in terms)
    partial_sums[part] = PartialSum(unscaled, tuple(all_weights), count)
    return replace(x, value=part)


def _flattened(structure: Structure, views: Sequence[View]) -> tuple[list[View], list[WeightTensor]]:
    """The operands of a sum, with those of partial sums in their place."""
    pending, terms, weights = list(reversed(views)), list[View](), list[WeightTensor]()
    while pending:
        view = pending.pop()
        partial = structure.partial_sums.get(view.value)
        if partial is None:
            terms.append(view)
            continue
        pending += [scaled(structure, term, view.scale) for term in reversed(partial.views)]
        weights += partial.weights
    return terms, weights


def _sum_of_terms(structure: Structure, views: Sequence[View]) -> View | None:
    """A sum, scaled so that the largest factor is 1."""
    if len(views) == 1:
        return views[0]
    totals: dict[tuple[int, Dims], float] = {}
    for view in views:
        key = (view.value, view.dims)
        totals[key] = totals.get(key, 0.0) + view.scale
    totals = {key: factor for key, factor in totals.items() if factor} or dict.fromkeys(totals, 0.0)
    if len(totals) == 1 or not any(totals.values()):
        ((value, dims), factor), *_ = totals.items()
        return scaled(structure, View(value, dims), factor)
    scale = max(map(abs, totals.values()))
    terms = [(OfValue(value), factor / scale) for (value, _), factor in totals.items()]
    keyed = list(zip(terms, (dims for _, dims in totals), strict=True))
    aligned, crossing = structure.separated(keyed)
    broadcast = structure.broadcast_all(aligned)
    if broadcast is None:
        return None
    dims, joined = broadcast
    return View(structure.value("sum", unordered(*terms), joined, *crossing), dims, scale)


def _is_layer_with_bias(structure: Structure, x: View) -> bool:
    """Whether x is a layer plus a weight along the same axes, which stay together."""
    fact = structure.facts.get(x.value)
    if not isinstance(fact, Shifted):
        return False
    layer = structure.entities[fact.value]
    return layer.op != "entries of" and set(layer.cover) == set(fact.cover)


def _combined(weights: Sequence[WeightTensor]) -> list[WeightTensor]:
    """Added weights, each merged into one that extends along all of its axes."""
    result: list[WeightTensor] = []
    for weight in sorted(weights, key=lambda weight: (-math.prod(weight.shape), weight.shape)):
        for index, larger in enumerate(result):
            rank = max(len(weight.shape), len(larger.shape))
            shape, smaller = (((1,) * (rank - len(w.shape)) + w.shape) for w in (larger, weight))
            if all(size in (1, own) for size, own in zip(smaller, shape, strict=True)):
                result[index] = WeightTensor(f"{larger.name}+{weight.name}", shape)
                break
        else:
            result.append(weight)
    return result
