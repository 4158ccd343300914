"""Reductions, pooling, softmax and normalisations."""

import math
from collections.abc import Collection
from dataclasses import replace

from onnxgc.matching.normal_form import functions
from onnxgc.matching.normal_form.affine import scaled
from onnxgc.matching.normal_form.builder import Builder, of_view
from onnxgc.matching.normal_form.dimensions import as_set, atoms_at, extent
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.recognized_forms import Padded
from onnxgc.matching.normal_form.signs import is_never_negative
from onnxgc.matching.normal_form.terms import OfValue, in_terms, set_in_terms, unordered
from onnxgc.matching.operators.elementwise import add_scaled, times
from onnxgc.matching.operators.products import sliding_windows, spatial_dims
from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import has_input
from onnxgc.model.operators.reductions import reduced_axes

_DEFAULT_EPSILON = 1e-5


@of_view
def reduce(builder: Builder, node: Node, x: View) -> View | None:
    if has_input(node, 1) and builder.array(node.inputs[1]) is None:
        return None
    axes = reduced_axes(node, len(x.dims), builder.array)
    return reduced(builder, node.op, x, axes, is_kept=bool(node.attribute("keepdims", 1)))


def reduced(builder: Builder, op: str, x: View, axes: Collection[int], *, is_kept: bool) -> View:
    over = atoms_at(x.dims, axes)
    dims = tuple(() if axis in axes else dim for axis, dim in enumerate(x.dims) if is_kept or axis not in axes)
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


@of_view
def global_pool(builder: Builder, node: Node, x: View) -> View:
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    return reduced(builder, op, x, range(2, len(x.dims)), is_kept=True)


@of_view
def pool(builder: Builder, node: Node, x: View) -> View | None:
    if any(node.outputs[1:]):
        return None
    is_average = node.op == "AveragePool"
    fills = [0.0] if is_average else [-math.inf]
    match builder.structure.facts.get(x.value):
        case Padded(value) if not is_average and is_never_negative(builder.structure, replace(x, value=value)):
            fills.append(0.0)
    inner, windows = sliding_windows(builder, node, x, node.attribute("kernel_shape"), fills)
    is_padded = inner.value != x.value
    if all((size, stride, *pads) == (1, 1, 0, 0) for _, (size, stride, _, *pads) in windows):
        return x
    if all(numbers == (extent(dim), numbers[1], 1, 0, 0) for dim, numbers in windows):
        op = "ReduceMean" if is_average else "ReduceMax"
        return reduced(builder, op, inner, range(2, len(x.dims)), is_kept=True)
    has_pads = any(numbers[3:] != (0, 0) for _, numbers in windows)
    counts = is_average and has_pads and (bool(node.attribute("count_include_pad", 0)) or is_padded)
    if is_average and is_padded and any(node.attribute("pads") or ()):
        return None
    out = builder.shape(node.outputs[0])
    # Sizes depend on ceil_mode.
    each = ((in_terms(dim), numbers, size) for (dim, numbers), size in zip(windows, out[2:], strict=True))
    term = (OfValue(inner.value), inner.scale < 0, unordered(*each), counts)
    value = builder.structure.value(node.op, *term)
    spatial = spatial_dims(builder, node, inner, windows, out)
    return View(value, (*inner.dims[:2], *spatial), inner.scale)


@of_view
def softmax(builder: Builder, node: Node, x: View) -> View:
    op = "softmax" if node.op == "Softmax" else "logarithm of softmax"
    return functions.softmax(builder.structure, x, x.dims[int(node.attribute("axis", -1))], op)


@of_view
def layer_normalization(builder: Builder, node: Node, x: View) -> View | None:
    axis = int(node.attribute("axis", -1)) % len(x.dims)
    return _scaled_and_shifted(builder, node, _normalized(builder, node, x, axis), ())


@of_view
def instance_normalization(builder: Builder, node: Node, x: View) -> View | None:
    return _scaled_and_shifted(builder, node, _normalized(builder, node, x, 2), (1,) * (len(x.dims) - 2))


def _normalized(builder: Builder, node: Node, x: View, axis: int) -> View:
    """x, normalised over its dimensions from an axis on."""
    epsilon = float(node.attribute("epsilon", _DEFAULT_EPSILON))
    return functions.normalized(builder.structure, x, as_set(*x.dims[axis:]), epsilon)


@of_view
def batch_normalization(builder: Builder, node: Node, x: View) -> View | None:
    return _scaled_and_shifted(builder, node, x, (1,) * (len(x.dims) - 2))


def _scaled_and_shifted(builder: Builder, node: Node, x: View, inner: tuple[int, ...]) -> View | None:
    """x times the node's scale, plus its bias; the weights get `inner` dimensions in addition."""
    result: View | None = x
    for index in (1, 2):
        weight = builder.weight(node, index)
        if builder.view(node, index) is not None:
            return None
        if weight is None or result is None:
            continue
        # A small or untrained layer has few distinct values, which are learned all the same.
        weight = replace(weight, shape=(*weight.shape, *inner), table=None)
        result = times(builder, result, weight) if index == 1 else add_scaled(builder, [(result, 1.0), (weight, 1.0)])
    return result
