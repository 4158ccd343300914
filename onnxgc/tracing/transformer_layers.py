"""What ONNX Runtime's training recomputes of transformer layers, as a set of checkpoints.

Source: microsoft/onnxruntime, docs/Memory_Optimizer.md (`ORTMODULE_MEMORY_OPT_LEVEL=1`) and, below
orttraining/orttraining/core/optimizer/memory_optimizer, recompute_analysis.cc and transformer_specific.cc.

Modelled is which of the tensors that backward reads are computed again: each whose operator is in the list
below, and from which a search towards the inputs, over at most 50 operators of the list, ends at others that
backward reads, at inputs or at weights. What the normalisation in front of an attention reads is kept: there
a layer begins.

What differs: the tensors that backward reads are those of onnxgc's gradients, not of ONNX Runtime's. Its
fusions are not run, but operators that they turn into listed ones (those of Gelu and of normalisations) count
as listed. Its search also stops at small tensors of constant shape. And what is computed again is scheduled
as that of any other plan here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.tracing.solver_graph import TracedProblem

MOST_OPERATORS = 50

_LISTED = frozenset([
    "Add", "BatchNormalization", "Cast", "ConstantOfShape", "Cos", "CumSum", "Div", "Dropout", "Einsum",
    "Equal", "Expand", "Gather", "Gelu", "LayerNormalization", "Less", "MatMul", "Mul", "Neg", "Range",
    "Reshape", "Sin", "Slice", "Softmax", "Split", "Squeeze", "Sub", "Tile", "Transpose", "Trilu",
    "Unsqueeze", "Where"
])  # fmt: skip
# `Sum` is the addition in the function that defines Gelu.
_FUSED_TO_LISTED = frozenset([
    "Erf", "Tanh", "Sigmoid", "ReduceMean", "Pow", "Sqrt", "Reciprocal", "RMSNormalization", "Sum"
])  # fmt: skip
_NORMALISATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})


def layerwise_checkpoints(traced: TracedProblem) -> tuple[str, ...] | None:
    """The vertices that ONNX Runtime's layer-wise recomputation keeps; None where it finds no layer."""
    step = traced.step
    nodes = [step.nodes[operator.name] for operator in step.graph.forward]
    boundaries = layer_boundaries(nodes)
    if not boundaries:
        return None
    read = {name for chunk in step.graph.chunks for operator in chunk for name in operator.inputs}
    makers = {name: node for node in nodes for name in node.outputs if name}
    kept = {
        traced.vertex_of[name]
        for name in makers
        if name in read
        and name in traced.vertex_of
        and (name in boundaries or not _is_made_again(name, makers, read))
    }
    return tuple(str(vertex) for vertex in traced.problem.graph.vertices if vertex in kept)


def layer_boundaries(nodes: list[Node]) -> frozenset[str]:
    """What the normalisation in front of each attention reads.

    That tensor is also added to the attention's result, and between the two lies a Softmax.
    """
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        for name in dict.fromkeys(filter(None, node.inputs)):
            readers.setdefault(name, []).append(place)
    found: set[str] = set()
    for node in nodes:
        if node.op not in _NORMALISATIONS:
            continue
        added = [place for place in readers[node.inputs[0]] if nodes[place].op in ("Add", "Sum")]
        if added and _leads_to_softmax(node, max(added), nodes, readers):
            found.add(node.inputs[0])
    return frozenset(found)


def _leads_to_softmax(node: Node, before: int, nodes: list[Node], readers: Mapping[str, list[int]]) -> bool:
    pending, seen = [node], {node.name}
    while pending:
        current = pending.pop()
        if current.op == "Softmax":
            return True
        for name in current.outputs:
            for place in readers.get(name, ()):
                if place < before and nodes[place].name not in seen:
                    seen.add(nodes[place].name)
                    pending.append(nodes[place])
    return False


def _is_made_again(tensor: str, makers: Mapping[str, Node], read: set[str]) -> bool:
    """Whether the search from a tensor that backward reads ends well."""
    pending, taken = deque([tensor]), set[str]()
    while pending:
        name = pending.popleft()
        node = makers[name]
        if node.name in taken or (name != tensor and name in read):
            continue
        if node.once or node.op not in _LISTED | _FUSED_TO_LISTED or len(taken) == MOST_OPERATORS:
            return False
        taken.add(node.name)
        pending.extend(source for source in node.inputs if source in makers)
    return True
