"""Unties weights that an exporter merged, and reports tied weights that it stored twice.

Exporters merge weights that are equal at export, such as untrained zero biases; trained as one, their
gradients are summed. They also store a tied weight twice, once transposed; trained apart, the two copies
diverge.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableSequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, NameSource, nodes_in
from onnxgc.model.core.identity_removal import without_identities
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, FilledWeight, peek
from onnxgc.model.weight_roles.roles import ParameterDecision, Role

# Operators whose operands are interchangeable.
_COMMUTATIVE = frozenset({"Add", "Mul", "Sum", "Mean", "Max", "Min"})
_MIN_DUPLICATE_ELEMENTS = 16
_SAMPLE_SIZE = 16


def with_untied_parameters(draft: Draft, decisions: Iterable[ParameterDecision]) -> Draft:
    """The draft with separate parameters for nodes that share one as the same input of the same operator.

    A parameter whose uses differ, such as an embedding that is also the output projection, stays tied. The
    steps of a loop keep sharing their parameters: a node of its body counts once.
    """
    draft = without_identities(draft)
    readers = [_Reader(node) for node in draft.nodes]
    slots_of: defaultdict[str, list[_Slot]] = defaultdict(list)
    for slot in (slot for reader in readers for slot in reader.slots):
        slots_of[slot.names[slot.index]].append(slot)
    names = NameSource(draft.tensor_names())
    weights, notes = dict(draft.weights), []
    for decision in decisions:
        slots = slots_of[decision.name]
        if decision.role is not Role.PARAMETER or len(slots) < 2 or len({slot.use for slot in slots}) > 1:
            continue
        for slot in slots[1:]:
            separate = names.fresh(decision.name)
            weights[separate] = draft.weights[decision.name]
            slot.names[slot.index] = separate
        notes.append(f"parameter '{decision.name}' was shared by {len(slots)} nodes; each now has a separate parameter")
    nodes = tuple(reader.renamed() for reader in readers)
    return draft.with_changes(nodes=nodes, weights=weights).with_notes(*notes)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A position at which a node reads a tensor; its name can be changed in place.

    `use` is the operator with its domain, and the input's index.
    """

    use: tuple[str, str, int]
    names: MutableSequence[str]
    index: int


class _Reader:
    """A node whose inputs, and those of its bodies, can be renamed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._inputs = list(node.inputs)
        self._graphs = {key: deepcopy(value) for key, value in node.attributes.items() if isinstance(value, GraphProto)}
        self.slots = _slots(node.domain, node.op, self._inputs)
        for graph in self._graphs.values():
            for proto in nodes_in(graph):
                domain = "" if proto.domain in ONNX_DOMAINS else proto.domain
                self.slots += _slots(domain, proto.op_type, proto.input)

    def renamed(self) -> Node:
        attributes = {**self._node.attributes, **self._graphs}
        return self._node.with_changes(inputs=tuple(self._inputs), attributes=attributes)


def _slots(domain: str, op: str, names: MutableSequence[str]) -> list[_Slot]:
    is_commutative = op in _COMMUTATIVE and not domain
    return [_Slot((domain, op, 0 if is_commutative else index), names, index) for index in range(len(names))]


def duplicate_notes(draft: Draft, decisions: Iterable[ParameterDecision]) -> tuple[str, ...]:
    """One line for each pair of equal parameters that are probably one tied weight.

    Such a pair is an embedding table with its copy, or a matrix with its transpose. Other parameters are
    equal because layers have the same initial values.
    """
    gathered = {node.inputs[0] for node in draft.nodes if node.op == "Gather"}
    names_by_type: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for decision in decisions:
        kind = decision.type
        if decision.role is Role.PARAMETER and kind.element_count >= _MIN_DUPLICATE_ELEMENTS:
            names_by_type[kind.dtype, *sorted(kind.shape)].append(decision.name)
    notes = []
    for names in names_by_type.values():
        shapes = {draft.weights[name].type.shape for name in names}
        if len(names) > 1 and (len(shapes) > 1 or not gathered.isdisjoint(names)):
            notes += [
                f"parameters '{one}' and '{two}' have equal values{how}; if the model ties them, the file "
                "does not, and they train separately"
                for one, two, how in _equal_pairs(names, draft.weights)
                if how or one in gathered or two in gathered
            ]
    return tuple(notes)


def _equal_pairs(names: Iterable[str], weights: Mapping[str, Weight]) -> list[tuple[str, str, str]]:
    """Pairs of equal weights: the first, the later one, and how they are equal."""
    groups: defaultdict[bytes, list[str]] = defaultdict(list)
    for name in names:
        entries = _sample(weights[name])
        if entries is not None:
            groups[entries].append(name)
    return [
        (first, name, how)
        for first, *others in groups.values()
        for name in others
        if (how := _equality(weights[first], weights[name])) is not None
    ]


def _equality(one: Weight, two: Weight) -> str | None:
    """How two weights are equal, as the end of a clause; None if they differ."""
    first, second = peek(one), peek(two)
    if first is None or second is None:
        return None
    if first.shape == second.shape and np.array_equal(first, second):
        return ""
    if first.ndim == 2 and first.T.shape == second.shape and np.array_equal(first.T, second):
        return ", one transposed"
    return None


def _sample(weight: Weight) -> bytes | None:
    """A few diagonal entries, which a transpose leaves in place; None if all are equal."""
    if isinstance(weight, FilledWeight | ArrayWeight):
        return None
    value = peek(weight)
    if value is None:
        return None
    entries = np.diagonal(value) if value.ndim == 2 else value.reshape(-1)
    chosen = np.ascontiguousarray(entries[:_SAMPLE_SIZE])
    return None if np.all(chosen == chosen[0]) else chosen.tobytes()
