"""Pooling with explicit pads in place of auto_pad and ceil_mode.

For ceil_mode, inferred extents differ from computed ones; for auto_pad without any padding, runtimes
disagree.
"""

from __future__ import annotations

import numpy as np

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Node
from onnxgc.model.core.stored_weights import ArrayWeight

_POOLING = frozenset(["AveragePool", "LpPool", "MaxPool"])
_SAME = ("SAME_UPPER", "SAME_LOWER")
# Beyond the end of any axis.
_SLICE_END = np.iinfo(np.int64).max


def with_explicit_pads(draft: Draft) -> Draft:
    """The draft, at the target opset and with static shapes, with pads in place of auto_pad.

    Where the windows do not reach the end of an axis, there is no padding and the first window begins at the
    first element. ONNX Runtime rejects that for AveragePool and MaxPool; for LpPool it crops at both ends, as
    does this form.

    Raises:
        UnsupportedOperatorError: a node has auto_pad and dilations.
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
        crops = [max(-total - is_lower, 0) // 2 for total in totals] if node.op == "LpPool" else []
        if any(crops):
            cropped = names.fresh(f"{node.outputs[0]}_cut")
            limits = {"starts": crops, "ends": [_SLICE_END] * len(crops), "axes": range(2, 2 + len(crops))}
            settings = [names.fresh(f"{cropped}_{part}") for part in limits]
            weights |= {
                name: ArrayWeight(np.asarray(values, np.int64))
                for name, values in zip(settings, limits.values(), strict=True)
            }
            inputs = (node.inputs[0], *settings)
            nodes.append(
                Node(
                    "Slice",
                    inputs,
                    (cropped,),
                    {},
                    f"{node.name}/cut",
                    node.origin,
                    "Slice",
                    module=node.module,
                )
            )
            node = node.with_changes(inputs=(cropped,))
        dropped = ("auto_pad", "ceil_mode")
        attributes = {key: value for key, value in node.attributes.items() if key not in dropped}
        nodes.append(node.with_changes(attributes={**attributes, "pads": [*begins, *ends]}))
    return draft.with_changes(nodes=tuple(nodes), weights=weights)


def _total_pads(node: Node, draft: Draft) -> list[int] | None:
    """The elements that auto_pad adds to each axis, negative where it crops; None without auto_pad."""
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
        for total, extent, size, stride in zip(
            source.shape[2:], result.shape[2:], kernel, strides, strict=True
        )
    ]


def with_floor_pooling(draft: Draft) -> Draft:
    """The draft with end pads in place of ceil_mode, where the two are equivalent; shapes must be static.

    They differ only for an average that counts its padding.
    """
    return draft.with_changes(nodes=tuple(_with_floor_mode(node, draft) for node in draft.nodes))


def _with_floor_mode(node: Node, draft: Draft) -> Node:
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
