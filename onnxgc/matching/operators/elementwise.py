"""Elementwise operators, and activations composed as most exporters write them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnxgc.matching.normal_form import addition, affine, alignment, functions, multiplication
from onnxgc.matching.normal_form.builder import Builder, Ref, Rule, of_view
from onnxgc.matching.normal_form.constant_tables import Table, with_infinite_mask
from onnxgc.matching.normal_form.dimensions import extent
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.terms import OfValue
from onnxgc.matching.normal_form.value_graph import Structure, padded
from onnxgc.model.core.ir import Node


def with_attributes(op: str) -> Rule:
    """The rule of an operator on one value without another form."""

    @of_view
    def rule(builder: Builder, node: Node, x: View) -> View:
        settings = sorted((k, v) for k, v in node.attributes.items() if isinstance(v, int | float | str))
        return functions.unary(builder.structure, op, x, tuple(settings))

    return rule


def by(function: Callable[[Structure, View], View]) -> Rule:
    """The rule of an operator without attributes on one value."""
    return of_view(lambda builder, node, x: function(builder.structure, x))


# -- sums and products --


def add(builder: Builder, node: Node) -> View | None:
    """Add, Sum and Sub."""
    first, *others = builder.refs(node)
    factor = -1.0 if node.op == "Sub" else 1.0
    operands = [(first, 1.0), *((ref, factor) for ref in others)]
    return add_scaled(builder, operands, is_partial=builder.is_partial_sum(node.outputs[0]))


def add_scaled(
    builder: Builder, operands: Sequence[tuple[Ref | None, float]], *, is_partial: bool = False
) -> View | None:
    """The sum of operands times factors; `is_partial` if its only consumer is a sum."""
    structure = builder.structure
    views = [affine.scaled(structure, ref, factor) for ref, factor in operands if isinstance(ref, View)]
    constants = [(ref, factor) for ref, factor in operands if isinstance(ref, WeightTensor)]
    if not views or len(views) + len(constants) < len(operands):
        return None
    weights = [ref for ref, _ in constants if ref.number is None and ref.table is None]
    is_partial = is_partial and len(weights) == len(constants)
    result = addition.total(structure, views, weights, is_partial=is_partial)
    for ref, factor in constants:
        if result is None:
            return None
        if ref.table is not None:
            table = ref.table.scaled(factor)
            result = affine.with_table(structure, result, ref.shape, table, is_added=True)
        elif ref.number is not None and _is_covered(result, ref):
            result = affine.plus_number(structure, result, factor * ref.number)
        elif ref.number is not None:
            number = replace(ref, number=factor * ref.number)
            result = affine.with_weight(structure, result, number, is_added=True)
    return result


def _is_covered(x: View, number: WeightTensor) -> bool:
    """Whether x already has the dimensions of its broadcast with a number of that shape."""
    if len(number.shape) > len(x.dims):
        return math.prod(number.shape) == 1
    pairs = zip(reversed(number.shape), reversed(x.dims), strict=False)
    return all(size == 1 or size == extent(dim) for size, dim in pairs)


def mul(builder: Builder, node: Node) -> View | None:
    return times(builder, *builder.refs(node))


def times(builder: Builder, first: Ref | None, second: Ref | None) -> View | None:
    structure = builder.structure
    if isinstance(first, View) and isinstance(second, View):
        return multiplication.product(structure, first, second)
    x, weight = (first, second) if isinstance(first, View) else (second, first)
    if not isinstance(x, View) or not isinstance(weight, WeightTensor):
        return None
    if weight.number is not None and _is_covered(x, weight):
        x = replace(x, dims=padded(x.dims, max(len(x.dims), len(weight.shape))))
        return affine.scaled(structure, x, weight.number)
    if weight.table is not None:
        return affine.with_table(structure, x, weight.shape, weight.table, is_added=False)
    return affine.with_weight(structure, x, weight, is_added=False)


def div(builder: Builder, node: Node) -> View | None:
    first, second = builder.refs(node)
    if not builder.is_floating(node.outputs[0]):
        return None
    if isinstance(second, View):
        if isinstance(first, View):
            second = alignment.before_expansion(builder.structure, second, first)
        second = functions.power(builder.structure, second, -1.0)
    elif isinstance(second, WeightTensor) and second.number is not None:
        if second.number == 0:
            return None
        second = replace(second, number=1 / second.number)
    elif isinstance(second, WeightTensor):
        table = second.table and second.table.mapped(lambda number: 1 / number if number else math.inf)
        second = replace(second, name=f"1/{second.name}", table=table)
    return times(builder, first, second)


@of_view
def power(builder: Builder, node: Node, x: View) -> View | None:
    exponent = builder.number(node, 1, 1.0)
    return None if exponent is None else functions.power(builder.structure, x, exponent)


# -- limits and choices --


@of_view
def clip(builder: Builder, node: Node, x: View) -> View | None:
    low, high = builder.number(node, 1, -math.inf), builder.number(node, 2, math.inf)
    return None if low is None or high is None else functions.clipped(builder.structure, x, low, high)


def limit(builder: Builder, node: Node) -> View | None:
    """Max and Min: clipping if one of two operands is a number."""
    refs, is_max = builder.refs(node), node.op == "Max"
    views = [ref for ref in refs if isinstance(ref, View)]
    numbers = [ref.number for ref in refs if isinstance(ref, WeightTensor)]
    if len(views) == 1 and len(refs) == 2 and numbers[0] is not None:
        low, high = (numbers[0], math.inf) if is_max else (-math.inf, numbers[0])
        return functions.clipped(builder.structure, views[0], low, high)
    result = functions.elementwise(builder.structure, node.op, *refs, is_ordered=False)
    return None if len(refs) > 2 else result


def where(builder: Builder, node: Node) -> View | None:
    structure = builder.structure
    condition, first, second = builder.refs(node)
    if builder.is_floating(node.outputs[0]):
        first, second = _with_infinite_mask(first), _with_infinite_mask(second)
    match condition, first, second:
        case View(), View(), View() if addition.is_wrapped(structure, condition, first, second):
            extents = builder.extents_indexed(node.outputs[0])
            if first in (affine.plus_number(structure, second, extent) for extent in extents):
                return second
        case View(dims=dims), WeightTensor(number=0.0), View() if _is_nan_guard(structure, condition, second):
            if dims == second.dims:
                return second
        case WeightTensor(table=Table() as seen), View(), WeightTensor(number=number) if number == -math.inf:
            return _masked(builder, first, condition, seen)
        case WeightTensor(table=Table() as hidden), WeightTensor(number=number), View() if number == -math.inf:
            return _masked(builder, second, condition, hidden.mapped(lambda flag: 1 - flag))
    return functions.elementwise(structure, node.op, condition, first, second)


def _is_nan_guard(structure: Structure, condition: View, x: View) -> bool:
    """Whether a condition is that a softmax is NaN, as in a row that is masked entirely."""
    guard = structure.entities[condition.value]
    is_of_softmax = structure.entities[x.value].op == "softmax"
    return is_of_softmax and guard.op == "IsNaN" and guard.term[0] == OfValue(x.value)


def _masked(builder: Builder, x: View, condition: WeightTensor, seen: Table) -> View:
    """x, or minus infinity where it is not seen, as a sum."""
    mask = seen.mapped(lambda flag: 0.0 if flag else -math.inf)
    return affine.with_table(builder.structure, x, condition.shape, mask, is_added=True)


def _with_infinite_mask(ref: Ref | None) -> Ref | None:
    if isinstance(ref, WeightTensor) and ref.number is not None:
        return replace(ref, number=with_infinite_mask(ref.number))
    return ref


def compare(builder: Builder, node: Node) -> View | None:
    return functions.elementwise(builder.structure, node.op, *builder.refs(node))


# -- activations --


@of_view
def gelu(builder: Builder, node: Node, x: View) -> View | None:
    structure = builder.structure
    if node.attribute("approximate", "none") == "tanh":
        cube = affine.scaled(structure, functions.power(structure, x, 3.0), 0.044715)
        inner = addition.total(structure, [x, cube])
        if inner is None:
            return None
        gate = functions.odd(structure, "Tanh", affine.scaled(structure, inner, math.sqrt(2 / math.pi)))
    else:
        gate = functions.odd(structure, "Erf", affine.scaled(structure, x, math.sqrt(0.5)))
    result = multiplication.product(structure, x, affine.plus_number(structure, gate, 1.0))
    return None if result is None else affine.scaled(structure, result, 0.5)


def _hard_sigmoid_of(structure: Structure, x: View, alpha: float, beta: float) -> View:
    line = affine.plus_number(structure, affine.scaled(structure, x, alpha), beta)
    return functions.clipped(structure, line, 0.0, 1.0)


@of_view
def hard_sigmoid(builder: Builder, node: Node, x: View) -> View:
    alpha, beta = float(node.attribute("alpha", 0.2)), float(node.attribute("beta", 0.5))
    return _hard_sigmoid_of(builder.structure, x, alpha, beta)


@of_view
def hard_swish(builder: Builder, node: Node, x: View) -> View | None:
    structure = builder.structure
    return multiplication.product(structure, x, _hard_sigmoid_of(structure, x, 1 / 6, 0.5))


@of_view
def swish(builder: Builder, node: Node, x: View) -> View | None:
    structure = builder.structure
    inner = affine.scaled(structure, x, float(node.attribute("alpha", 1.0)))
    return multiplication.product(structure, x, functions.unary(structure, "Sigmoid", inner, ()))
