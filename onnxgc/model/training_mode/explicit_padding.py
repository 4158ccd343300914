"""Pooling with pads that are written out.

Tools infer the extents of ceil_mode differently from what runtimes compute, and runtimes do not agree on
what auto_pad means where it has nothing to pad.
"""

from __future__ import annotations

import numpy as np

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Node
from onnxgc.model.core.stored_weights import ArrayWeight

_POOLING = frozenset(["AveragePool", "LpPool", "MaxPool"])
_SAME = ("SAME_UPPER", "SAME_LOWER")
# A slice's end that is beyond any extent.
_TO_THE_END = np.iinfo(np.int64).max


def with_explicit_pads(draft: Draft) -> Draft:
    """The draft, at the target opset, with pads in the place of auto_pad; shapes must be known.

    Where strides pass over more than there is, no padding is needed, and windows begin at the first element.
    ONNX Runtime refuses that for AveragePool and MaxPool. For LpPool it cuts at both ends, and so does this.

    Raises:
        UnsupportedOperatorError: auto_pad with dilations.
    """
    names, weights, nodes = NameSource(draft.tensor_names()), dict(draft.weights), list[Node]()
    for node in draft.nodes:
        totals = _total_pads(node, draft)
        if totals is None:
            nodes.append(node)
            continue
        is_lower = node.attribute("auto_pad") == "SAME_LOWER"
        begins = [(max(total, 0) + is_lower) // 2 for total in totals]
        ends = [max(total, 0) - begin for total, begin in zip(totals, begins, strict=True)]
        cuts = [max(-total - is_lower, 0) // 2 for total in totals] if node.op == "LpPool" else []
        if any(cuts):
            cut = names.fresh(f"{node.outputs[0]}_cut")
            limits = {"starts": cuts, "ends": [_TO_THE_END] * len(cuts), "axes": range(2, 2 + len(cuts))}
            settings = [names.fresh(f"{cut}_{part}") for part in limits]
            weights |= {
                name: ArrayWeight(np.asarray(values, np.int64))
                for name, values in zip(settings, limits.values(), strict=True)
            }
            inputs = (node.inputs[0], *settings)
            nodes.append(
                Node(
                    "Slice", inputs, (cut,), {}, f"{node.name}/cut", node.origin, "Slice", module=node.module
                )
            )
            node = node.with_changes(inputs=(cut,))
        dropped = ("auto_pad", "ceil_mode")
        attributes = {key: value for key, value in node.attributes.items() if key not in dropped}
        nodes.append(node.with_changes(attributes={**attributes, "pads": [*begins, *ends]}))
    return draft.with_changes(nodes=tuple(nodes), weights=weights)


def _total_pads(node: Node, draft: Draft) -> list[int] | None:
    """The elements that auto_pad adds to each axis, negative where some are left over; None without it."""
    if node.domain or node.op not in _POOLING or node.attribute("auto_pad") not in _SAME:
        return None
    source, result = draft.type_of(node.inputs[0]), draft.type_of(node.outputs[0])
    if source is None or result is None:
        return None
    kernel = node.attribute("kernel_shape")
    strides = node.attribute("strides") or [1] * len(kernel)
    if any(dilation > 1 for dilation in node.attribute("dilations") or ()):
        raise UnsupportedOperatorError(
            f"{node.place} has auto_pad and dilations, which ONNX Runtime pads for "
            "fewer elements than ONNX says; export the model with explicit pads"
        )
    return [
        (extent - 1) * stride + size - total
        for total, extent, size, stride in zip(
            source.shape[2:], result.shape[2:], kernel, strides, strict=True
        )
    ]


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
