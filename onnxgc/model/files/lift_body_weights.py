"""Weights of bodies and branches, lifted to the outer graph."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, fresh_name
from onnxgc.model.core.ir import Weight
from onnxgc.model.core.stored_weights import constant_value, initializers


def with_lifted_bodies(draft: Draft, folder: str) -> Draft:
    """The draft with the weights of all bodies and branches in the outer graph.

    A weight keeps its name; if that is taken, the node's name is its prefix.
    """
    weights = dict(draft.weights)
    taken = outer_names(draft)
    nodes = []
    for node in draft.nodes:
        lifter = _BodyLifter(weights, taken, node.name, folder)
        bodies = {
            key: lifter.without_weights(value, {})
            for key, value in node.attributes.items()
            if isinstance(value, onnx.GraphProto)
        }
        nodes.append(node.with_changes(attributes={**node.attributes, **bodies}) if bodies else node)
    return draft.with_changes(nodes=tuple(nodes), weights=weights)


@dataclass(slots=True)
class _BodyLifter:
    """Lifts the weights out of one node's bodies."""

    weights: dict[str, Weight]
    taken: set[str]
    node_name: str
    folder: str

    def without_weights(self, graph: onnx.GraphProto, outer: Mapping[str, str]) -> onnx.GraphProto:
        local = {output for proto in graph.node for output in proto.output}
        local |= {value.name for value in graph.input}
        names = {name: fresh for name, fresh in outer.items() if name not in local}
        for name, weight in initializers(graph, self.folder).items():
            names[name] = self._lift(name, weight)
        protos = []
        for proto in graph.node:
            if proto.op_type == "Constant" and proto.domain in ONNX_DOMAINS:
                names[proto.output[0]] = self._lift(proto.output[0], constant_value(proto, self.folder))
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
                    attribute.g.CopyFrom(self.without_weights(attribute.g, names))
        for value in graph.output:
            bare.output.add().CopyFrom(value)
            bare.output[-1].name = names.get(value.name, value.name)
        return bare

    def _lift(self, name: str, weight: Weight) -> str:
        wanted = name if name not in self.taken else f"{self.node_name}/{name}"
        fresh = fresh_name(wanted, self.taken)
        self.weights[fresh] = weight
        return fresh


def outer_names(draft: Draft) -> set[str]:
    """The names of all tensors outside of bodies."""
    tensors = (name for node in draft.nodes for name in (*node.inputs, *node.outputs))
    return {*draft.inputs, *draft.weights, *draft.outputs, *tensors}
