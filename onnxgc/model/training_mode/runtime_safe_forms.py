"""Replaces operators that ONNX Runtime computes or fuses wrongly by equivalent safe forms.

`onnxgc.runtime.known_faults` describes each fault. A training file must be correct in any session, also with
default settings, so its forward part avoids them too.
"""

import math
import operator
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.core.stored_weights import is_external

_RACING_REDUCTIONS = ("add", "mul")
_SAME_PADDING = ("SAME_UPPER", "SAME_LOWER")


def without_runtime_faults(draft: Draft) -> Draft:
    """The draft, which must have static shapes, in forms that every ONNX Runtime session computes equally."""
    writer = _SafeFormWriter(draft)
    for node in draft.nodes:
        node = _without_private_attributes(node)
        rewrite = None if node.domain else _REWRITES.get(node.op)
        if rewrite is None or not rewrite(writer, node):
            writer.nodes.append(node)
    if len(writer.nodes) == len(draft.nodes) and all(map(operator.is_, writer.nodes, draft.nodes)):
        return draft
    return writer.result()


def _without_private_attributes(node: Node) -> Node:
    """The node without attributes such as `__x`, which fusions copy to operators that reject them."""
    public = {name: value for name, value in node.attributes.items() if not name.startswith("__")}
    if len(public) == len(node.attributes) or node.domain:
        return node
    return node.with_changes(attributes=public)


class _SafeFormWriter(GraphWriter):
    """Adds the operators that replace a node; the name of each ends in its `part`."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.producers = draft.producers()

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        kind = self.draft.type_of(tensor)
        return None if kind is None else kind.shape

    def add(
        self, source: Node, op: str, inputs: tuple[str, ...], part: str, output: str = "", **attributes: int
    ) -> str:
        output = output or self.names.fresh(f"{source.outputs[0]}_{part}")
        origin, name = source.origin or source.name, f"{source.name}/{part}"
        self.nodes.append(Node(op, inputs, (output,), attributes, name, origin, op, module=source.module))
        return output

    def reshape(self, source: Node, tensor: str, shape: tuple[int, ...], part: str, output: str = "") -> str:
        target = self.int_constant(f"{source.outputs[0]}_{part}_shape", shape)
        attributes = {"allowzero": 1} if 0 in shape else {}
        return self.add(source, "Reshape", (tensor, target), part, output, **attributes)


def _multiply_matrices(writer: _SafeFormWriter, node: Node) -> bool:
    """A product with a vector as a product of matrices."""
    shapes = [writer.shape(name) for name in node.inputs]
    result = writer.shape(node.outputs[0])
    left, right = shapes
    if left is None or right is None or result is None or 1 not in (len(left), len(right)):
        return False
    a, b = node.inputs
    if len(left) == 1:
        a = writer.reshape(node, a, (1, *left), "row")
    if len(right) == 1:
        b = writer.reshape(node, b, (*right, 1), "column")
    product = writer.names.fresh(f"{node.outputs[0]}_matrix")
    writer.nodes.append(node.with_changes(inputs=(a, b), outputs=(product,)))
    writer.reshape(node, product, result, "flat", node.outputs[0])
    return True


def _scatter_elements(writer: _SafeFormWriter, node: Node) -> bool:
    """ScatterND with a sum or product as ScatterElements over flat indices, whose kernel has no data race."""
    data, index, updates = (writer.draft.type_of(name) for name in node.inputs)
    if node.attribute("reduction") not in _RACING_REDUCTIONS:
        return False
    if data is None or index is None or updates is None:
        return False
    indexed = data.shape[: index.shape[-1]]
    if not all(data.shape) or not index.element_count or are_distinct(writer.weights.get(node.inputs[1])):
        return False
    width, count = math.prod(data.shape[len(indexed) :]), math.prod(index.shape[:-1])
    strides = [math.prod(indexed[axis + 1 :]) for axis in range(len(indexed))]
    y = node.outputs[0]
    sizes = writer.int_constant(f"{y}_sizes", indexed)
    # A negative index counts from the end; (index + size) mod size counts from the start.
    shifted = writer.add(node, "Add", (node.inputs[1], sizes), "shifted")
    within = writer.add(node, "Mod", (shifted, sizes), "within")
    offsets = writer.add(node, "Mul", (within, writer.int_constant(f"{y}_strides", strides)), "steps")
    axes = writer.int_constant(f"{y}_axes", [-1])
    flat = writer.add(node, "ReduceSum", (offsets, axes), "places", keepdims=0)
    column = writer.reshape(node, flat, (count, 1), "column")
    target = writer.int_constant(f"{y}_spread_shape", (count, width))
    indices = writer.add(node, "Expand", (column, target), "spread")
    rows = writer.reshape(node, node.inputs[0], (math.prod(indexed), width), "rows")
    values = writer.reshape(node, node.inputs[2], (count, width), "values")
    total = writer.names.fresh(f"{y}_flat")
    reduction = node.attribute("reduction")
    scattered = node.as_operator("ScatterElements", (rows, indices, values), (total,), axis=0, reduction=reduction)
    writer.nodes.append(scattered)
    writer.reshape(node, total, data.shape, "whole", node.outputs[0])
    return True


def are_distinct(index: Weight | None) -> bool:
    """Whether index vectors are constant, not negative, and each occurs once."""
    if index is None or is_external(index):
        return False
    vectors = index.load().reshape(-1, index.type.shape[-1])
    return bool((vectors >= 0).all() and len(np.unique(vectors, axis=0)) == len(vectors))


def _expand(writer: _SafeFormWriter, node: Node) -> bool:
    """Slices axes that Expand changes from 1 to 0 to size 0 first, so that Expand keeps their size."""
    source, result = writer.shape(node.inputs[0]), writer.shape(node.outputs[0])
    if source is None or result is None:
        return False
    aligned = (1,) * (len(result) - len(source)) + source
    emptied = [axis for axis, (old, new) in enumerate(zip(aligned, result, strict=True)) if old == 1 and new == 0]
    if not emptied:
        return False
    tensor = node.inputs[0]
    if aligned != source:
        tensor = writer.reshape(node, tensor, aligned, "aligned")
    zeros = [0] * len(emptied)
    settings = (
        writer.int_constant(f"{node.outputs[0]}_{part}", values)
        for part, values in (("starts", zeros), ("ends", zeros), ("axes", emptied))
    )
    cut = writer.add(node, "Slice", (tensor, *settings), "cut")
    writer.nodes.append(node.with_changes(inputs=(cut, *node.inputs[1:])))
    return True


def _root_as_power(writer: _SafeFormWriter, node: Node) -> bool:
    """A Sqrt that ONNX Runtime mistakes for a normalisation's standard deviation, as a power."""
    if not is_mistaken_deviation(node, writer.producers, writer.draft):
        return False
    is_double = writer.draft.required_type(node.inputs[0]).dtype == TensorProto.DOUBLE
    exponent = np.asarray(0.5, np.float64 if is_double else np.float32)
    half = writer.constant(f"{node.outputs[0]}_half", exponent)
    writer.nodes.append(node.as_operator("Pow", (node.inputs[0], half)))
    return True


