"""Replaces operators that ONNX Runtime computes or fuses wrongly by equivalent safe forms.

`onnxgc.runtime.known_faults` describes each fault. A training file must be correct in any session, also with
default settings, so its forward part avoids them too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Array, Node, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, is_external

_RACING_REDUCTIONS = ("add", "mul")
_SAME_PADDING = ("SAME_UPPER", "SAME_LOWER")


def without_runtime_faults(draft: Draft) -> Draft:
    """The draft, which must have static shapes, in forms that every ONNX Runtime session computes equally."""
    writer = _GraphWriter(draft)
    producers = draft.producers()
    for node in draft.nodes:
        node = _without_private_attributes(node)
        rewrite = None if node.domain else _REWRITES.get(node.op)
        if rewrite is None or not rewrite(writer, node, producers):
            writer.nodes.append(node)
    if len(writer.nodes) == len(draft.nodes) and all(map(operator.is_, writer.nodes, draft.nodes)):
        return draft
    return draft.with_changes(nodes=tuple(writer.nodes), weights=writer.weights)


def _without_private_attributes(node: Node) -> Node:
    """The node without attributes such as `__x`, which fusions copy to operators that reject them."""
    public = {name: value for name, value in node.attributes.items() if not name.startswith("__")}
    if len(public) == len(node.attributes) or node.domain:
        return node
    return node.with_changes(attributes=public)


@dataclass(slots=True)
class _GraphWriter:
    """Collects the nodes and weights of the new graph."""

    draft: Draft
    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(init=False)
    names: NameSource = field(init=False)

    def __post_init__(self) -> None:
        self.weights = dict(self.draft.weights)
        self.names = NameSource(self.draft.tensor_names())

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        kind = self.draft.type_of(tensor)
        return None if kind is None else kind.shape

    def constant(self, values: Iterable[int] | Array, wanted: str) -> str:
        name = self.names.fresh(wanted)
        self.weights[name] = ArrayWeight(np.asarray(values, np.int64))
        return name

    def add(
        self, of: Node, op: str, inputs: tuple[str, ...], part: str, output: str = "", **more: int
    ) -> str:
        """Adds a node that replaces a part of another, and returns its output."""
        output = output or self.names.fresh(f"{of.outputs[0]}_{part}")
        name = f"{of.name}/{part}"
        self.nodes.append(Node(op, inputs, (output,), more, name, of.origin or of.name, op))
        return output

    def reshape(self, of: Node, tensor: str, shape: tuple[int, ...], part: str, output: str = "") -> str:
        target = self.constant(shape, f"{of.outputs[0]}_{part}_shape")
        return self.add(
            of, "Reshape", (tensor, target), part, output, **({"allowzero": 1} if 0 in shape else {})
        )


def _multiply_matrices(writer: _GraphWriter, node: Node, producers: dict[str, Node]) -> bool:
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


def _scatter_elements(writer: _GraphWriter, node: Node, producers: dict[str, Node]) -> bool:
    """ScatterND with a sum or product as ScatterElements over flat indices, whose kernel has no data race."""
    data, index, updates = (writer.draft.type_of(name) for name in node.inputs)
    if node.attribute("reduction", "none") not in (
        *_RACING_REDUCTIONS,
        *(text.encode() for text in _RACING_REDUCTIONS),
    ):
        return False
    if data is None or index is None or updates is None:
        return False
    indexed = data.shape[: index.shape[-1]]
    if not all(data.shape) or not index.element_count or are_distinct(writer.weights.get(node.inputs[1])):
        return False
    width, count = math.prod(data.shape[len(indexed) :]), math.prod(index.shape[:-1])
    strides = [math.prod(indexed[axis + 1 :]) for axis in range(len(indexed))]
    sizes = writer.constant(indexed, f"{node.outputs[0]}_sizes")
    # A negative index counts from the end; (index + size) mod size counts from the start.
    shifted = writer.add(node, "Add", (node.inputs[1], sizes), "shifted")
    within = writer.add(node, "Mod", (shifted, sizes), "within")
    offsets = writer.add(
        node, "Mul", (within, writer.constant(strides, f"{node.outputs[0]}_strides")), "steps"
    )
    axes = writer.constant([-1], f"{node.outputs[0]}_axes")
    flat = writer.add(node, "ReduceSum", (offsets, axes), "places", keepdims=0)
    column = writer.reshape(node, flat, (count, 1), "column")
    target = writer.constant((count, width), f"{node.outputs[0]}_spread_shape")
    places = writer.add(node, "Expand", (column, target), "spread")
    rows = writer.reshape(node, node.inputs[0], (math.prod(indexed), width), "rows")
    values = writer.reshape(node, node.inputs[2], (count, width), "values")
    total = writer.names.fresh(f"{node.outputs[0]}_flat")
    attributes = {"axis": 0, "reduction": node.attribute("reduction")}
    writer.nodes.append(
        node.with_changes(
            op="ScatterElements",
            inputs=(rows, places, values),
            outputs=(total,),
            attributes=attributes,
            rule="ScatterElements",
        )
    )
    writer.reshape(node, total, data.shape, "whole", node.outputs[0])
    return True


def are_distinct(index: Weight | None) -> bool:
    """Whether index vectors are constant, not negative, and each occurs once."""
    if index is None or is_external(index):
        return False
    vectors = index.load().reshape(-1, index.type.shape[-1])
    return bool((vectors >= 0).all() and len(np.unique(vectors, axis=0)) == len(vectors))


def _expand(writer: _GraphWriter, node: Node, producers: dict[str, Node]) -> bool:
    """Slices axes that Expand changes from 1 to 0 to size 0 first, so that Expand keeps their size."""
    source, result = writer.shape(node.inputs[0]), writer.shape(node.outputs[0])
    if source is None or result is None:
        return False
    aligned = (1,) * (len(result) - len(source)) + source
    emptied = [
        axis for axis, (old, new) in enumerate(zip(aligned, result, strict=True)) if old == 1 and new == 0
    ]
    if not emptied:
        return False
    tensor = node.inputs[0]
    if aligned != source:
        tensor = writer.reshape(node, tensor, aligned, "aligned")
    zeros = [0] * len(emptied)
    settings = (
        writer.constant(values, f"{node.outputs[0]}_{part}")
        for part, values in (("starts", zeros), ("ends", zeros), ("axes", emptied))
    )
    cut = writer.add(node, "Slice", (tensor, *settings), "cut")
    writer.nodes.append(node.with_changes(inputs=(cut, *node.inputs[1:])))
    return True


def _root_as_power(writer: _GraphWriter, node: Node, producers: dict[str, Node]) -> bool:
    """A Sqrt that ONNX Runtime mistakes for a normalisation's standard deviation, as a power."""
    if not is_mistaken_deviation(node, producers, writer.draft):
        return False
    kind = writer.draft.type_of(node.inputs[0])
    assert kind is not None
    half = writer.names.fresh(f"{node.outputs[0]}_half")
    dtype = np.float64 if kind.dtype == TensorProto.DOUBLE else np.float32
    writer.weights[half] = ArrayWeight(np.asarray(0.5, dtype))
    writer.nodes.append(node.with_changes(op="Pow", inputs=(node.inputs[0], half), rule="Pow", attributes={}))
    return True


