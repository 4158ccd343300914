"""Elementwise products of two values, and those that are another function."""

import math

from onnxgc.matching.normal_form.addition import total
from onnxgc.matching.normal_form.affine import cover_in_result, scaled, weighted_along
from onnxgc.matching.normal_form.alignment import are_aligned, before_expansion, both_orders, is_over_its_elements
from onnxgc.matching.normal_form.dimensions import extent
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.functions import normalized, power, softmax
from onnxgc.matching.normal_form.recognized_forms import (
    ByDeviation,
    Centred,
    Fact,
    InverseDeviation,
    Mean,
    MeanByDeviation,
    Plus,
    Power,
    Product,
    ShiftedExponential,
    Weighted,
)
from onnxgc.matching.normal_form.terms import OfValue, unordered
from onnxgc.matching.normal_form.value_graph import Structure


def product(structure: Structure, x: View, y: View) -> View | None:
    """x * y; None if their dimensions do not fit."""
    x, y = before_expansion(structure, x, y), before_expansion(structure, y, x)
    for one, other in both_orders(x, y):
        weighted = structure.facts.get(one.value)
        if isinstance(weighted, Weighted) and isinstance(structure.facts.get(weighted.value), Power | InverseDeviation):
            return _weighted_last(structure, one, weighted, other)
    recognized = _normalization(structure, x, y) or _softmax(structure, x, y) or _polynomial(structure, x, y)
    if recognized is not None:
        return recognized
    aligned, crossing = structure.separated([(OfValue(view.value), view.dims) for view in (x, y)])
    broadcast = structure.broadcast(*aligned)
    if broadcast is None:
        return None
    dims, joined = broadcast
    fact = _quotient_by_deviation(structure, x, y) or Product(x, y)
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


def _normalization(structure: Structure, x: View, y: View) -> View | None:
    """(x - mean(x)) * deviation(x) ** -1."""
    for one, other in both_orders(x, y):
        match structure.facts.get(one.value), structure.facts.get(other.value):
            case Centred(value, over), InverseDeviation(deviating, deviating_over, epsilon):
                is_of_one_value = (value, over) == (deviating, deviating_over)
                if is_of_one_value and is_over_its_elements(structure, other, one, over):
                    # Variance and epsilon have one scale, which cancels; those of the operands remain.
                    result = normalized(structure, View(value, one.dims), over, epsilon)
                    return scaled(structure, result, one.scale * other.scale)
    return None


def _softmax(structure: Structure, x: View, y: View) -> View | None:
    """exp(x - max(x)) * sum(exp(x - max(x))) ** -1, or a multiple of it."""
    for one, other in both_orders(x, y):
        match structure.facts.get(one.value), structure.facts.get(other.value):
            case ShiftedExponential(value, over), Power(divisor, -1):
                is_its_sum = structure.facts.get(divisor) == Mean(one.value, over)
                if is_its_sum and is_over_its_elements(structure, other, one, over):
                    # The mean is the sum divided by the number of elements.
                    factor = one.scale * other.scale * extent(over)
                    result = softmax(structure, View(value, one.dims), over)
                    return scaled(structure, result, 1.0 if math.isclose(factor, 1.0) else factor)
    return None


def _polynomial(structure: Structure, x: View, y: View) -> View | None:
    """x ** n * x ** m as x ** (n + m), and x ** n * (x ** m + c) as x ** (n + m) + c x ** n."""
    if x.dims != y.dims:
        return None
    for one, other in both_orders(x, y):
        base, exponent = _as_power(structure, one.value)
        factor, more = _as_power(structure, other.value)
        scale = one.scale * other.scale
        x_of_base = View(base, x.dims)
        if base == factor:
            return scaled(structure, power(structure, x_of_base, exponent + more), scale)
        match structure.facts.get(other.value):
            case Plus(inner, offset):
                factor, more = _as_power(structure, inner)
                if base == factor and more != 1:
                    high = power(structure, x_of_base, exponent + more)
                    low = scaled(structure, power(structure, x_of_base, exponent), offset)
                    result = total(structure, [high, low])
                    return None if result is None else scaled(structure, result, scale)
    return None


def _as_power(structure: Structure, value: int) -> tuple[int, float]:
    match structure.facts.get(value):
        case Power(base, exponent):
            return base, exponent
    return value, 1.0


def _quotient_by_deviation(structure: Structure, x: View, y: View) -> Fact | None:
    """The fact about a product that is a value, or its mean, divided by the value's deviation."""
    for one, other in both_orders(x, y):
        match structure.facts.get(other.value):
            case InverseDeviation(value, over, epsilon):
                if one.value == value and is_over_its_elements(structure, other, one, over):
                    return ByDeviation(value, over, epsilon)
                is_its_mean = structure.facts.get(one.value) == Mean(value, over)
                if is_its_mean and are_aligned(structure, one, other):
                    return MeanByDeviation(value, over, epsilon)
    return None
