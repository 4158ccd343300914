"""Products of two values that are another function: normalisations, softmax and polynomials."""

from __future__ import annotations

from onnxgc.matching.normal_form.addition import total
from onnxgc.matching.normal_form.affine import scaled
from onnxgc.matching.normal_form.alignment import are_aligned, both_orders, is_over_its_elements
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
    ShiftedExponential,
)
from onnxgc.matching.normal_form.recognized_sums import Recognizer
from onnxgc.matching.normal_form.value_graph import Structure


def recognized_product(structure: Structure, x: View, y: View) -> View | None:
    """The form that x * y has; None for a plain product."""
    for recognizer in _RECOGNIZERS:
        found = recognizer(structure, x, y)
        if found is not None:
            return found
    return None


def normalization(structure: Structure, x: View, y: View) -> View | None:
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


def softmax_quotient(structure: Structure, x: View, y: View) -> View | None:
    """exp(x - max(x)) * sum(exp(x - max(x))) ** -1."""
    for one, other in both_orders(x, y):
        match structure.facts.get(one.value), structure.facts.get(other.value):
            case ShiftedExponential(value, over), Power(divisor, -1):
                is_its_sum = structure.facts.get(divisor) == Mean(one.value, over)
                if is_its_sum and is_over_its_elements(structure, other, one, over):
                    return softmax(structure, View(value, one.dims), over)
    return None


def polynomial(structure: Structure, x: View, y: View) -> View | None:
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
    """The base and exponent of a value."""
    match structure.facts.get(value):
        case Power(base, exponent):
            return base, exponent
    return value, 1.0


def quotient_by_deviation(structure: Structure, x: View, y: View) -> Fact | None:
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


_RECOGNIZERS: tuple[Recognizer, ...] = (normalization, softmax_quotient, polynomial)
