"""Weights that a file stores once for several uses, or several times for one.

Exporters merge weights that are equal when the file is written, such as fresh zero biases; trained as
one, their gradients are summed. And they write a tied weight twice, once transposed; trained apart, the
two drift away from one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, GraphProto

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, NameSource
from onnxgc.model.core.identity_removal import without_identities
from onnxgc.model.core.ir import Array, Node, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, FilledWeight, peek
from onnxgc.model.weight_roles.classify import ParameterDecision, Role

# Operators for which all operands are one role.
_COMMUTATIVE = frozenset({"Add", "Mul", "Sum", "Mean", "Max", "Min"})
_SMALLEST_TWIN = 16
_SAMPLE = 16


def untied(draft: Draft, decisions: Iterable[ParameterDecision]) -> Draft:
    """The draft with a parameter of its own for each node that uses one in the same way as others do.

    A parameter whose uses differ in kind, as an embedding that is also the output projection, stays one.
    What the steps of a loop share they go on sharing: a node of its body is one node.
    """
    draft = without_identities(draft)
    reads = [_Reads(node) for node in draft.nodes]
    uses: dict[str, list[_Slot]] = {}
    for slot in (slot for node in reads for slot in node.slots):
        uses.setdefault(slot.names[slot.index], []).append(slot)
    names = NameSource(draft.tensor_names())
    weights, notes = dict(draft.weights), []
    for decision in decisions:
        found = uses.get(decision.name, [])
        kinds = {slot.kind for slot in found}
        if decision.role is not Role.PARAMETER or len(found) < 2 or len(kinds) > 1:
            continue
        for slot in found[1:]:
            own = names.fresh(decision.name)
            weights[own] = draft.weights[decision.name]
            slot.names[slot.index] = own
        notes.append(
            f"parameter '{decision.name}' was stored once for {len(found)} nodes; each has its own now"
        )
    nodes = tuple(node.changed() for node in reads)
    return draft.with_changes(nodes=nodes, weights=weights).with_notes(*notes)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a node reads a tensor: one of its names, to be changed in place."""

    kind: tuple[str, str, int]
    names: MutableSequence[str]
    index: int


class _Reads:
    """A node and its bodies, whose reads can be renamed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._inputs = list(node.inputs)
        self._graphs = {
            key: _copy_of(value) for key, value in node.attributes.items() if isinstance(value, GraphProto)
        }
        self.slots = _slots(node.domain, node.op, self._inputs)
        for graph in self._graphs.values():
            self.slots += _slots_in(graph)

    def changed(self) -> Node:
        attributes = {**self._node.attributes, **self._graphs}
        return self._node.with_changes(inputs=tuple(self._inputs), attributes=attributes)


def _slots(domain: str, op: str, names: MutableSequence[str]) -> list[_Slot]:
    is_any = op in _COMMUTATIVE and not domain
    return [_Slot((domain, op, 0 if is_any else index), names, index) for index in range(len(names))]


def _slots_in(graph: GraphProto) -> list[_Slot]:
    found: list[_Slot] = []
    for proto in graph.node:
        found += _slots("" if proto.domain in ONNX_DOMAINS else proto.domain, proto.op_type, proto.input)
        for attribute in proto.attribute:
            if attribute.type == AttributeProto.GRAPH:
                found += _slots_in(attribute.g)
    return found


def _copy_of(graph: GraphProto) -> GraphProto:
    copy = GraphProto()
    copy.CopyFrom(graph)
    return copy


def twin_notes(draft: Draft, decisions: Iterable[ParameterDecision]) -> tuple[str, ...]:
    """One line for each pair of parameters that hold the same values, of which a file should hold one.

    Those are a table that is gathered from with its like, and matrices of which one is the other
    transposed. Other equal weights are those of layers that started alike.
    """
    gathered = {node.inputs[0] for node in draft.nodes if node.op == "Gather"}
    alike: dict[tuple[object, ...], list[str]] = {}
    for decision in decisions:
        kind = decision.type
        if decision.role is Role.PARAMETER and kind.element_count >= _SMALLEST_TWIN:
            alike.setdefault((kind.dtype, *sorted(kind.shape)), []).append(decision.name)
    notes = []
    for names in alike.values():
        shapes = {draft.weights[name].type.shape for name in names}
        if len(names) > 1 and (len(shapes) > 1 or not gathered.isdisjoint(names)):
            notes += [
                f"parameters '{one}' and '{two}' hold the same values{how}; if the model ties them, "
                "the file does not, and they train apart"
                for one, two, how in _twins(names, draft.weights)
                if how or one in gathered or two in gathered
            ]
    return tuple(notes)


def _twins(names: Iterable[str], weights: Mapping[str, Weight]) -> list[tuple[str, str, str]]:
    """Weights that equal an earlier one, with that one, and how."""
    groups: dict[bytes, list[str]] = {}
    for name in names:
        sample = _sample(weights[name])
        if sample is not None:
            groups.setdefault(sample, []).append(name)
    return [
        (first, name, how)
        for first, *others in groups.values()
        for name in others
        if (how := _equal(weights[first], weights[name])) is not None
    ]


def _equal(one: Weight, two: Weight) -> str | None:
    """How two weights are equal, in words, or None."""
    first, second = peek(one), peek(two)
    if first is None or second is None:
        return None
    if first.shape == second.shape and np.array_equal(first, second):
        return ""
    if first.ndim == 2 and first.T.shape == second.shape and np.array_equal(first.T, second):
        return ", one transposed"
    return None


def _sample(weight: Weight) -> bytes | None:
    """A few entries that a transposition leaves where they are; None if they are all one value."""
    if isinstance(weight, FilledWeight | ArrayWeight):
        return None
    value: Array | None = peek(weight)
    if value is None:
        return None
    entries = np.diagonal(value) if value.ndim == 2 else value.reshape(-1)
    chosen = np.ascontiguousarray(entries[:_SAMPLE])
    return None if np.all(chosen == chosen[0]) else chosen.tobytes()
