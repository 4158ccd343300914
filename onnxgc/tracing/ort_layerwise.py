"""ONNX Runtime's layer-wise recomputation of transformers, as a set of checkpoints.

Source: microsoft/onnxruntime, docs/Memory_Optimizer.md (`ORTMODULE_MEMORY_OPT_LEVEL=1`) and, below
orttraining/orttraining/core/optimizer/memory_optimizer, recompute_analysis.cc and transformer_specific.cc.

A tensor that backward reads is recomputed if its operator is in the list below and a search towards the
inputs, over at most 50 operators of the list, ends at other tensors that backward reads, at inputs or at
weights. The input of the normalisation before an attention is kept: it is the boundary between layers.

Deviations: backward is onnxgc's, so the tensors that it reads differ from ONNX Runtime's. Fusions do not run;
instead, operators that they fuse into listed ones (those of Gelu and of normalisations) count as listed. ONNX
Runtime's search also stops at small tensors of constant shape. Recomputation is scheduled as in any other
plan here.
"""

from collections import deque
from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.tracing.checkpoint_problem import TracedProblem

MAX_OPERATORS = 50

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
    """The vertices that ONNX Runtime's layer-wise recomputation keeps; None if it finds no layer."""
    step = traced.step
    nodes = [step.nodes[operator.name] for operator in step.graph.forward]
    boundaries = layer_boundaries(nodes)
    if not boundaries:
        return None
    read = {name for chunk in step.graph.chunks for operator in chunk for name in operator.inputs}
    producers = {name: node for node in nodes for name in node.outputs if name}
    kept = {
        traced.vertex_of[name]
        for name in producers
        if name in read
        and name in traced.vertex_of
        and (name in boundaries or not _is_recomputed(name, producers, read))
    }
    return tuple(str(vertex) for vertex in traced.problem.graph.vertices if vertex in kept)


def layer_boundaries(nodes: list[Node]) -> frozenset[str]:
    """The input of the normalisation before each attention.

    It is also added to the attention's result, with a Softmax on the path between.
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


def _is_recomputed(tensor: str, producers: Mapping[str, Node], read: set[str]) -> bool:
    """Whether the search from a tensor that backward reads stays within the limits."""
    pending, visited = deque([tensor]), set[str]()
    while pending:
        name = pending.popleft()
        node = producers[name]
        if node.name in visited or (name != tensor and name in read):
            continue
        if node.once or node.op not in _LISTED | _FUSED_TO_LISTED or len(visited) == MAX_OPERATORS:
            return False
        visited.add(node.name)
        pending.extend(source for source in node.inputs if source in producers)
    return True
