"""Infers a static shape for every tensor: one walk in topological order.

For each node the walk replaces literals that exporters wrote for another batch (Reshape targets), lowers
control flow, sequences and contrib operators to flat standard ones, folds values that depend only on
constants and static shapes, and otherwise infers the output types. All inputs of a node are static when
the walk reaches it, so one walk is enough, and an inconsistency is found at its cause. Weights take part
by their types; only the values of small constants are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from onnxgc.errors import ShapeError
from onnxgc.model.core import node_rewrites
from onnxgc.model.core.constant_folding import (
    MAX_FOLDED_INPUT,
    MAX_FOLDED_OUTPUT,
    evaluate,
    may_fold,
    shape_value,
)
from onnxgc.model.core.draft import Draft, reads_of, unused_name
from onnxgc.model.core.ir import Array, Node, TensorType, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, is_external
from onnxgc.model.rebatch.rebatch import Rebatcher
from onnxgc.model.rebatch.shape_pair import CannotRebatchError
from onnxgc.model.static_shapes.contrib_ops import ContribOperators
from onnxgc.model.static_shapes.control_flow import ControlFlow
from onnxgc.model.static_shapes.decompositions import decompose
from onnxgc.model.static_shapes.input_shapes import FileShapes
from onnxgc.model.static_shapes.sequences import Sequences
from onnxgc.model.static_shapes.shape_errors import ShapeMessages, UnresolvedShapeError
from onnxgc.model.static_shapes.type_inference import TypeInference
from onnxgc.model.static_shapes.type_protos import static_type, type_proto

_MAX_REASONS = 4


def infer_shapes(draft: Draft, file: FileShapes | None = None) -> Draft:
    """The draft with every tensor's static type; `problems` gives the reason for each tensor without one.

    Literal shapes that were written for the inputs of `file` are replaced by those for the draft's inputs.
    """
    walk = _Walk(draft)
    if file is not None:
        file_walk = _Walk(draft.with_changes(types=file.types))
        file_walk.visit_all()
        walk.rebatching = Rebatcher(file_walk, walk, draft, file.batch)
    walk.visit_all()
    return draft.with_changes(
        nodes=tuple(walk.nodes),
        weights=walk.weights,
        types=walk.types,
        derived=draft.derived | walk.derived,
        problems=walk.problems,
        notes=(*draft.notes, *walk.notes()),
    )


def require_static_shapes(draft: Draft) -> None:
    """Checks that every output of a node has a static type.

    Raises:
        ShapeError: some have none; the text lists each reason once.
    """
    outputs = [name for node in draft.nodes for name in node.outputs]
    reasons = list(dict.fromkeys(draft.problems[name] for name in outputs if name in draft.problems))
    if reasons:
        more = len(reasons) - _MAX_REASONS
        listed = "; also: ".join(reasons[:_MAX_REASONS])
        raise ShapeError(f"{listed}; and {more} more of the kind" if more > 0 else listed)


@dataclass(slots=True)
class _Walk:
    draft: Draft
    rebatching: Rebatcher | None = None
    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(init=False)
    types: dict[str, TensorType] = field(init=False)
    protos: dict[str, onnx.TypeProto] = field(init=False)
    values: dict[str, Array] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    messages: ShapeMessages = field(init=False)
    inference: TypeInference = field(init=False)
    sequences: Sequences = field(init=False)
    control_flow: ControlFlow = field(init=False)
    contrib_operators: ContribOperators = field(init=False)

    def __post_init__(self) -> None:
        self.weights = dict(self.draft.weights)
        self.types = {name: self.draft.types[name] for name in self.draft.inputs}
        self.protos = {name: type_proto(kind) for name, kind in self.types.items()}
        self.protos |= {name: type_proto(weight.type) for name, weight in self.weights.items()}
        self.messages = ShapeMessages(self, self.draft)
        self.inference = TypeInference(self, self.draft, self.messages)
        self.sequences = Sequences(self.type_of, self.value, self.add_fresh_constant, self.draft.opset)
        self.control_flow = ControlFlow(self, self.draft)
        self.contrib_operators = ContribOperators(self, self.draft)

    def visit_all(self) -> None:
        for node in self.draft.nodes:
            self.visit(node)
        if self.rebatching is not None:
            self.problems |= self.rebatching.outputs_with_file_batch(self.draft.outputs)

    def visit(self, node: Node) -> None:
        if self.control_flow.inline_branch(node):
            return
        unknown = next((name for name in reads_of(node) if not self._is_known(name)), None)
        if unknown is not None:
            reason = self.problems.get(unknown, f"tensor '{unknown}' has no static shape")
            self._keep_unresolved(node, reason)
            return
        if self.control_flow.unroll(node) or self.contrib_operators.lower(node):
            return
        for lowered in self._lower(node):
            self._visit_lowered(lowered)

    def _is_known(self, name: str) -> bool:
        return name in self.protos or name in self.sequences

    def notes(self) -> tuple[str, ...]:
        return () if self.rebatching is None else self.rebatching.notes()

    def value(self, name: str) -> Array | None:
        """The value of a constant that may be folded."""
        weight = self.weights.get(name)
        if weight is None or name in self.draft.fixed or weight.type.element_count > MAX_FOLDED_INPUT:
            return None
        if name not in self.values:
            if is_external(weight) and weight.type.is_floating:
                return None
            self.values[name] = weight.load()
        return self.values[name]

    def type_of(self, name: str) -> TensorType | None:
        weight = self.weights.get(name)
        return weight.type if weight is not None else self.types.get(name)

    def add_fresh_constant(self, wanted: str, value: Array) -> str:
        """Adds a constant under an unused name, and returns the name."""
        name = unused_name(wanted, self.protos)
        self.add_constant(name, value)
        return name

    def add_constant(self, name: str, value: Array) -> None:
        self.weights[name] = ArrayWeight(value)
        self.values[name] = value
        self.protos[name] = type_proto(self.weights[name].type)
        self.derived.add(name)

    def _lower(self, node: Node) -> list[Node]:
        lowered = self.sequences.lower(node, self.protos)
        if lowered is not None:
            return list(lowered)
        parts = decompose(node, self.type_of, self.value, self.add_fresh_constant)
        return [node_rewrites.cast_like_as_cast(node, self.type_of)] if parts is None else parts

    def _visit_lowered(self, node: Node) -> None:
        known = self.type_of(node.inputs[0]) if node.inputs else None
        value = shape_value(node, known.shape) if known is not None else None
        if value is None:
            value = node_rewrites.range_value(node, self.value)
        if value is not None:
            self.add_constant(node.outputs[0], value)
            return
        try:
            self._visit_plain(node if self.rebatching is None else self.rebatching.adapted(node))
        except CannotRebatchError as error:
            self._keep_unresolved(node, str(error))

    def _visit_plain(self, node: Node) -> None:
        if all(name in self.draft.types for name in node.outputs if name):
            self._keep_known(node)
            return
        try:
            inferred = self.inference.infer(node)
        except UnresolvedShapeError as error:
            self._keep_unresolved(node, str(error))
            return
        kinds = {name: static_type(inferred.get(name)) for name in node.outputs if name}
        static = {name: kind for name, kind in kinds.items() if kind is not None}
        if self._fold(node, static):
            return
        if self.rebatching is not None:
            self.rebatching.record(node, static)
        self.nodes.append(node)
        for name in filter(None, node.outputs):
            if name in static:
                self.types[name] = static[name]
                self.protos[name] = inferred[name]
            elif name in inferred and not inferred[name].HasField("tensor_type"):
                self.protos[name] = inferred[name]
            else:
                self.problems[name] = self.messages.not_static(name, node)

    def _keep_known(self, node: Node) -> None:
        """Keeps a node whose types an earlier walk inferred; passes change graphs, not tensors."""
        self.nodes.append(node)
        for name in filter(None, node.outputs):
            self.types[name] = self.draft.types[name]
            self.protos[name] = type_proto(self.types[name])

    def _keep_unresolved(self, node: Node, reason: str) -> None:
        """Keeps a node without types and the reason; the loss may not depend on it."""
        self.nodes.append(node)
        self.problems.update(dict.fromkeys(filter(None, node.outputs), reason))

    def _fold(self, node: Node, static: Mapping[str, TensorType]) -> bool:
        """Whether the node's outputs were computed and added as constants."""
        if not may_fold(node) or len(static) != len([name for name in node.outputs if name]):
            return False
        if any(kind.element_count > MAX_FOLDED_OUTPUT for kind in static.values()):
            return False
        values: dict[str, Array] = {}
        for name in filter(None, node.inputs):
            value = self.value(name)
            if value is None:
                return False
            values[name] = value
        results = evaluate(node, values, static, self.draft.opset)
        if results is None:
            return False
        for name, result in results.items():
            self.add_constant(name, result)
        return True
