"""Reductions, pooling, softmax and normalisations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxgc.matching.normal_form import functions
from onnxgc.matching.normal_form.affine import scaled
from onnxgc.matching.normal_form.builder import Builder, Result
from onnxgc.matching.normal_form.dimensions import as_set, atoms_at, extent
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.recognized_forms import Padded
from onnxgc.matching.normal_form.signs import is_never_negative
from onnxgc.matching.normal_form.terms import OfValue, in_terms, set_in_terms, unordered
from onnxgc.matching.operators.elementwise import add_scaled, times
from onnxgc.matching.operators.products import pads, sliding_windows, spatial_dims
from onnxgc.model.core.ir import Node

_DEFAULT_EPSILON = 1e-5


def reduce(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    if x is None:
        return None
    axes = builder.ints(node, 1, "axes")
    if axes is None:
        if len(node.inputs) > 1 and node.inputs[1]:
            return None
        axes = [] if node.attribute("noop_with_empty_axes", 0) else list(range(len(x.dims)))
    axes = [axis % len(x.dims) for axis in axes]
    is_kept = bool(node.attribute("keepdims", 1))
    return [reduced(builder, node.op, x, axes, is_kept)]


def reduced(builder: Builder, op: str, x: View, axes: Sequence[int], is_kept: bool) -> View:
    over = atoms_at(x.dims, axes)
    dims = tuple(
        () if axis in axes else dim for axis, dim in enumerate(x.dims) if is_kept or axis not in axes
    )
    if not over and op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"):
        return replace(x, dims=dims)
    structure, count = builder.structure, float(extent(over))
    match op:
        case "ReduceMean":
            return functions.mean(structure, x, over, dims)
        case "ReduceSum":
            return scaled(structure, functions.mean(structure, x, over, dims), count)
        case "ReduceMax" | "ReduceMin":
            return functions.extreme(structure, op.removeprefix("Reduce").lower(), x, over, dims)
        case "ReduceSumSquare" | "ReduceL2":
            mean = functions.mean(structure, functions.power(structure, x, 2.0), over, dims)
            squares = scaled(structure, mean, count)
            return functions.power(structure, squares, 0.5) if op == "ReduceL2" else squares
    return View(structure.value(op, OfValue(x.value), x.scale, set_in_terms(over)), dims)


def global_pool(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    if x is None:
        return None
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    return [reduced(builder, op, x, range(2, len(x.dims)), is_kept=True)]


def pool(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    if x is None or any(node.outputs[1:]):
        return None
    kernel = node.attribute("kernel_shape")
    out = builder.shape(node.outputs[0])
    is_average = node.op == "AveragePool"
    fills = [0.0] if is_average else [-math.inf]
    match builder.structure.facts.get(x.value):
        case Padded(value) if not is_average and is_never_negative(
            builder.structure, replace(x, value=value)
        ):
            fills.append(0.0)
    inner, windows = sliding_windows(builder, node, x, kernel, fills)
    is_padded = inner.value != x.value
    if all((size, stride, *pads) == (1, 1, 0, 0) for _, (size, stride, _, *pads) in windows):
        return [x]
    if all(numbers == (extent(dim), numbers[1], 1, 0, 0) for dim, numbers in windows):
        return [
            reduced(builder, "ReduceMean" if is_average else "ReduceMax", inner, range(2, len(x.dims)), True)
        ]
    has_pads = any(numbers[3:] != (0, 0) for _, numbers in windows)
    counts = is_average and has_pads and (bool(node.attribute("count_include_pad", 0)) or is_padded)
    if is_average and is_padded and any(any(pads) for pads in pads(builder, node, kernel, kernel, kernel)):
        return None
    term = (unordered(*((in_terms(dim), numbers) for dim, numbers in windows)), counts)
    value = builder.structure.value(node.op, OfValue(inner.value), inner.scale < 0, *term)
    spatial = spatial_dims(builder, node, inner, windows, out)
    return [View(value, (*inner.dims[:2], *spatial), inner.scale)]


def softmax(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    if x is None:
        return None
    op = "softmax" if node.op == "Softmax" else "logarithm of softmax"
    return [functions.softmax(builder.structure, x, x.dims[int(node.attribute("axis", -1))], op)]


def layer_normalization(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    if x is None:
        return None
    axis = int(node.attribute("axis", -1)) % len(x.dims)
    epsilon = float(node.attribute("epsilon", _DEFAULT_EPSILON))
    result = functions.normalized(builder.structure, x, as_set(*x.dims[axis:]), epsilon)
    return _scaled_and_shifted(builder, node, result, ())


def instance_normalization(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    if x is None:
        return None
    epsilon = float(node.attribute("epsilon", _DEFAULT_EPSILON))
    result = functions.normalized(builder.structure, x, as_set(*x.dims[2:]), epsilon)
    return _scaled_and_shifted(builder, node, result, (1,) * (len(x.dims) - 2))


def batch_normalization(builder: Builder, node: Node) -> Result:
    x = builder.view(node)
    return None if x is None else _scaled_and_shifted(builder, node, x, (1,) * (len(x.dims) - 2))


def _scaled_and_shifted(builder: Builder, node: Node, x: View, inner: tuple[int, ...]) -> Result:
    """x times the node's scale, plus its bias; `inner` is the shape after that of these weights."""
    for index in (1, 2):
        weight = builder.weight(node, index)
        if weight is None:
            continue
        # A small or untrained layer has few distinct values, which are learned all the same.
        weight = replace(weight, shape=(*weight.shape, *inner), table=None)
        found = times(builder, x, weight) if index == 1 else add_scaled(builder, [(x, 1.0), (weight, 1.0)])
        if found is None or found[0] is None:
            return None
        x = found[0]
    return [x]
