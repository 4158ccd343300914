"""Gives every tensor a static shape: one walk in topological order.

For each node the walk rewrites what exporters froze (literal Reshape targets), puts flat operators
in the place of control flow, sequences and fused operators, evaluates what depends on constants and
static shapes only, and else asks ONNX for its output types. Everything
that a node reads is static when the walk comes to it, so one walk is enough, and an inconsistency
is found at the node that causes it. Weights take part by their types; only small constants are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference

from onnxgc.errors import ShapeError
from onnxgc.model.core import node_rewrites
from onnxgc.model.core.constant_folding import (
    LARGEST_FOLDED_INPUT,
    LARGEST_FOLDED_OUTPUT,
    evaluate,
    may_fold,
    shape_value,
)
from onnxgc.model.core.draft import Draft, captured_names, operator_name, reads_of, subgraphs
from onnxgc.model.core.ir import Array, Node, TensorType, Weight, dtype_name
from onnxgc.model.core.stored_weights import ArrayWeight, is_external
from onnxgc.model.rebatch.rebatch import Rebatching
from onnxgc.model.rebatch.shape_pair import CannotRebatchError
from onnxgc.model.static_shapes.contrib_ops import FusedOperators, is_fused
from onnxgc.model.static_shapes.control_flow import ControlFlow
from onnxgc.model.static_shapes.decompositions import spelled
from onnxgc.model.static_shapes.sequences import Sequences

# Larger tensors are never shapes, axes, scales or ratios.
_LARGEST_SETTING = 1024
_MOST_REASONS = 4
_POSITIVE_OUTPUTS = frozenset(["Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"])
# Their scale and shift have the axes from a certain one on.
_SCALED_BEHIND_AN_AXIS = frozenset(["LayerNormalization", "RMSNormalization"])
_POOLING = frozenset(["AveragePool", "LpPool", "MaxPool"])
_SAME = ("SAME_UPPER", "SAME_LOWER", b"SAME_UPPER", b"SAME_LOWER")
# Operators whose output has the type of their first input, which ONNX's inference does not know.
_IN_PLACE_OF = {
    "NonZero": "a mask (Where, or a product) in place of indices, as `x[mask]` and `nonzero` make them",
    "Compress": "a mask (Where, or a product) in place of a choice of elements",
    "Unique": "counts over a fixed number of classes (OneHot, ReduceSum) in place of `unique` or `bincount`",
    "NonMaxSuppression": "its outputs in front of NonMaxSuppression, which a loss is taken of",
    "Range": "a constant length, or a mask over the longest one, in place of a length from the data",
    "StringSplit": "numbers as inputs in place of texts",
}
"""What to write in place of operators whose outputs are as large as the data say."""
_SAME_AS_INPUT = frozenset(
    ["GroupNormalization", "LayerNormalization", "MeanVarianceNormalization", "RotaryEmbedding"]
)


_NAMELESS = "?"
# How ONNX's inference says that an operator does not take a type.
_OF_TYPES = "has unsupported type"
# What a Loop gives its body: the number of the step, and whether it goes on.
_NUMBER = TensorType(onnx.TensorProto.INT64, ())
_CONDITION = TensorType(onnx.TensorProto.BOOL, ())


@dataclass(frozen=True, slots=True)
class FileShapes:
    """The inputs as the file has them, and the first dimension there and here where it differs."""

    types: Mapping[str, TensorType]
    batch: tuple[int, int] | None


def with_input_shapes(
    draft: Draft, input_shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[Draft, FileShapes | None]:
    """The draft with a static type for every input, and the file's own where it holds others.

    Raises:
        ShapeError: a shape is given for an unknown input, has the wrong rank or a size below 1,
            or an input is not a tensor or has no declared rank.
    """
    given = dict(input_shapes or {})
    for name in given:
        if name not in draft.inputs:
            known = ", ".join(f"'{known}'" for known in draft.inputs) or "none"
            raise ShapeError(f"--input-shapes names '{name}', which is not an input; the inputs are: {known}")
    types: dict[str, TensorType] = {}
    own: dict[str, TensorType] = {}
    notes: list[str] = []
    shapes = {name: _declared_shape(name, draft.declared[name]) for name in draft.inputs}
    known_sizes = _sizes_of_dimensions(shapes, given)
    for name, declared in shapes.items():
        shape = _chosen_shape(name, declared, given.get(name), known_sizes, notes)
        types[name] = TensorType(draft.declared[name].tensor_type.elem_type, shape)
        literal = (
            size if isinstance(size, int) and size else None for size in declared or (None,) * len(shape)
        )
        sizes = (here if there is None else there for here, there in zip(shape, literal, strict=True))
        own[name] = TensorType(types[name].dtype, tuple(sizes))
    # Inner declarations were made for the file's own input shapes.
    stale = any(_contradicts(draft.declared[name], types[name].shape) for name in draft.inputs)
    kept = {name: kind for name, kind in draft.declared.items() if not stale or name in types}
    firsts = ((own[name].shape[:1], types[name].shape[:1]) for name in draft.inputs)
    batch = next(((old[0], new[0]) for old, new in firsts if old != new), None)
    file = FileShapes(own, batch) if own != types else None
    for name, kind in types.items():
        if batch is not None and name not in given and kind.shape[:1] == batch[:1]:
            template = ",".join(map(str, (batch[1], *kind.shape[1:])))
            notes.append(
                f"input '{name}' keeps the file's first dimension of {batch[0]}, where another becomes "
                f"{batch[1]}; if it holds samples too, pass --input-shapes {name}:{template}"
            )
    return draft.with_changes(types=types, declared=kept).with_notes(*notes), file


def resolved(draft: Draft, file: FileShapes | None = None) -> Draft:
    """The draft with every tensor's static type, or the reason why it has none in `problems`.

    Literal shapes that were made for the inputs of `file` become those for the draft's own.
    """
    walk = _Walk(draft)
    if file is not None:
        beside = _Walk(draft.with_changes(types=file.types))
        beside.visit_all()
        walk.rebatching = Rebatching(beside, walk, draft, file.batch)
    walk.visit_all()
    return draft.with_changes(
        nodes=tuple(walk.nodes),
        weights=walk.weights,
        types=walk.types,
        derived=draft.derived | walk.derived,
        problems=walk.problems,
        notes=(*draft.notes, *walk.notes()),
    )


def check_static(draft: Draft) -> None:
    """Raises `ShapeError` for the tensors without a static type, with each reason once."""
    outputs = [name for node in draft.nodes for name in node.outputs]
    reasons = list(dict.fromkeys(draft.problems[name] for name in outputs if name in draft.problems))
    if reasons:
        more = len(reasons) - _MOST_REASONS
        told = "; also: ".join(reasons[:_MOST_REASONS])
        raise ShapeError(f"{told}; and {more} more of the kind" if more > 0 else told)


@dataclass(slots=True)
class _Walk:
    draft: Draft
    rebatching: Rebatching | None = None
    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(init=False)
    types: dict[str, TensorType] = field(init=False)
    protos: dict[str, onnx.TypeProto] = field(init=False)
    values: dict[str, Array] = field(default_factory=dict)
    settings: dict[str, onnx.TensorProto] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    opsets: list[onnx.OperatorSetIdProto] = field(init=False)
    sequences: Sequences = field(init=False)
    control_flow: ControlFlow = field(init=False)
    fused: FusedOperators = field(init=False)

    def __post_init__(self) -> None:
        self.weights = dict(self.draft.weights)
        self.types = {name: self.draft.types[name] for name in self.draft.inputs}
        self.protos = {name: _proto(kind) for name, kind in self.types.items()}
        self.protos |= {name: _proto(weight.type) for name, weight in self.weights.items()}
        self.opsets = [helper.make_opsetid("", self.draft.opset)]
        self.opsets += [helper.make_opsetid(*entry) for entry in self.draft.other_domains.items()]
        self.sequences = Sequences(self.type_of, self.value, self.add_fresh_constant, self.draft.opset)
        self.control_flow = ControlFlow(self, self.draft)
        self.fused = FusedOperators(self, self.draft)

    def visit_all(self) -> None:
        for node in self.draft.nodes:
            self.visit(node)
        if self.rebatching is not None:
            self.problems |= self.rebatching.unchanged_outputs(self.draft.outputs)

    def visit(self, node: Node) -> None:
        if self.control_flow.choose(node):
            return
        unknown = next((name for name in reads_of(node) if not self._is_known(name)), None)
        if unknown is not None:
            reason = self.problems.get(unknown, f"tensor '{unknown}' has no static shape")
            self._keep_unresolved(node, reason)
            return
        if self.control_flow.unroll(node) or self.fused.lower(node):
            return
        for lowered in self._rewrite(node):
            self._visit_lowered(lowered)

    def _is_known(self, name: str) -> bool:
        return name in self.protos or name in self.sequences

    def notes(self) -> tuple[str, ...]:
        return () if self.rebatching is None else self.rebatching.notes()

    def value(self, name: str) -> Array | None:
        """The value of a constant that may be folded."""
        weight = self.weights.get(name)
        if weight is None or name in self.draft.fixed or weight.type.element_count > LARGEST_FOLDED_INPUT:
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
        """Records a constant under a name of its own, which it returns."""
        name = node_rewrites.unused(wanted, self.protos)
        self.add_constant(name, value)
        return name

    def add_constant(self, name: str, value: Array) -> None:
        """Records a computed constant."""
        self.weights[name] = ArrayWeight(value)
        self.values[name] = value
        self.protos[name] = _proto(self.weights[name].type)
        self.derived.add(name)

    def _rewrite(self, node: Node) -> list[Node]:
        lowered = self.sequences.lower(node, self.protos)
        if lowered is not None:
            return list(lowered)
        others = spelled(node, self.type_of, self.value, self.add_fresh_constant)
        return [node_rewrites.cast_like_as_cast(node, self.type_of)] if others is None else others

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
        inferred = self._inferred(node)
        if isinstance(inferred, str):
            self._keep_unresolved(node, inferred)
            return
        kinds = {name: _static(inferred.get(name)) for name in node.outputs if name}
        static = {name: kind for name, kind in kinds.items() if kind is not None}
        if self._folded(node, static):
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
                self.problems[name] = self._not_static(name, node)

    def _keep_known(self, node: Node) -> None:
        """Keeps a node whose types an earlier walk found: passes change graphs, but not tensors."""
        self.nodes.append(node)
        for name in filter(None, node.outputs):
            self.types[name] = self.draft.types[name]
            self.protos[name] = _proto(self.types[name])

    def _keep_unresolved(self, node: Node, reason: str) -> None:
        """Keeps a node that may turn out not to matter, with the reason why it has no types."""
        self.nodes.append(node)
        self.problems.update(dict.fromkeys(filter(None, node.outputs), reason))

    def _folded(self, node: Node, static: Mapping[str, TensorType]) -> bool:
        if not may_fold(node) or len(static) != len([name for name in node.outputs if name]):
            return False
        if any(kind.element_count > LARGEST_FOLDED_OUTPUT for kind in static.values()):
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

    def _inferred(self, node: Node) -> dict[str, onnx.TypeProto] | str:
        """The types of the node's outputs, or what is wrong with the node."""
        version = self.draft.other_domains.get(node.domain, 1) if node.domain else self.draft.opset
        if node.domain and not defs.has(node.op, version, node.domain):
            return self._of_other_domain(node)
        read = reads_of(node)
        missing = next((name for name in read if name not in self.protos), None)
        if missing is not None:
            return self.problems.get(missing, self._not_static(next(filter(None, node.outputs)), node))
        types = {name: self.protos[name] for name in read}
        proto = node.to_proto()
        try:
            schema = defs.get_schema(node.op, version, node.domain)
            found = shape_inference.infer_node_outputs(
                schema,
                proto,
                types,
                self._settings(node),
                opset_imports=self.opsets,
                ir_version=max(self.draft.ir_version, 4),
            )
        except (shape_inference.InferenceError, defs.SchemaError, onnx.checker.ValidationError) as error:
            return self._inconsistent(node, _reason(error))
        if any(name and _static(found.get(name)) is None for name in node.outputs):
            if node.domain:
                return self._of_other_domain(node)
            found |= self._by_function_body(proto, types)
        if node.op in _SAME_AS_INPUT and _static(found.get(node.outputs[0])) is None:
            found[node.outputs[0]] = self.protos[node.inputs[0]]
        if node.op == "Loop" and not node.domain:
            found |= self._lasting_states(node, types)
        if node.op == "GatherND" and not node.domain and _static(found.get(node.outputs[0])) is None:
            found |= _gathered(node, types)
        _drop_windows_in_padding(node, types, found)
        _without_output_padding(node, types, found)
        problem = self._impossible(node, found)
        return self._inconsistent(node, problem) if problem else found

    def _by_function_body(
        self, proto: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]
    ) -> dict[str, onnx.TypeProto]:
        """Types of a node whose operator is defined by other operators only."""
        graph = helper.make_graph(
            [proto],
            "one_node",
            [helper.make_value_info(name, kind) for name, kind in types.items()],
            [onnx.ValueInfoProto(name=name) for name in proto.output if name],
        )
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=max(self.draft.ir_version, 4))
        found = shape_inference.infer_shapes(model, data_prop=True).graph.output
        return {value.name: value.type for value in found if _static(value.type) is not None}

    def _lasting_states(self, node: Node, types: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TypeProto]:
        """The types of the states of a Loop that no step changes, however many there are."""
        body: onnx.GraphProto = node.attribute("body")
        number, goes_on, *states = body.input
        kinds = {number.name: _proto(_NUMBER), goes_on.name: _proto(_CONDITION)}
        starts = node.inputs[2:]
        kinds |= {state.name: self.protos[start] for state, start in zip(states, starts, strict=True)}
        kinds |= {name: types[name] for name in captured_names(node)}
        settings = self._settings(node.with_changes(inputs=captured_names(node)))
        graph = helper.make_graph(
            list(body.node),
            "one_step",
            [helper.make_value_info(name, kind) for name, kind in kinds.items()],
            [onnx.ValueInfoProto(name=value.name) for value in body.output],
            list(settings.values()),
        )
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=max(self.draft.ir_version, 4))
        after = shape_inference.infer_shapes(model, data_prop=True).graph.output[1:]
        return {
            output: kinds[state.name]
            for output, state, value in zip(node.outputs, states, after, strict=False)
            if output
            and _static(value.type) is not None
            and _static(value.type) == _static(kinds[state.name])
        }

    def _of_other_domain(self, node: Node) -> dict[str, onnx.TypeProto] | str:
        outputs = [name for name in node.outputs if name]
        if node.op in _SAME_AS_INPUT and len(outputs) == 1:
            return {outputs[0]: self.protos[node.inputs[0]]}
        declared = {name: self.draft.declared[name] for name in outputs if name in self.draft.declared}
        if all(_static(declared.get(name)) is not None for name in outputs):
            return declared
        others = self._outside_of_onnx(node)
        return (
            f"the shape of tensor '{outputs[0]}' cannot be inferred: node {node.named} is "
            f"{operator_name(node)}, an operator outside of ONNX{others}; export the model with standard "
            "operators"
        )

    def _outside_of_onnx(self, node: Node) -> str:
        """The other kinds of operators outside of ONNX that have no standard form, with their numbers."""
        found = (other for other in self.draft.nodes if other.domain and not is_fused(other))
        counts = Counter(operator_name(other) for other in found if other.op != node.op)
        listed = ", ".join(f"{count} {operator}" for operator, count in sorted(counts.items()))
        return f" (as are {listed})" if listed else ""

    def _settings(self, node: Node) -> dict[str, onnx.TensorProto]:
        """The node's small constant inputs, which may decide the shape of its outputs."""
        found: dict[str, onnx.TensorProto] = {}
        for name in filter(None, node.inputs):
            if name not in self.settings:
                weight = self.weights.get(name)
                if weight is None or weight.type.element_count > _LARGEST_SETTING or name in self.draft.fixed:
                    continue
                value = self.value(name)
                if value is None:
                    continue
                self.settings[name] = numpy_helper.from_array(value, name)
            found[name] = self.settings[name]
        return found

    def _impossible(self, node: Node, found: Mapping[str, onnx.TypeProto]) -> str:
        """What ONNX's own inference lets pass."""
        shapes = [kind.shape if (kind := self.type_of(name)) else None for name in node.inputs]
        first = _static(found.get(node.outputs[0]))
        if node.op == "Conv" and shapes[0] and shapes[1]:
            wanted = shapes[1][1] * node.attribute("group", 1)
            if shapes[0][1] != wanted:
                return _channels(node, wanted, shapes[0][1])
        if node.op == "ConvTranspose" and shapes[0] and shapes[1] and shapes[0][1] != shapes[1][0]:
            return _channels(node, shapes[1][0], shapes[0][1])
        if node.op == "InstanceNormalization" and shapes[0] and shapes[1] and shapes[0][1] != shapes[1][0]:
            return _channels(node, shapes[1][0], shapes[0][1])
        if node.op in _SCALED_BEHIND_AN_AXIS and shapes[0]:
            for name, shape in zip(node.inputs[1:], shapes[1:], strict=True):
                if shape and not _fits(shape, shapes[0]):
                    return f"'{name}' of {_text(shape)} does not fit '{node.inputs[0]}' of {_text(shapes[0])}"
        if node.op == "Gather" and shapes[0]:
            size, chosen = shapes[0][node.attribute("axis", 0)], self.value(node.inputs[1])
            if chosen is not None and chosen.size and not -size <= chosen.min() <= chosen.max() < size:
                return f"it takes element {_outside(chosen, size)} along an axis of {size}"
        if node.op == "Slice" and not node.domain and self._ends_at_the_largest(node):
            return (
                "it goes backwards to the largest integer, which ONNX takes for no element and ONNX Runtime "
                "for all; export it with the smallest integer as end"
            )
        if first is None:
            return ""
        if node.op in _POSITIVE_OUTPUTS and shapes[0] is not None and 0 in shapes[0]:
            return f"'{node.inputs[0]}' of {_text(shapes[0])} has no elements"
        if node.op in _POSITIVE_OUTPUTS and min(first.shape) < 1:
            return f"'{node.inputs[0]}' of {_text(shapes[0])} is too small for its kernel"
        if node.op == "Reshape" and shapes[0] is not None:
            source = TensorType(first.dtype, shapes[0])
            if source.element_count != first.element_count:
                return f"it cannot turn '{node.inputs[0]}' of {_text(shapes[0])} into {_text(first.shape)}"
        return ""

    def _ends_at_the_largest(self, node: Node) -> bool:
        if len(node.inputs) < 5 or not node.inputs[4]:
            return False
        ends, steps = self.value(node.inputs[2]), self.value(node.inputs[4])
        if ends is None or steps is None or ends.shape != steps.shape:
            return False
        largest = (np.iinfo(np.int32).max, np.iinfo(np.int64).max)
        return bool(np.any((steps < 0) & np.isin(ends, largest)))

    def _inconsistent(self, node: Node, reason: str) -> str:
        reads = [(name, self.type_of(name)) for name in node.inputs if name]
        if _OF_TYPES in reason:
            return self._of_wrong_type(node, reads)
        shapes = ", ".join(f"'{name}' {_text(kind.shape)}" for name, kind in reads if kind is not None)
        return (
            f"node {node.named} ({operator_name(node)}) does not fit its inputs: {reason}; "
            f"it reads {shapes or 'nothing'}; check the input shapes ({self._inputs()}){self._made_for()}"
        )

    def _of_wrong_type(self, node: Node, reads: Sequence[tuple[str, TensorType | None]]) -> str:
        """Why an operator is not defined for the types that it reads, and what would help."""
        types = ", ".join(f"'{name}' {dtype_name(kind.dtype)}" for name, kind in reads if kind is not None)
        opset = self.draft.opset
        later = _opset_of_types(node, opset, [kind for _, kind in reads])
        way = f"export the model at opset {later}, or" if later else "export the model"
        return (
            f"node {node.named} ({operator_name(node)}) is not defined for the types that it reads at opset "
            f"{opset}: {types}; {way} with this operator in float32 (by a Cast before and behind it)"
        )

    def _not_static(self, name: str, node: Node) -> str:
        if any(True for _ in subgraphs(node)):
            decided = "which branch runs" if node.op == "If" else "how long it runs"
            return (
                f"tensor '{name}' (node {node.named}, {operator_name(node)}) has no static shape: "
                f"{self._deciding(node)} {decided}; export the model without this control flow"
            )
        computed = [read for read in node.inputs if read and read not in self.weights]
        on = ", ".join(f"'{read}'" for read in computed) or "nothing"
        advice = _IN_PLACE_OF.get(operator_name(node))
        advice = (
            f"export the model with {advice}"
            if advice
            else f"export the model with static shapes, or pass other --input-shapes (now {self._inputs()})"
        )
        return (
            f"tensor '{name}' (node {node.named}, {operator_name(node)}) has no static shape: it depends on "
            f"the values of {on}, which are known only at run time; {advice}"
        )

    def _deciding(self, node: Node) -> str:
        """What a branch depends on: the inputs that its condition is computed from, where there are any."""
        producers = {output: other for other in self.nodes for output in other.outputs if output}
        pending, seen = list(node.inputs[:1]) if node.op == "If" else [], set()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += reads_of(producers[name]) if name in producers else ()
        inputs = [f"'{name}'" for name in self.draft.inputs if name in seen]
        return f"the values of {', '.join(inputs)} decide" if inputs else "the data decide"

    def _made_for(self) -> str:
        if self.rebatching is None:
            return ""
        return f", or export the model with dynamic dimensions: {self.rebatching.made_for()}"

    def _inputs(self) -> str:
        texts = (f"{name}:{','.join(map(str, self.types[name].shape))}" for name in self.draft.inputs)
        return " ".join(texts) or "the model has no inputs"


