"""Operators on single elements, and composed activations in the form in which exporters write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.builder import Builder, Ref, Result, Rule
from onnxgc.matching.normal_form.constant_tables import Table, lowest_as_infinite
from onnxgc.matching.normal_form.dimensions import extent
from onnxgc.matching.normal_form.structure import Fixed, View
from onnxgc.matching.normal_form.terms import INFINITY, Terms
from onnxgc.model.core.ir import Node


def unary(op: str) -> Rule:
    def rule(t: Builder, node: Node) -> Result:
        x = t.view(node)
        settings = tuple(
            sorted((k, v) for k, v in node.attributes.items() if isinstance(v, int | float | str))
        )
        return None if x is None else [t.terms.unary(op, x, settings)]

    return rule


def by(apply: Callable[[Terms, View], View | None]) -> Rule:
    def rule(t: Builder, node: Node) -> Result:
        x = t.view(node)
        result = None if x is None else apply(t.terms, x)
        return None if result is None else [result]

    return rule


def add(t: Builder, node: Node) -> Result:
    return total(t, [(ref, 1.0) for ref in t.refs(node)], is_term=t.is_term(node.outputs[0]))


def sub(t: Builder, node: Node) -> Result:
    first, second = t.refs(node)
    return total(t, [(first, 1.0), (second, -1.0)], is_term=t.is_term(node.outputs[0]))


def total(t: Builder, operands: Sequence[tuple[Ref | None, float]], *, is_term: bool = False) -> Result:
    """The sum of operands times factors; a term where it `is_term` of another sum alone."""
    views = [t.terms.scaled(ref, factor) for ref, factor in operands if isinstance(ref, View)]
    constants = [(ref, factor) for ref, factor in operands if isinstance(ref, Fixed)]
    if not views or len(views) + len(constants) < len(operands):
        return None
    weights = [ref for ref, _ in constants if ref.number is None and ref.table is None]
    is_open = is_term and len(weights) == len(constants)
    result = t.terms.total(views, weights, is_term=is_open)
    for ref, factor in constants:
        if result is None:
            return None
        if ref.table is not None:
            result = t.terms.with_table(result, ref.shape, _scaled(ref.table, factor), is_added=True)
        elif ref.number is not None and _is_covered(result, ref):
            result = t.terms.plus_number(result, factor * ref.number)
        elif ref.number is not None:
            result = t.terms.with_weight(result, replace(ref, number=factor * ref.number), is_added=True)
    return None if result is None else [result]


def _scaled(table: Table, factor: float) -> Table:
    return table.mapped(lambda number: number * factor)


def _is_covered(x: View, number: Fixed) -> bool:
    """Whether adding or multiplying a number of that shape leaves the dimensions as they are."""
    if len(number.shape) > len(x.dims):
        return math.prod(number.shape) == 1
    pairs = zip(reversed(number.shape), reversed(x.dims), strict=False)
    return all(size == 1 or size == extent(dim) for size, dim in pairs)


def mul(t: Builder, node: Node) -> Result:
    return times(t, *t.refs(node))


def times(t: Builder, first: Ref | None, second: Ref | None) -> Result:
    if isinstance(first, View) and isinstance(second, View):
        result = t.terms.product(first, second)
        return None if result is None else [result]
    x, weight = (first, second) if isinstance(first, View) else (second, first)
    if not isinstance(x, View) or not isinstance(weight, Fixed):
        return None
    if weight.number is not None and _is_covered(x, weight):
        rank = max(len(x.dims), len(weight.shape))
        x = replace(x, dims=((),) * (rank - len(x.dims)) + x.dims)
        return [t.terms.scaled(x, weight.number)]
    if weight.table is not None:
        return [t.terms.with_table(x, weight.shape, weight.table, is_added=False)]
    return [t.terms.with_weight(x, weight, is_added=False)]


def div(t: Builder, node: Node) -> Result:
    first, second = t.refs(node)
    if not t.is_floating(node.outputs[0]):
        return None
    if isinstance(second, View):
        second = t.terms.not_expanded(second, first) if isinstance(first, View) else second
        second = t.terms.power(second, -1.0)
    elif isinstance(second, Fixed) and second.number is not None:
        if second.number == 0:
            return None
        second = replace(second, number=1 / second.number)
    elif isinstance(second, Fixed):
        table = second.table and second.table.mapped(lambda number: 1 / number if number else INFINITY)
        second = replace(second, name=f"1/{second.name}", table=table)
    return times(t, first, second)


def power_rule(t: Builder, node: Node) -> Result:
    x, exponent = t.view(node), t.number(node, 1, 1.0)
    return None if x is None or exponent is None else [t.terms.power(x, exponent)]


def clip(t: Builder, node: Node) -> Result:
    x = t.view(node)
    low = t.number(node, 1, float(node.attribute("min", -INFINITY)))
    high = t.number(node, 2, float(node.attribute("max", INFINITY)))
    return None if x is None or low is None or high is None else [t.terms.clipped(x, low, high)]


def limit(t: Builder, node: Node) -> Result:
    """Max and Min: with a number a limit, else of two values."""
    refs, is_max = t.refs(node), node.op == "Max"
    views = [ref for ref in refs if isinstance(ref, View)]
    numbers = [ref.number for ref in refs if isinstance(ref, Fixed)]
    if len(views) == 1 and len(refs) == 2 and numbers[0] is not None:
        low, high = (numbers[0], INFINITY) if is_max else (-INFINITY, numbers[0])
        return [t.terms.clipped(views[0], low, high)]
    result = t.terms.elementwise(node.op, *_present(refs), is_ordered=False)
    return None if result is None or len(refs) > 2 else [result]


def _present(refs: Sequence[Ref | None]) -> list[Ref]:
    return [ref for ref in refs if ref is not None]


def where(t: Builder, node: Node) -> Result:
    condition, first, second = t.refs(node)
    if t.is_floating(node.outputs[0]):
        first, second = _with_infinite_number(first), _with_infinite_number(second)
    match condition, first, second:
        case View(), View(), View():
            counted = t.terms.from_the_end(condition, first, second)
            extents = t.extents_indexed(node.outputs[0])
            if counted is not None and first in (t.terms.plus_number(second, extent) for extent in extents):
                return [counted]
        case View(dims=dims), Fixed(number=0.0), View() if t.terms.is_guard(condition, second):
            if dims == second.dims:
                return [second]
        case Fixed(table=Table() as seen), View(), Fixed(number=number) if number == -INFINITY:
            return [_masked(t, first, condition, seen)]
        case Fixed(table=Table() as hidden), Fixed(number=number), View() if number == -INFINITY:
            return [_masked(t, second, condition, hidden.mapped(lambda flag: 1 - flag))]
    result = t.terms.elementwise(node.op, *_present((condition, first, second)))
    return None if result is None else [result]


def _masked(t: Builder, x: View, condition: Fixed, seen: Table) -> View:
    """What is minus infinity where it is not seen, as a sum."""
    mask = seen.mapped(lambda flag: 0.0 if flag else -INFINITY)
    return t.terms.with_table(x, condition.shape, mask, is_added=True)


def _with_infinite_number(ref: Ref | None) -> Ref | None:
    if isinstance(ref, Fixed) and ref.number is not None:
        return replace(ref, number=lowest_as_infinite(ref.number))
    return ref


def compare(t: Builder, node: Node) -> Result:
    result = t.terms.elementwise(node.op, *_present(t.refs(node)))
    return None if result is None else [result]


def gelu(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    if node.attribute("approximate", "none") == "tanh":
        cube = t.terms.scaled(t.terms.power(x, 3.0), 0.044715)
        inner = t.terms.sum(x, cube)
        gate = None if inner is None else t.terms.tanh(t.terms.scaled(inner, math.sqrt(2 / math.pi)))
    else:
        gate = t.terms.erf(t.terms.scaled(x, math.sqrt(0.5)))
    result = None if gate is None else t.terms.product(x, t.terms.plus_number(gate, 1.0))
    return None if result is None else [t.terms.scaled(result, 0.5)]


def _hard_sigmoid_of(t: Builder, x: View, alpha: float, beta: float) -> View:
    return t.terms.clipped(t.terms.plus_number(t.terms.scaled(x, alpha), beta), 0.0, 1.0)


def hard_sigmoid(t: Builder, node: Node) -> Result:
    x = t.view(node)
    alpha, beta = float(node.attribute("alpha", 0.2)), float(node.attribute("beta", 0.5))
    return None if x is None else [_hard_sigmoid_of(t, x, alpha, beta)]


def hard_swish(t: Builder, node: Node) -> Result:
    x = t.view(node)
    result = None if x is None else t.terms.product(x, _hard_sigmoid_of(t, x, 1 / 6, 0.5))
    return None if result is None else [result]


def swish(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    gate = t.terms.unary("Sigmoid", t.terms.scaled(x, float(node.attribute("alpha", 1.0))), ())
    result = t.terms.product(x, gate)
    return None if result is None else [result]
