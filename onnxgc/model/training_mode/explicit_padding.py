"""Pooling with explicit pads instead of auto_pad and ceil_mode.

For ceil_mode, inferred extents differ from computed ones; for auto_pad without any padding, runtimes
disagree.
"""

import numpy as np

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node

_POOLING = frozenset(["AveragePool", "LpPool", "MaxPool"])
_SAME = ("SAME_UPPER", "SAME_LOWER")
# Beyond the end of any axis.
_SLICE_END = np.iinfo(np.int64).max


def with_explicit_pads(draft: Draft) -> Draft:
    """The draft, at the target opset and with static shapes, with pads instead of auto_pad.

    If the windows do not reach the end of an axis, there is no padding and the first window begins at the
    first element. ONNX Runtime rejects that for AveragePool and MaxPool; for LpPool it crops at both ends, as
    does this form.

    Raises:
        UnsupportedOperatorError: a node has auto_pad and dilations.
    """
    writer = GraphWriter(draft)
    for node in draft.nodes:
        totals = _total_pads(node, draft)
        if totals is None:
            writer.nodes.append(node)
            continue
        is_lower = node.attribute("auto_pad") == "SAME_LOWER"
        begins = [(max(total, 0) + is_lower) // 2 for total in totals]
        ends = [max(total, 0) - begin for total, begin in zip(totals, begins, strict=True)]
        crops = [max(-total - is_lower, 0) // 2 for total in totals] if node.op == "LpPool" else []
        if any(crops):
            node = node.with_changes(inputs=(_cropped(writer, node, crops),))
        writer.nodes.append(_with_pads(node, [*begins, *ends], "auto_pad", "ceil_mode"))
    return writer.result()


def _cropped(writer: GraphWriter, node: Node, crops: list[int]) -> str:
    """The node's input from index `crops` of each axis on, and that Slice."""
    output = writer.names.fresh(f"{node.outputs[0]}_cut")
    limits = {"starts": crops, "ends": [_SLICE_END] * len(crops), "axes": range(2, 2 + len(crops))}
    settings = [writer.int_constant(f"{output}_{part}", values) for part, values in limits.items()]
    writer.nodes.append(node.as_operator("Slice", (node.inputs[0], *settings), (output,), f"{node.name}/cut"))
    return output


def _with_pads(node: Node, pads: list[int], *replaced: str) -> Node:
    """The node with explicit pads, without the attributes that they replace."""
    kept = {key: value for key, value in node.attributes.items() if key not in replaced}
    return node.with_changes(attributes={**kept, "pads": pads})


def _total_pads(node: Node, draft: Draft) -> list[int] | None:
    """The elements that auto_pad adds to each axis, negative if it crops; None without auto_pad."""
    if node.domain or node.op not in _POOLING or node.attribute("auto_pad") not in _SAME:
        return None
    source, result = draft.type_of(node.inputs[0]), draft.type_of(node.outputs[0])
    if source is None or result is None:
        return None
    kernel = node.attribute("kernel_shape")
    strides = node.attribute("strides") or [1] * len(kernel)
    if any(dilation > 1 for dilation in node.attribute("dilations") or ()):
        raise UnsupportedOperatorError(
            f"{node.location} has auto_pad and dilations, for which ONNX Runtime adds less padding than ONNX "
            "requires; export the model with explicit pads"
        )
    return [
        (extent - 1) * stride + size - total
        for total, extent, size, stride in zip(source.shape[2:], result.shape[2:], kernel, strides, strict=True)
    ]


def with_floor_pooling(draft: Draft) -> Draft:
    """The draft with end pads instead of ceil_mode, if the two are equivalent; shapes must be static.

    They differ only for an average that counts its padding.
    """
    return draft.with_changes(nodes=tuple(_with_floor_mode(node, draft) for node in draft.nodes))


def _with_floor_mode(node: Node, draft: Draft) -> Node:
    if node.domain or node.op not in _POOLING or not node.attribute("ceil_mode", 0):
        return node
    source, result = draft.type_of(node.inputs[0]), draft.type_of(node.outputs[0])
    if source is None or result is None or node.attribute("auto_pad", "NOTSET") != "NOTSET":
        return node
    rank = len(source.shape) - 2
    kernel = node.attribute("kernel_shape")
    strides = node.attribute("strides") or [1] * rank
    dilations = node.attribute("dilations") or [1] * rank
    pads = list(node.attribute("pads") or [0] * (2 * rank))
    for axis in range(rank):
        size, extent = source.shape[2 + axis], result.shape[2 + axis]
        reach = (extent - 1) * strides[axis] + dilations[axis] * (kernel[axis] - 1) + 1
        missing = reach - size - pads[axis] - pads[rank + axis]
        if missing > 0 and node.attribute("count_include_pad", 0):
            return node
        pads[rank + axis] += max(missing, 0)
    return _with_pads(node, pads, "ceil_mode")
