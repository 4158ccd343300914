"""Reductions, pooling and normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.builder import Builder, Result
from onnxgc.matching.normal_form.dimensions import as_set, extent
from onnxgc.matching.normal_form.signs import is_never_negative
from onnxgc.matching.normal_form.structure import OfValue, View, in_terms, set_in_terms, unordered
from onnxgc.matching.normal_form.terms import INFINITY, positions
from onnxgc.matching.operators.elementwise import times, total
from onnxgc.matching.operators.products import pads, slid, windows
from onnxgc.model.core.ir import Node

_DEFAULT_EPSILON = 1e-5


def reduce(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    axes = t.ints(node, 1, "axes")
    if axes is None:
        if len(node.inputs) > 1 and node.inputs[1]:
            return None
        axes = [] if node.attribute("noop_with_empty_axes", 0) else list(range(len(x.dims)))
    axes = [axis % len(x.dims) for axis in axes]
    is_kept = bool(node.attribute("keepdims", 1))
    return [reduced(t, node.op, x, axes, is_kept)]


def reduced(t: Builder, op: str, x: View, axes: Sequence[int], is_kept: bool) -> View:
    over = positions(x.dims, axes)
    dims = tuple(
        () if place in axes else dim for place, dim in enumerate(x.dims) if is_kept or place not in axes
    )
    if not over and op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"):
        return replace(x, dims=dims)
    match op:
        case "ReduceMean":
            return t.terms.mean(x, over, dims)
        case "ReduceSum":
            return t.terms.scaled(t.terms.mean(x, over, dims), float(extent(over)))
        case "ReduceMax" | "ReduceMin":
            return t.terms.extreme(op.removeprefix("Reduce").lower(), x, over, dims)
        case "ReduceSumSquare":
            return t.terms.scaled(t.terms.mean(t.terms.power(x, 2.0), over, dims), float(extent(over)))
        case "ReduceL2":
            squares = t.terms.mean(t.terms.power(x, 2.0), over, dims)
            return t.terms.power(t.terms.scaled(squares, float(extent(over))), 0.5)
    value = t.structure.value(op, OfValue(x.value), x.scale, set_in_terms(over))
    return View(value, dims)


def global_pool(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    return [reduced(t, op, x, range(2, len(x.dims)), is_kept=True)]


def pool(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None or any(node.outputs[1:]):
        return None
    kernel = node.attribute("kernel_shape")
    out = t.shape(node.outputs[0])
    is_average = node.op == "AveragePool"
    fills = [0.0] if is_average else [-INFINITY]
    known = t.structure.known_as.get(x.value, ("",))
    if not is_average and known[0] == "padded" and is_never_negative(t.structure, replace(x, value=known[1])):
        fills.append(0.0)
    inner, places = windows(t, node, x, kernel, fills)
    padded = inner.value != x.value
    if all((size, stride, *pads) == (1, 1, 0, 0) for _, (size, stride, _, *pads) in places):
        return [x]
    if all(numbers == (extent(dim), numbers[1], 1, 0, 0) for dim, numbers in places):
        return [reduced(t, "ReduceMean" if is_average else "ReduceMax", inner, range(2, len(x.dims)), True)]
    has_pads = any(numbers[3:] != (0, 0) for _, numbers in places)
    counts = is_average and has_pads and (bool(node.attribute("count_include_pad", 0)) or padded)
    if is_average and padded and any(any(pads) for pads in pads(t, node, kernel, kernel, kernel)):
        return None
    term = (unordered(*((in_terms(dim), numbers) for dim, numbers in places)), counts)
    value = t.structure.value(node.op, OfValue(inner.value), inner.scale < 0, *term)
    spatial = slid(t, node, inner, places, out)
    return [View(value, (*inner.dims[:2], *spatial), inner.scale)]


def softmax(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    op = "softmax" if node.op == "Softmax" else "logarithm of softmax"
    return [t.terms.softmax(x, x.dims[int(node.attribute("axis", -1))], op)]


def layer_normalization(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    axis = int(node.attribute("axis", -1)) % len(x.dims)
    epsilon = float(node.attribute("epsilon", _DEFAULT_EPSILON))
    result = t.terms.normalized(x, as_set(*x.dims[axis:]), epsilon)
    return _scaled_and_shifted(t, node, result, ())


def instance_normalization(t: Builder, node: Node) -> Result:
    x = t.view(node)
    if x is None:
        return None
    epsilon = float(node.attribute("epsilon", _DEFAULT_EPSILON))
    result = t.terms.normalized(x, as_set(*x.dims[2:]), epsilon)
    return _scaled_and_shifted(t, node, result, (1,) * (len(x.dims) - 2))


def batch_normalization(t: Builder, node: Node) -> Result:
    x = t.view(node)
    return None if x is None else _scaled_and_shifted(t, node, x, (1,) * (len(x.dims) - 2))


def _scaled_and_shifted(t: Builder, node: Node, x: View, behind: tuple[int, ...]) -> Result:
    """x times the node's scale, plus its bias, each spread over dimensions behind its own."""
    for index in (1, 2):
        weight = t.fixed(node, index)
        if weight is None:
            continue
        # Few values of a small or untrained layer are no table.
        weight = replace(weight, shape=(*weight.shape, *behind), table=None)
        found = times(t, x, weight) if index == 1 else total(t, [(x, 1.0), (weight, 1.0)])
        if found is None or found[0] is None:
            return None
        x = found[0]
    return [x]
