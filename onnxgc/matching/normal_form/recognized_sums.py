"""Sums of two values that are another function: differences, variances, normalisations and indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onnxgc.matching.normal_form.affine import cover_in_result, scaled, weighted_along
from onnxgc.matching.normal_form.alignment import are_aligned, both_orders, is_over_its_elements
from onnxgc.matching.normal_form.dimensions import Dim
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.functions import normalized
from onnxgc.matching.normal_form.index_wrapping import wrapped_by_masks
from onnxgc.matching.normal_form.recognized_forms import (
    BelowMaximum,
    ByDeviation,
    Centred,
    Fact,
    Maximum,
    Mean,
    MeanByDeviation,
    Power,
    Shifted,
    Variance,
    Weighted,
)
from onnxgc.matching.normal_form.terms import OfValue, unordered
from onnxgc.matching.normal_form.value_graph import Structure

Recognizer = Callable[[Structure, View, View], View | None]
"""Another form of two operands, in either order; None where they have none."""


def recognized_sum(structure: Structure, x: View, y: View) -> View | None:
    """The form that x + y has; None for a plain sum."""
    if structure.broadcast(x.dims, y.dims) is None:
        return None
    for recognizer in _RECOGNIZERS:
        found = recognizer(structure, x, y)
        if found is not None:
            return found
    return None


def affine_normalization(structure: Structure, x: View, y: View) -> View | None:
    """x s + (b - mean(x) s) with s = g / deviation(x), in which g, b or both may be absent.

    Many exporters write batch normalisation so.
    """
    broadcast = structure.broadcast(x.dims, y.dims)
    if broadcast is None:
        return None
    dims = broadcast[0]
    for one, other in both_orders(x, y):
        shift = structure.facts.get(other.value)
        mean, scale = (shift.value, shift.scale) if isinstance(shift, Shifted) else (other.value, 1.0)
        top, bottom = _Unweighted.of(structure, one.value), _Unweighted.of(structure, mean)
        is_difference = math.isclose(top.factor, -scale * other.scale * bottom.factor)
        if one.scale != 1 or top.weight != bottom.weight or not is_difference:
            continue
        match top.fact, bottom.fact:
            case ByDeviation(value, over, epsilon), MeanByDeviation() as mean_fact:
                is_of_one_value = mean_fact == MeanByDeviation(value, over, epsilon)
            case _:
                continue
        if not is_of_one_value or not is_over_its_elements(structure, other, one, over):
            continue
        result = scaled(structure, normalized(structure, View(value, dims), over, epsilon), top.factor)
        if top.weight is not None:
            cover = cover_in_result(top.cover, one.dims, dims)
            result = weighted_along(structure, result, top.weight, cover)
        if isinstance(shift, Shifted):
            cover = cover_in_result(shift.cover, other.dims, dims)
            result = weighted_along(structure, result, shift.weight, cover, is_added=True)
        return result
    return None


@dataclass(frozen=True, slots=True)
class _Unweighted:
    """The fact about a value without the weight that multiplies it, and that weight."""

    fact: Fact | None
    weight: WeightTensor | None = None
    cover: Dim = ()
    factor: float = 1.0

    @classmethod
    def of(cls, structure: Structure, value: int) -> _Unweighted:
        match structure.facts.get(value):
            case Weighted(inner, weight, cover, scale):
                return cls(structure.facts.get(inner), weight, cover, scale)
            case fact:
                return cls(fact)


def difference(structure: Structure, x: View, y: View) -> View | None:
    """A value less its own mean or maximum, or the mean of its squares less its squared mean."""
    broadcast = structure.broadcast(x.dims, y.dims)
    if broadcast is None:
        return None
    dims, joined = broadcast
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
                case Power(value, 2), Mean(averaged, averaged_over):
                    return Variance(value, over) if (averaged, averaged_over) == (value, over) else None
    return None


_RECOGNIZERS: tuple[Recognizer, ...] = (affine_normalization, wrapped_by_masks, difference)
