"""Pooling without ceil_mode, whose extent tools infer differently from what runtimes compute."""

from __future__ import annotations

from onnxgc.model.draft import Draft
from onnxgc.model.ir import Node

_POOLING = frozenset(["AveragePool", "LpPool", "MaxPool"])


def with_floor_pooling(draft: Draft) -> Draft:
    """The draft with ceil_mode turned into end pads, wherever these mean the same.

    Shapes must be known. A window that reaches past the padded input is one that the end pads
    reach; only an average that counts its padding tells the two apart.
    """
    return draft.with_changes(nodes=tuple(_floored(node, draft) for node in draft.nodes))


def _floored(node: Node, draft: Draft) -> Node:
    if node.domain or node.op not in _POOLING or not node.attribute("ceil_mode", 0):
        return node
    source, result = draft.type_of(node.inputs[0]), draft.type_of(node.outputs[0])
    if source is None or result is None or node.attribute("auto_pad", "NOTSET") not in ("NOTSET", b"NOTSET"):
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
    attributes = {key: value for key, value in node.attributes.items() if key != "ceil_mode"}
    return node.with_changes(attributes={**attributes, "pads": pads})