def is_mistaken_deviation(root: Node, producers: dict[str, Node], draft: Draft) -> bool:
    """Whether a Sqrt matches LayerNormFusion's pattern although it is no normalisation's deviation.

    The fusion matches Sub, Pow, ReduceMean, Add, Sqrt and Div, but ignores the exponent, the order of the
    operands of Sub and Div, and an epsilon that is no constant scalar on the right.
    """

    def producer_of(node: Node | None, index: int, op: str) -> Node | None:
        producer = None if node is None or len(node.inputs) <= index else producers.get(node.inputs[index])
        while producer is not None and producer.op in ("Cast", "Identity"):
            producer = producers.get(producer.inputs[0])
        return producer if producer is not None and producer.op == op and not producer.domain else None

    added = producer_of(root, 0, "Add")
    side = next((side for side in (0, 1) if producer_of(added, side, "ReduceMean")), None)
    if added is None or side is None:
        return False
    mean = producer_of(added, side, "ReduceMean")
    square = producer_of(mean, 0, "Pow") or producer_of(mean, 0, "Mul")
    if square is None or (square.op == "Mul" and square.inputs[0] != square.inputs[1]):
        return False
    epsilon = draft.weights.get(added.inputs[1 - side])
    if side != 0 or epsilon is None or epsilon.type.element_count != 1:
        return True
    centred = producer_of(square, 0, "Sub")
    if centred is None:
        return False
    if square.op == "Pow":
        exponent = draft.weights.get(square.inputs[1])
        if exponent is None or exponent.type.element_count != 1 or float(exponent.load().item()) != 2:
            return True
    if producer_of(centred, 0, "ReduceMean"):
        return True
    return any(node.op == "Div" and root.outputs[0] == node.inputs[0] for node in draft.nodes)


def _pad_transposed_convolution(writer: _SafeFormWriter, node: Node) -> bool:
    """ConvTranspose with explicit pads instead of auto_pad and output_padding.

    ONNX's inference and the kernels disagree on the combination. Source: ONNX ConvTranspose-11, the extent
    by `auto_pad`, and the pads that follow from `output_shape`.
    """
    auto_pad = node.attribute("auto_pad", "NOTSET")
    padding = node.attribute("output_padding") or ()
    if auto_pad not in _SAME_PADDING or not any(padding) or node.attribute("output_shape"):
        return False
    sizes, kernel = writer.shape(node.inputs[0]), writer.shape(node.inputs[1])
    if sizes is None or kernel is None:
        return False
    rank = len(sizes) - 2
    strides, dilations = (node.attribute(name) or (1,) * rank for name in ("strides", "dilations"))
    begins, ends = [], []
    for size, width, stride, dilation, extra in zip(sizes[2:], kernel[2:], strides, dilations, padding, strict=True):
        reach = (size - 1) * stride + dilation * (width - 1) + 1
        total = max(reach + extra - size * stride, 0)
        begin = total // 2 if auto_pad == "SAME_UPPER" else (total + 1) // 2
        begins.append(begin)
        ends.append(total - begin)
    kept = {key: value for key, value in node.attributes.items() if key != "auto_pad"}
    attributes = {**kept, "pads": [*begins, *ends]}
    writer.nodes.append(node.with_changes(attributes=attributes))
    return True


_REWRITES: dict[str, Callable[[_SafeFormWriter, Node], bool]] = {
    "ConvTranspose": _pad_transposed_convolution,
    "Expand": _expand,
    "MatMul": _multiply_matrices,
    "ScatterND": _scatter_elements,
    "Sqrt": _root_as_power,
}
