"""Bodies of control flow as part of the outer graph, for the analysis of the uses of weights."""

from collections.abc import Iterable

import onnx

from onnxgc.model.core.draft import INITIAL_STATE, Draft
from onnxgc.model.core.ir import Node
from onnxgc.model.static_shapes.control_flow import outer_node


def with_flat_bodies(draft: Draft) -> Draft:
    """The draft with the nodes of all bodies and branches in the outer graph.

    The result shows every use of a weight, but is no valid model: a body occurs once for all of its steps,
    and both branches of an If compute the same tensors.
    """
    return draft.with_changes(nodes=tuple(flat for node in draft.nodes for flat in _flatten(node)))


def _flatten(node: Node) -> list[Node]:
    """The node itself, or the nodes of its bodies with links to its inputs and outputs."""
    if node.domain or node.op not in ("If", "Loop", "Scan"):
        return [node]
    # The outer tensors that feed a body's inputs, and those that receive its outputs.
    sources, outputs = node.inputs, node.outputs
    if node.op == "Loop":
        sources, outputs = ("", "", *node.inputs[2:]), ("", *node.outputs)
    nodes: list[Node] = []
    for key, graph in node.attributes.items():
        if not isinstance(graph, onnx.GraphProto):
            continue
        local = {output for proto in graph.node for output in proto.output if output}
        names = {name: f"{node.name}/{key}/{name}" for name in (*local, *(v.name for v in graph.input))}
        states = len(sources) - int(node.attribute("num_scan_inputs", 0))
        body_inputs = [names[value.name] for value in graph.input]
        nodes += _link(node, INITIAL_STATE, sources[:states], body_inputs)
        nodes += _link(node, "Identity", sources[states:], body_inputs[states:])
        for proto in graph.node:
            nodes += _flatten(outer_node(proto, names))
        nodes += _link(node, "Identity", [names.get(v.name, v.name) for v in graph.output], outputs)
    return nodes


def _link(node: Node, op: str, sources: Iterable[str], outputs: Iterable[str]) -> list[Node]:
    return [
        Node(op, (source,), (output,), name=f"{node.name}/{output}")
        for source, output in zip(sources, outputs, strict=False)
        if source and output
    ]
