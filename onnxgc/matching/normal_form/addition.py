"""Sums of values and weights, in any order and nesting, and sums of two values that are another function."""

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.affine import cover_in_result, scaled, weighted_along, with_weight
from onnxgc.matching.normal_form.alignment import are_aligned, both_orders, is_over_its_elements
from onnxgc.matching.normal_form.dimensions import Dim, Dims
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.functions import normalized
from onnxgc.matching.normal_form.recognized_forms import (
    BelowMaximum,
    ByDeviation,
    Centred,
    Fact,
    Maximum,
    Mean,
    MeanByDeviation,
    PartialSum,
    Plus,
    Power,
    Product,
    Shifted,
    Variance,
    Weighted,
)
from onnxgc.matching.normal_form.terms import OfValue, Unordered, unordered
from onnxgc.matching.normal_form.value_graph import Structure

MAX_FLATTENED = 16


def total(
    structure: Structure, views: Sequence[View], weights: Sequence[WeightTensor] = (), *, is_partial: bool = False
) -> View | None:
    """The sum of values and weights; None if their dimensions do not fit.

    An `is_partial` sum has one consumer, which is a sum too. The two are flattened: the order in which an
    exporter adds has no effect.
    """
    recognized = _recognized(structure, *views) if len(views) == 2 else None
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
    broadcast = structure.broadcast(*aligned)
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


# -- sums of two values that are another function --


def _recognized(structure: Structure, x: View, y: View) -> View | None:
    """The form that x + y has; None for a plain sum."""
    broadcast = structure.broadcast(x.dims, y.dims)
    if broadcast is None:
        return None
    return (
        _affine_normalization(structure, x, y, broadcast[0])
        or _wrapped_by_masks(structure, x, y)
        or _difference(structure, x, y, *broadcast)
    )


def _affine_normalization(structure: Structure, x: View, y: View, dims: Dims) -> View | None:
    """x s + (b - mean(x) s) with s = g / deviation(x), in which g, b or both may be absent.

    Many exporters write batch normalisation so.
    """
    for one, other in both_orders(x, y):
        shift = structure.facts.get(other.value)
        mean, scale = (shift.value, shift.scale) if isinstance(shift, Shifted) else (other.value, 1.0)
        fact, weight, cover, factor = _without_weight(structure, one.value)
        fact_of_mean, weight_of_mean, _, factor_of_mean = _without_weight(structure, mean)
        is_difference = math.isclose(factor, -scale * other.scale * factor_of_mean)
        if one.scale != 1 or weight != weight_of_mean or not is_difference:
            continue
        match fact:
            case ByDeviation(value, over, epsilon) if fact_of_mean == MeanByDeviation(value, over, epsilon):
                if not is_over_its_elements(structure, other, one, over):
                    continue
            case _:
                continue
        result = scaled(structure, normalized(structure, View(value, dims), over, epsilon), factor)
        if weight is not None:
            result = weighted_along(structure, result, weight, cover_in_result(cover, one.dims, dims))
        if isinstance(shift, Shifted):
            cover = cover_in_result(shift.cover, other.dims, dims)
            result = weighted_along(structure, result, shift.weight, cover, is_added=True)
        return result
    return None


def _without_weight(structure: Structure, value: int) -> tuple[Fact | None, WeightTensor | None, Dim, float]:
    """The fact about a value before a weight multiplies it; that weight, its cover, and the scale."""
    match structure.facts.get(value):
        case Weighted(inner, weight, cover, scale):
            return structure.facts.get(inner), weight, cover, scale
        case fact:
            return fact, None, (), 1.0


def is_wrapped(structure: Structure, condition: View, moved: View, index: View) -> bool:
    """Whether `moved` is the index plus a number, and the condition that the index is negative.

    Negative indices count from the end: where(i < 0, i + n, i) is the index i.
    """
    entity = structure.entities[condition.value]
    is_sign = entity.op == "Less" and entity.term[0] == ((OfValue(index.value), 1.0), 0.0)
    match structure.facts.get(moved.value):
        case Plus(value):
            return value == index.value and is_sign
    return False


def _wrapped_by_masks(structure: Structure, x: View, y: View) -> View | None:
    """The index of a wrapped index that is written as mask * (i + n) + (1 - mask) * i."""
    for one, other in both_orders(x, y):
        first, second = structure.facts.get(one.value), structure.facts.get(other.value)
        if not isinstance(first, Product) or not isinstance(second, Product):
            continue
        for mask, moved in both_orders(first.first, first.second):
            for rest, index in both_orders(second.first, second.second):
                is_complement = structure.entities[rest.value].term[:1] == (OfValue(mask.value),)
                if is_complement and is_wrapped(structure, mask, moved, index):
                    return replace(index, scale=1.0)
    return None


def _difference(structure: Structure, x: View, y: View, dims: Dims, joined: Unordered) -> View | None:
    """A value less its own mean or maximum, or the mean of its squares less its squared mean."""
    for one, other in both_orders(x, y):
        is_difference = math.isclose(one.scale, -other.scale, rel_tol=1e-6)
        fact = _fact_of_difference(structure, one, other) if is_difference else None
        if fact is not None:
            # The form has the sign of its minuend.
            terms = [(OfValue(view.value), view.scale / one.scale) for view in (x, y)]
            value = structure.value("sum", unordered(*terms), joined, fact=fact)
            return View(value, dims, one.scale)
    return None


def _fact_of_difference(structure: Structure, x: View, subtrahend: View) -> Fact | None:
    facts = structure.facts
    fact = facts.get(subtrahend.value)
    match fact:
        case Mean(value, over) | Maximum(value, over):
            if value == x.value and is_over_its_elements(structure, subtrahend, x, over):
                return (Centred if isinstance(fact, Mean) else BelowMaximum)(value, over)
    if not are_aligned(structure, x, subtrahend):
        return None
    match facts.get(x.value), fact:
        case Mean(squares, over), Power(mean, 2):
            match facts.get(squares), facts.get(mean):
                case Power(value, 2), averaged if averaged == Mean(value, over):
                    return Variance(value, over)
    return None
