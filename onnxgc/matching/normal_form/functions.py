"""Functions of one value, reductions, and other elementwise operators on several values."""

import math
from typing import Any

from onnxgc.matching.normal_form.affine import marked_by_table, scaled, table_in_terms
from onnxgc.matching.normal_form.constant_tables import AxisContents
from onnxgc.matching.normal_form.dimensions import Dim, Dims, as_set, atoms_of
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.recognized_forms import (
    BelowMaximum,
    Centred,
    Clipped,
    InverseDeviation,
    Maximum,
    Mean,
    Normalized,
    Plus,
    Power,
    ShiftedExponential,
    Variance,
)
from onnxgc.matching.normal_form.terms import OfValue, in_terms, set_in_terms, unordered
from onnxgc.matching.normal_form.value_graph import Structure


def unary(structure: Structure, op: str, x: View, *settings: Any) -> View:
    return View(structure.value(op, OfValue(x.value), x.scale, *settings), x.dims)


def clipped(structure: Structure, x: View, low: float, high: float) -> View:
    """x within limits. A positive scale commutes with clipping."""
    if x.scale < 0:
        return scaled(structure, clipped(structure, scaled(structure, x, -1.0), -high, -low), -1.0)
    low, high, value = low / x.scale, high / x.scale, x.value
    match structure.facts.get(value):
        case Clipped(inner, inner_low, inner_high):
            # The outer limits win, also if no number is within both.
            low, high = min(max(inner_low, low), high), max(min(inner_high, high), low)
            value = inner
    fact = Clipped(value, low, high)
    return View(structure.value("clip", OfValue(value), low, high, fact=fact), x.dims, x.scale)


def power(structure: Structure, x: View, exponent: float) -> View:
    if exponent == 1:
        return x
    is_whole = float(exponent).is_integer()
    if x.scale < 0 and not is_whole:
        return unary(structure, "power", x, exponent)
    scale, value = float(x.scale**exponent), x.value
    match structure.facts.get(value):
        case Power(inner, before) if is_whole:
            value, exponent = inner, before * exponent
            if exponent == 1:
                return View(value, x.dims, scale)
    result = structure.value("power", OfValue(value), exponent, fact=Power(value, exponent))
    match structure.facts.get(value):
        case Plus(inner, epsilon) if exponent == -0.5 and (variance := _variance(structure, inner)):
            structure.facts[result] = InverseDeviation(variance.value, variance.over, epsilon)
    return View(result, x.dims, scale)


def _variance(structure: Structure, value: int) -> Variance | None:
    """The variance that a value is, in any of its spellings."""
    fact = structure.facts.get(value)
    if isinstance(fact, Clipped) and fact.low == 0:
        fact = structure.facts.get(fact.value)
    match fact:
        case Variance():
            return fact
        case Mean(square, over):
            match structure.facts.get(square):
                case Power(inner, 2):
                    centred = structure.facts.get(inner)
                    if isinstance(centred, Centred) and centred.over == over:
                        return Variance(centred.value, over)
    return None


def odd(structure: Structure, op: str, x: View) -> View:
    """An odd function of x: signs commute with it."""
    sign = math.copysign(1.0, x.scale)
    return scaled(structure, unary(structure, op, scaled(structure, x, sign)), sign)


def exp(structure: Structure, x: View) -> View:
    result = unary(structure, "Exp", x)
    match structure.facts.get(x.value):
        case BelowMaximum(value, over) if x.scale == 1:
            structure.facts.setdefault(result.value, ShiftedExponential(value, over))
    return result


def mean(structure: Structure, x: View, over: Dim, dims: Dims) -> View:
    """The mean over atoms; a mean of a mean is one over both."""
    value = x.value
    match structure.facts.get(value):
        case Mean(inner, before):
            value, over = inner, as_set(before, over)
    fact = Mean(value, over)
    return View(structure.value("mean", OfValue(value), set_in_terms(over), fact=fact), dims, x.scale)


def extreme(structure: Structure, op: str, x: View, over: Dim, dims: Dims) -> View:
    """The maximum or minimum (`op` is "max" or "min") over atoms."""
    if x.scale < 0:
        op = {"max": "min", "min": "max"}[op]
    fact = Maximum(x.value, over) if op == "max" else None
    return View(structure.value(op, OfValue(x.value), set_in_terms(over), fact=fact), dims, x.scale)


def normalized(structure: Structure, x: View, over: Dim, epsilon: float) -> View:
    """(x - mean(x)) / deviation(x)."""
    rest = as_set(tuple(a for a in atoms_of(x.dims) if not any(a.is_within(other) for other in over)))
    value = normalized_value(structure, Normalized(x.value, over, epsilon / x.scale**2, rest))
    return View(value, x.dims, math.copysign(1.0, x.scale))


def normalized_value(structure: Structure, fact: Normalized) -> int:
    term = (OfValue(fact.value), set_in_terms(fact.over), fact.epsilon)
    return structure.value("normalize", *term, cover=fact.rest, fact=fact)


def softmax(structure: Structure, x: View, over: Dim, op: str = "softmax") -> View:
    """The softmax over atoms, which get an axis that distinguishes them for consumers."""
    value = structure.value(op, OfValue(x.value), x.scale, set_in_terms(over))
    dims = tuple(
        tuple(structure.axis(op, atom.size, in_terms((atom,)))[0] if atom in over else atom for atom in dim)
        for dim in x.dims
    )
    return View(value, dims)


def elementwise(
    structure: Structure, op: str, *refs: View | WeightTensor | None, is_ordered: bool = True
) -> View | None:
    """An operator on elements of operands; None if one is unknown, or if their dimensions do not fit."""
    operands = [ref for ref in refs if ref is not None]
    if len(operands) < len(refs):
        return None
    keyed: list[tuple[Any, Dims]] = []
    for index, operand in enumerate(operands):
        key = (OfValue(operand.value), operand.scale) if isinstance(operand, View) else ()
        keyed.append(((index, key) if is_ordered else key, _own_dims(structure, operand)))
    aligned, crossing = structure.separated(keyed)
    broadcast = structure.broadcast(*aligned)
    if broadcast is None:
        return None
    dims, joined = broadcast
    terms: list[Any] = []
    weights: tuple[str, ...] = ()
    tables: list[AxisContents] = []
    for operand in operands:
        if isinstance(operand, View):
            terms.append((OfValue(operand.value), operand.scale))
        elif operand.number is not None:
            terms.append(operand.number)
        elif operand.table is not None:
            tables.append(operand.table.contents_by_axis())
            terms.append(table_in_terms(dims, tables[-1]))
        else:
            terms.append("weight")
            weights += (operand.name,)
    for contents in tables:
        dims = marked_by_table(structure, dims, contents)
    inner = tuple(terms) if is_ordered else unordered(*terms)
    return View(structure.value(op, inner, joined, *crossing, weights=weights), dims)


def _own_dims(structure: Structure, operand: View | WeightTensor) -> Dims:
    if isinstance(operand, View):
        return operand.dims
    return tuple(structure.axis("broadcast", size) for size in operand.shape)
