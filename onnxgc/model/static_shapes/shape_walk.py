"""Infers a static shape for every tensor: one walk in topological order.

For each node the walk replaces literals that exporters wrote for another batch (Reshape targets), lowers
control flow, sequences and contrib operators to flat standard ones, folds values that depend only on
constants and static shapes, and otherwise infers the output types. All inputs of a node are static when
the walk reaches it, so one walk is enough, and an inconsistency is found at its cause. Weights take part
by their types; only the values of small constants are loaded.
"""

from collections.abc import Mapping

from onnxgc.errors import ShapeError
from onnxgc.model.core import node_rewrites
from onnxgc.model.core.constant_folding import MAX_FOLDED_INPUT, MAX_FOLDED_OUTPUT, evaluate, may_fold, shape_value
from onnxgc.model.core.draft import Draft, NameSource, reads_of, unused_name
from onnxgc.model.core.ir import Array, Node, TensorType, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, is_external
from onnxgc.model.rebatch.rebatch import Rebatcher
from onnxgc.model.rebatch.shape_pair import CannotRebatchError
from onnxgc.model.static_shapes.contrib_ops import lower_contrib
from onnxgc.model.static_shapes.control_flow import ControlFlow
from onnxgc.model.static_shapes.decompositions import decompose
from onnxgc.model.static_shapes.input_shapes import FileShapes
from onnxgc.model.static_shapes.sequences import Sequences
from onnxgc.model.static_shapes.shape_errors import ShapeMessages, UnresolvedShapeError
from onnxgc.model.static_shapes.type_inference import TypeInference, static_type, type_proto

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
        walk.messages.made_for = walk.rebatching.made_for
    walk.visit_all()
    return draft.with_changes(
        nodes=tuple(walk.nodes),
        weights=walk.weights,
        types=walk.types,
        derived=draft.derived | walk.derived,
        problems=walk.problems,
        notes=(*draft.notes, *(walk.rebatching.notes() if walk.rebatching else ())),
    )


def require_static_shapes(draft: Draft) -> None:
    """Checks that every output of a node has a static type.

    Raises:
        ShapeError: some have none; the text lists each reason once.
    """
    outputs = [name for node in draft.nodes for name in node.outputs]
    reasons = list(
        dict.fromkeys(
            draft.problems.get(name, f"'{name}' is not a tensor, and operators that are left read it")
            for name in outputs
            if name in draft.problems or (name and name not in draft.types)
        )
    )
    if reasons:
        more = len(reasons) - _MAX_REASONS
        listed = "; also: ".join(reasons[:_MAX_REASONS])
        raise ShapeError(f"{listed}; and {more} more of the kind" if more > 0 else listed)


class _Walk:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.rebatching: Rebatcher | None = None
        self.nodes: list[Node] = []
        self.weights: dict[str, Weight] = dict(draft.weights)
        self.types = {name: draft.types[name] for name in draft.inputs}
        self.protos = {name: type_proto(kind) for name, kind in self.types.items()}
        self.protos |= {name: type_proto(weight.type) for name, weight in self.weights.items()}
        self.values: dict[str, Array] = {}
        self.derived: set[str] = set()
        self.problems: dict[str, str] = {}
        self.messages = ShapeMessages(self, draft)
        self.inference = TypeInference(self, draft, self.messages)
        self.sequences = Sequences(self, draft.opset)
        self.control_flow = ControlFlow(self, draft)
        self.contrib_names = NameSource((*draft.tensor_names(), *(node.name for node in draft.nodes)))

    def visit_all(self) -> None:
        for node in self.draft.nodes:
            self.visit(node)
        if self.rebatching is not None:
            self.problems |= self.rebatching.outputs_with_file_batch(self.draft.outputs)

    def visit(self, node: Node) -> None:
        if self.control_flow.inline_branch(node):
            return
        for name in reads_of(node):
            if name not in self.protos and name not in self.sequences:
                reason = self.problems.get(name, f"tensor '{name}' has no static shape")
                self._keep_unresolved(node, reason)
                return
        if self.control_flow.unroll(node) or lower_contrib(node, self, self.draft.opset, self.contrib_names):
            return
        for lowered in self._lower(node):
            self._visit_lowered(lowered)

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

    def output_shape(self, node: Node) -> tuple[int, ...] | None:
        """The shape that ONNX infers for a node's first output.

        Raises:
            UnresolvedShapeError: the node contradicts its inputs, or its operator is unknown.
        """
        kind = static_type(self.inference.infer(node).get(node.outputs[0]))
        return None if kind is None else kind.shape

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
            return lowered
        return decompose(node, self) or [node_rewrites.cast_like_as_cast(node, self.type_of)]

    def _visit_lowered(self, node: Node) -> None:
        known = self.type_of(node.inputs[0]) if node.inputs else None
        value = shape_value(node, known.shape) if known is not None else None
        if value is None:
            value = node_rewrites.range_value(node, self.value)
        if value is not None:
            self.add_constant(node.outputs[0], value)
            return
        try:
            if self.rebatching is not None:
                node = self.rebatching.adapted(node)
            self._visit_plain(node)
        except (CannotRebatchError, UnresolvedShapeError) as error:
            self._keep_unresolved(node, str(error))

    def _visit_plain(self, node: Node) -> None:
        outputs = [name for name in node.outputs if name]
        if all(name in self.draft.types for name in outputs):
            # An earlier walk inferred them; passes change graphs, not tensors.
            self.nodes.append(node)
            for name in outputs:
                self.types[name] = self.draft.types[name]
                self.protos[name] = type_proto(self.types[name])
            return
        inferred = self.inference.infer(node)
        kinds = {name: static_type(inferred.get(name)) for name in outputs}
        static = {name: kind for name, kind in kinds.items() if kind is not None}
        if self._fold(node, static):
            return
        if self.rebatching is not None:
            self.rebatching.record(node, static)
        self.nodes.append(node)
        for name in outputs:
            if name in static:
                self.types[name] = static[name]
                self.protos[name] = inferred[name]
            elif name in inferred and not inferred[name].HasField("tensor_type"):
                self.protos[name] = inferred[name]
            else:
                self.problems[name] = self.messages.not_static(name, node)

    def _keep_unresolved(self, node: Node, reason: str) -> None:
        """Keeps a node without types and the reason; the loss may not depend on it."""
        self.nodes.append(node)
        self.problems.update(dict.fromkeys(filter(None, node.outputs), reason))

    def _fold(self, node: Node, static: Mapping[str, TensorType]) -> bool:
        """Whether the node's outputs were computed and added as constants."""
        if not may_fold(node) or any(name and name not in static for name in node.outputs):
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
