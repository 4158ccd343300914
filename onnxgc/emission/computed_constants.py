"""Constants that are computed in the file, so that ONNX Runtime does not optimise their readers away."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnxgc.emission.graph_tensors import GraphTensors
from onnxgc.model.core.ir import Node, TensorType

_COPY_SUFFIX = re.compile(r"__recompute\d*$")
_POOLS = ("AveragePool", "MaxPool")


@dataclass(frozen=True, slots=True)
class LiveConstants:
    """Nodes that compute constants, and the readers of the results.

    `second_input` maps the name of a reader to its new second input.
    """

    nodes: tuple[Node, ...]
    second_input: Mapping[str, str]

    def applied_to(self, node: Node) -> Node:
        """`node`, original or recomputed, reading the computed copy of its constant if it has one."""
        original = _COPY_SUFFIX.sub("", node.name)
        live = self.second_input.get(node.name, self.second_input.get(original))
        return node if live is None else node.with_changes(inputs=(node.inputs[0], live, *node.inputs[2:]))


def live_constants(nodes: Iterable[Node], tensors: GraphTensors) -> LiveConstants:
    """Computed copies of the constants that make ONNX Runtime rewrite their readers.

    ONNX Runtime removes a Dropout with a constant ratio and an unread mask, in training mode too: if only the
    recomputed copy's mask is read, forward would run without Dropout. It also fuses a Pad by constants into
    the following pool, which then rejects pads that are as large as its kernel.
    """
    nodes = tuple(nodes)
    pooled = {node.inputs[0] for node in nodes if node.op in _POOLS}
    constant_of = {
        node.name: node.inputs[1]
        for node in nodes
        if len(node.inputs) > 1
        and node.inputs[1]
        and (node.op == "Dropout" or (node.op == "Pad" and node.outputs[0] in pooled))
    }
    added: list[Node] = []
    live: dict[str, str] = {}
    for constant in dict.fromkeys(constant_of.values()):
        kind = tensors.type_of(constant)
        zero, shaped, result = (tensors.fresh_name(f"{constant}/{part}") for part in ("zero", "shaped_zero", "live"))
        added.append(Node("Cast", (tensors.zero,), (zero,), {"to": kind.dtype}, zero))
        tensors.declare_vector(zero, TensorType(kind.dtype, (1,)))
        if not kind.shape:
            added.append(Node("Squeeze", (zero, tensors.integers([0])), (shaped,), name=shaped))
            tensors.declare_vector(shaped, kind)
        added.append(Node("Add", (constant, zero if kind.shape else shaped), (result,), name=result))
        tensors.declare_vector(result, kind)
        live[constant] = result
    return LiveConstants(tuple(added), {name: live[constant] for name, constant in constant_of.items()})