def _declared_shape(name: str, declared: onnx.TypeProto) -> list[int | str] | None:
    if not declared.HasField("tensor_type"):
        raise ShapeError(
            f"input '{name}' is not a tensor; models with sequence or optional inputs are not supported"
        )
    if not declared.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or _NAMELESS
        for dim in declared.tensor_type.shape.dim
    ]


def _sizes_of_dimensions(
    declared: Mapping[str, Sequence[int | str] | None], given: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """What the given shapes say of symbolic dimensions, which other inputs may have too."""
    found: dict[str, set[int]] = {}
    for name, shape in given.items():
        for size, dimension in zip(shape, declared[name] or (), strict=False):
            if isinstance(dimension, str) and dimension != _NAMELESS:
                found.setdefault(dimension, set()).add(size)
    return {dimension: next(iter(sizes)) for dimension, sizes in found.items() if len(sizes) == 1}


def _chosen_shape(
    name: str,
    declared: list[int | str] | None,
    given: tuple[int, ...] | None,
    known_sizes: Mapping[str, int],
    notes: list[str],
) -> tuple[int, ...]:
    if given is not None:
        if declared is not None and len(given) != len(declared):
            raise ShapeError(
                f"--input-shapes gives input '{name}' {len(given)} dimensions ({_text(given)}), "
                f"but it has {len(declared)} ({_text(declared)}); give a size for each"
            )
        if any(size < 1 for size in given):
            raise ShapeError(
                f"--input-shapes gives input '{name}' the shape {_text(given)}; sizes must be at least 1"
            )
        return tuple(int(size) for size in given)
    if declared is None:
        raise ShapeError(f"input '{name}' has no declared shape; pass --input-shapes {name}:SIZE,SIZE,...")
    known = [size for size in dict.fromkeys(declared) if isinstance(size, str) and size in known_sizes]
    notes += [
        f"input '{name}': dimension '{size}' was taken as {known_sizes[size]}, as given" for size in known
    ]
    unknown = [size for size in declared if isinstance(size, str) and size not in known]
    shape = tuple(size if isinstance(size, int) else known_sizes.get(size, 1) for size in declared)
    if 0 in shape:
        # Valid ONNX, but some exporters mean an unknown size by it.
        template = ",".join("N" if size == 0 else str(size) for size in shape)
        notes.append(
            f"input '{name}' is declared empty, {_text(shape)}; pass --input-shapes {name}:{template}"
        )
    if unknown:
        template = ",".join(str(known_sizes.get(str(size), size)) for size in declared)
        which = (
            f"dimension '{unknown[0]}' was"
            if len(unknown) == 1
            else (f"dimensions {', '.join(repr(size) for size in unknown)} were")
        )
        notes.append(f"input '{name}': {which} taken as 1; pass --input-shapes {name}:{template}")
    return shape


def _contradicts(declared: onnx.TypeProto, shape: tuple[int, ...]) -> bool:
    if not declared.tensor_type.HasField("shape"):
        return False
    pairs = zip(declared.tensor_type.shape.dim, shape, strict=True)
    return any(dim.dim_value and dim.dim_value != size for dim, size in pairs)


def _channels(node: Node, wanted: int, found: int) -> str:
    return f"its weight '{node.inputs[1]}' is for {wanted} channels, but '{node.inputs[0]}' has {found}"


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor can be broadcast to another one's shape."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, of_whole) for size, of_whole in pairs)


def _outside(indices: Array, size: int) -> int:
    """The first index that is out of bounds."""
    return int(indices[(indices < -size) | (indices >= size)].flat[0])


def _gathered(node: Node, types: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TypeProto]:
    """The type of what GatherND takes: ONNX's inference says nothing where that is a scalar."""
    data, indices = _static(types[node.inputs[0]]), _static(types[node.inputs[1]])
    if data is None or indices is None or not indices.shape:
        return {}
    taken = int(node.attribute("batch_dims", 0)) + indices.shape[-1]
    return {node.outputs[0]: _proto(TensorType(data.dtype, (*indices.shape[:-1], *data.shape[taken:])))}


def _drop_windows_in_padding(
    node: Node, types: Mapping[str, onnx.TypeProto], found: dict[str, onnx.TypeProto]
) -> None:
    """Correct the extent of pooling with ceil_mode: no window begins in the padding at the end.

    Older versions of ONNX's inference count such a window; runtimes never compute it. Source: ONNX
    MaxPool-22 and AveragePool-22, `ceil_mode`.
    """
    if node.op not in _POOLING or not node.attribute("ceil_mode", 0):
        return
    source = _static(types[node.inputs[0]])
    if source is None or node.attribute("auto_pad", "NOTSET") not in ("NOTSET", b"NOTSET", ""):
        return
    rank = len(source.shape) - 2
    strides = node.attribute("strides") or [1] * rank
    pads = node.attribute("pads") or [0] * (2 * rank)
    for output in filter(None, node.outputs):
        kind = _static(found.get(output))
        if kind is None:
            continue
        spatial = tuple(
            extent - 1 if (extent - 1) * stride >= size + begin else extent
            for extent, stride, size, begin in zip(
                kind.shape[2:], strides, source.shape[2:], pads[:rank], strict=True
            )
        )
        found[output] = _proto(TensorType(kind.dtype, (*kind.shape[:2], *spatial)))


def _opset_of_types(node: Node, opset: int, kinds: Sequence[TensorType | None]) -> int | None:
    """The first later opset in which an operator takes all of these types, or None."""
    if node.domain:
        return None
    names = {"FLOAT": "float", "DOUBLE": "double"}
    for later in range(opset + 1, defs.onnx_opset_version() + 1):
        schema = defs.get_schema(node.op, later, "")
        allowed = {text for entry in schema.inputs for text in entry.types}
        wanted = (onnx.TensorProto.DataType.Name(kind.dtype) for kind in kinds if kind is not None)
        if all(f"tensor({names.get(name, name.lower())})" in allowed for name in wanted):
            return later
    return None


def _without_output_padding(
    node: Node, types: Mapping[str, onnx.TypeProto], found: dict[str, onnx.TypeProto]
) -> None:
    """Correct the extent of ConvTranspose with auto_pad, which output_padding does not change.

    ONNX's inference adds it. Source: ONNX ConvTranspose-11, `auto_pad`: output_shape[i] = input_shape[i] *
    strides[i]; where all windows together reach less far, runtimes end there.
    """
    if node.op != "ConvTranspose" or node.domain or node.attribute("output_shape"):
        return
    if node.attribute("auto_pad", "NOTSET") not in _SAME or not any(node.attribute("output_padding") or ()):
        return
    source, weight = (_static(types[name]) for name in node.inputs[:2])
    kind = _static(found.get(node.outputs[0]))
    if source is None or weight is None or kind is None:
        return
    ones = [1] * (len(source.shape) - 2)
    spatial = tuple(
        min(size * stride, (size - 1) * stride + dilation * (width - 1) + 1 + added)
        for size, width, stride, dilation, added in zip(
            source.shape[2:],
            weight.shape[2:],
            node.attribute("strides") or ones,
            node.attribute("dilations") or ones,
            node.attribute("output_padding"),
            strict=True,
        )
    )
    found[node.outputs[0]] = _proto(TensorType(kind.dtype, (*kind.shape[:2], *spatial)))


def _proto(kind: TensorType) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind.dtype, kind.shape)


def _static(proto: onnx.TypeProto | None) -> TensorType | None:
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    dimensions = proto.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dimensions):
        return None
    return TensorType(proto.tensor_type.elem_type, tuple(dim.dim_value for dim in dimensions))


def _text(shape: object) -> str:
    return f"[{', '.join(map(str, shape))}]" if isinstance(shape, tuple | list) else str(shape)


def _reason(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for tag in ("[ShapeInferenceError]", "[TypeInferenceError]"):
        line = line.rpartition(tag)[2].strip()
    return line[0].lower() + line[1:].rstrip(".") if line else type(error).__name__
