"""Weights of bodies and branches, lifted to the outer graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, fresh_name, subgraphs
from onnxgc.model.core.ir import Weight
from onnxgc.model.core.stored_weights import constant_value, initializers


def with_lifted_bodies(draft: Draft, folder: str) -> Draft:
    """The draft with the weights of all bodies and branches in the outer graph.

    A weight keeps its name; where that is taken, the node's name is its prefix.
    """
    if not any(True for node in draft.nodes for _ in subgraphs(node)):
        return draft
    weights = dict(draft.weights)
    taken = outer_names(draft)
    nodes = []
    for node in draft.nodes:
        lifter = _BodyLifter(weights, taken, node.name, folder)
        nodes.append(
            node.with_changes(
                attributes={
                    key: lifter.lifted(value) if isinstance(value, onnx.GraphProto) else value
                    for key, value in node.attributes.items()
                }
            )
        )
    return draft.with_changes(nodes=tuple(nodes), weights=weights)


class _BodyLifter:
    """Lifts the weights out of one node's bodies."""

    def __init__(self, weights: dict[str, Weight], taken: set[str], node_name: str, folder: str) -> None:
        self._weights = weights
        self._taken = taken
        self._node_name = node_name
        self._folder = folder

    def lifted(self, graph: onnx.GraphProto) -> onnx.GraphProto:
        return self._without_weights(graph, {})

    def _without_weights(self, graph: onnx.GraphProto, outer: Mapping[str, str]) -> onnx.GraphProto:
        local = {output for proto in graph.node for output in proto.output}
        local |= {value.name for value in graph.input}
        names = {name: fresh for name, fresh in outer.items() if name not in local}
        for name, weight in initializers(graph, self._folder).items():
            names[name] = self._lift(name, weight)
        protos = []
        for proto in graph.node:
            if proto.op_type == "Constant" and proto.domain in ONNX_DOMAINS:
                names[proto.output[0]] = self._lift(proto.output[0], constant_value(proto, self._folder))
            else:
                protos.append(proto)
        bare = onnx.GraphProto(name=graph.name)
        initial = {tensor.name for tensor in graph.initializer}
        bare.input.extend(value for value in graph.input if value.name not in initial)
        for proto in protos:
            copy = bare.node.add()
            copy.CopyFrom(proto)
            copy.input[:] = [names.get(name, name) for name in proto.input]
            for attribute in copy.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    attribute.g.CopyFrom(self._without_weights(attribute.g, names))
        for value in graph.output:
            bare.output.add().CopyFrom(value)
            bare.output[-1].name = names.get(value.name, value.name)
        return bare

    def _lift(self, name: str, weight: Weight) -> str:
        wanted = name if name not in self._taken else f"{self._node_name}/{name}"
        fresh = fresh_name(wanted, self._taken)
        self._weights[fresh] = weight
        return fresh


def outer_names(draft: Draft) -> set[str]:
    names = {*draft.inputs, *draft.weights, *draft.outputs}
    for node in draft.nodes:
        names.update(node.inputs, node.outputs)
    return names