def is_mistaken_deviation(root: Node, producers: dict[str, Node], draft: Draft) -> bool:
    """Whether a Sqrt matches LayerNormFusion's pattern although it is no normalisation's deviation.

    The fusion matches Sub, Pow, ReduceMean, Add, Sqrt and Div, but ignores the exponent, the order of the
    operands of Sub and Div, and an epsilon that is no constant scalar on the right.
    """

    def producer_of(node: Node | None, index: int, op: str) -> Node | None:
        found = None if node is None or len(node.inputs) <= index else producers.get(node.inputs[index])
        while found is not None and found.op in ("Cast", "Identity"):
            found = producers.get(found.inputs[0])
        return found if found is not None and found.op == op and not found.domain else None

    added = producer_of(root, 0, "Add")
    if added is None:
        return False
    side = next((side for side in (0, 1) if producer_of(added, side, "ReduceMean")), None)
    if side is None:
        return False
    mean = producer_of(added, side, "ReduceMean")
    square = producer_of(mean, 0, "Pow")
    if square is None:
        product = producer_of(mean, 0, "Mul")
        if product is None or product.inputs[0] != product.inputs[1]:
            return False
        square = product
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


def _pad_transposed_convolution(writer: _GraphWriter, node: Node, producers: dict[str, Node]) -> bool:
    """ConvTranspose with explicit pads in place of auto_pad and output_padding.

    ONNX's inference and the kernels disagree on the combination. Source: ONNX ConvTranspose-11, the extent
    by `auto_pad`, and the pads that follow from `output_shape`.
    """
    auto_pad = node.attribute("auto_pad", "NOTSET")
    auto_pad = auto_pad.decode() if isinstance(auto_pad, bytes) else auto_pad
    padding = node.attribute("output_padding") or ()
    if auto_pad not in _SAME_PADDING or not any(padding) or node.attribute("output_shape"):
        return False
    sizes, kernel = writer.shape(node.inputs[0]), writer.shape(node.inputs[1])
    if sizes is None or kernel is None:
        return False
    rank = len(sizes) - 2
    strides, dilations = (node.attribute(name) or (1,) * rank for name in ("strides", "dilations"))
    begins, ends = [], []
    for size, width, stride, dilation, extra in zip(
        sizes[2:], kernel[2:], strides, dilations, padding, strict=True
    ):
        reach = (size - 1) * stride + dilation * (width - 1) + 1
        total = max(reach + extra - size * stride, 0)
        begin = total // 2 if auto_pad == "SAME_UPPER" else (total + 1) // 2
        begins.append(begin)
        ends.append(total - begin)
    kept = {key: value for key, value in node.attributes.items() if key != "auto_pad"}
    attributes = {**kept, "pads": [*begins, *ends]}
    writer.nodes.append(node.with_changes(attributes=attributes))
    return True


_Rewrite = Callable[[_GraphWriter, Node, dict[str, Node]], bool]
_REWRITES: dict[str, _Rewrite] = {
    "ConvTranspose": _pad_transposed_convolution,
    "Expand": _expand,
    "MatMul": _multiply_matrices,
    "ScatterND": _scatter_elements,
    "Sqrt": _root_as_power,
}
