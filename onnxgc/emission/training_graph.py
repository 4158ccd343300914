"""From a schedule to one portable ONNX file that trains."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx

from onnxgc.emission.annotated_node import AnnotatedNode
from onnxgc.emission.barriers import BarrierWriter
from onnxgc.emission.computed_constants import live_constants
from onnxgc.emission.graph_tensors import GraphTensors
from onnxgc.emission.training_proto import TrainingModel
from onnxgc.emission.update_barriers import delay_updates
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.planning.schedule import Compute, Recompute, Release, Schedule
from onnxgc.planning.simulate import simulate
from onnxgc.tracing.step_graph import TrainingStep

UPDATE = "update"
# Tensors below this share of the peak may be computed early: their effect on the peak is negligible.
_SMALL_SHARE_OF_PEAK = 4096


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """The emitted model, the gradient output of each parameter, and the schedule of the nodes.

    `first_values` are those of parameters, statistics and states, unless the model itself stores them.
    """

    model: onnx.ModelProto
    gradient_of: Mapping[str, str]
    schedule: Schedule
    first_values: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _NodeGroup:
    """Consecutive nodes: forward, one segment's recomputation, one backward chunk, or updates."""

    role: str
    nodes: tuple[Node, ...]
    segments: tuple[int | None, ...]


def emit_training_graph(
    step: TrainingStep,
    schedule: Schedule,
    *,
    metadata: Mapping[str, str],
    values: Mapping[str, Array] | None = None,
    has_barriers: bool = True,
    stores_state: bool = True,
    streams: bool = False,
) -> TrainingGraph:
    """The training graph of one step in the order of `schedule`.

    `values` replaces weights by name. With `stores_state` the model contains the first values of parameters
    and statistics; with `streams`, the large ones without contents.
    Without barriers only a session that runs nodes in the order of the
    file, without optimisations, keeps the schedule. docs/training-file.md defines inputs, outputs, names and
    metadata.
    """
    peak_bytes = simulate(schedule, step.graph).peak_bytes
    emitter = _Emitter(step, schedule, peak_bytes, has_barriers)
    nodes = emitter.nodes()
    model = TrainingModel(step, nodes, emitter.tensors, peak_bytes, metadata, values or {}, stores_state, streams)
    first_values = {} if stores_state else model.first_values()
    return TrainingGraph(model.to_proto(), dict(step.parameter_gradients), schedule, first_values)


def training_nodes(
    step: TrainingStep, schedule: Schedule, *, has_barriers: bool = True
) -> tuple[list[Node], GraphTensors]:
    """The nodes that `emit_training_graph` writes, in order, and the types of their tensors."""
    peak_bytes = simulate(schedule, step.graph).peak_bytes
    emitter = _Emitter(step, schedule, peak_bytes, has_barriers)
    return [annotated.node for annotated in emitter.nodes()], emitter.tensors


class _Emitter:
    """Turns the instructions of a schedule into nodes, in groups with barriers between them."""

    def __init__(self, step: TrainingStep, schedule: Schedule, peak_bytes: int, has_barriers: bool) -> None:
        self._step = step
        self._has_barriers = has_barriers
        self._schedule = schedule
        weights = {*step.model.weights, *step.constants, step.differentiated.seed}
        self.tensors = GraphTensors(
            self._step_type,
            fixed=weights,
            taken={*step.types, *step.constants, *step.model.weights, *schedule.original_of},
        )
        self._barriers = BarrierWriter(self.tensors, peak_bytes // _SMALL_SHARE_OF_PEAK, step.model.loss)
        self._view_source: dict[str, str] = {}
        self._runs: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def _step_type(self, name: str) -> TensorType:
        return self._step.types[self._schedule.original_of.get(name, name)]

    def nodes(self) -> list[AnnotatedNode]:
        """All nodes of the file in the order of the schedule."""
        if not self._has_barriers:
            return [
                AnnotatedNode(node, group.role, segment)
                for group in self._groups()
                for node, segment in zip(group.nodes, group.segments, strict=True)
            ]
        step, updates = self._step, self._step.updates
        # An update waits for the readers of the values that it replaces.
        replaced = frozenset[str]()
        if updates is not None:
            replaced = frozenset((*updates.replaced.values(), *step.parameter_gradients.values()))
        written: list[AnnotatedNode] = []
        views: dict[str, str] = {}
        # Portable files have static shapes.
        for name in () if step.model.is_portable else step.model.inputs:
            added, views[name] = self._barriers.opaque_view(name, on_cuda=step.model.provider == "cuda")
            written.extend(AnnotatedNode(node, "forward") for node in added)
        live = live_constants(step.nodes.values(), self.tensors)
        written.extend(AnnotatedNode(node, "forward") for node in live.nodes)
        is_first = True
        for group in self._groups():
            nodes = [
                live.applied_to(node.with_changes(inputs=tuple(views.get(name, name) for name in node.inputs)))
                for node in group.nodes
            ]
            segment_of = dict(zip((node.name for node in nodes), group.segments, strict=True))
            always_delayed = replaced if group.role == UPDATE else frozenset[str]()
            ordered = nodes if is_first else self._barriers.delay_group(nodes, always_delayed)
            if is_first and not any(step.model.loss in node.outputs for node in nodes):
                # The schedule recomputes tensors before the loss.
                self._barriers.token = nodes[-1].outputs[0]
            is_first = False
            written.extend(AnnotatedNode(node, group.role, segment_of.get(node.name)) for node in ordered)
        return written if updates is None else delay_updates(written, updates.replaced, self._barriers)

    def _groups(self) -> Iterator[_NodeGroup]:
        """The schedule's nodes in groups."""
        key: tuple[str, int | None] | None = None
        nodes: list[Node] = []
        segments: list[int | None] = []
        for step in self._schedule.instructions:
            if isinstance(step, Release):
                for name in step.tensors:
                    if name in nodes[-1].outputs:
                        nodes.append(self._reader(name))
                        segments.append(None)
                continue
            step_key = self._group_key(step)
            if key is not None and step_key != key and nodes:
                yield _NodeGroup(key[0], tuple(nodes), tuple(segments))
                nodes, segments = [], []
            key = step_key
            added = self._with_kernels(self._node(step))
            nodes.extend(added)
            segments.extend([step.segment] * len(added))
        if key is not None and nodes:
            yield _NodeGroup(key[0], tuple(nodes), tuple(segments))

    def _group_key(self, step: Compute | Recompute) -> tuple[str, int | None]:
        if isinstance(step, Recompute):
            return ("recompute", step.segment)
        updates = self._step.updates
        if updates is not None and step.operator.name in updates.nodes:
            return (UPDATE, step.chunk)
        return ("forward", None) if step.chunk is None else ("backward", step.chunk)

    def _with_kernels(self, node: Node) -> tuple[Node, ...]:
        """The node, or HardSwish as HardSigmoid and Mul.

        A runtime without a kernel for HardSwish would inline it and run the parts last.
        """
        if node.op != "HardSwish" or node.domain:
            return (node,)
        gate = self.tensors.fresh_name(f"{node.outputs[0]}/gate")
        self.tensors.types[gate] = self.tensors.type_of(node.outputs[0])
        slope = {**node.attributes, "alpha": 1 / 6, "beta": 0.5}
        inner = node.with_changes(op="HardSigmoid", outputs=(gate,), attributes=slope, name=f"{node.name}/gate")
        return inner, node.with_changes(op="Mul", inputs=(node.inputs[0], gate), attributes={})

    def _reader(self, tensor: str) -> Node:
        """A node that reads an otherwise unread tensor, which the runtime would never free."""
        output = self.tensors.fresh_name(f"{tensor}/unread")
        rank = len(self.tensors.type_of(tensor).shape)
        self.tensors.declare_vector(output, TensorType(onnx.TensorProto.INT64, (rank,)))
        return Node("Shape", (tensor,), (output,), name=output)

    def _node(self, step: Compute | Recompute) -> Node:
        """The node of one operator; in backward, a view of a view reads the first view's source."""
        original = self._step.nodes[step.source if isinstance(step, Recompute) else step.operator.name]
        names = iter(step.operator.inputs)
        inputs = tuple(next(names) if name else "" for name in original.inputs)
        attributes = dict(original.attributes)
        earlier_runs = self._runs[original.name, inputs]
        self._runs[original.name, inputs] += 1
        if earlier_runs and not self._step.model.is_portable:
            # Equal nodes with equal inputs would be merged. Other copies get no marker: on an activation, the
            # runtime's fusions would pass an unknown attribute on.
            attributes["__recompute"] = earlier_runs
        if original.op == "Reshape" and not isinstance(step, Recompute) and step.chunk is not None:
            inputs = (self._view_source.get(inputs[0], inputs[0]), *inputs[1:])
            if step.operator.outputs[0] not in self._step.graph.output_set:
                self._view_source[step.operator.outputs[0]] = inputs[0]
        return original.with_changes(
            name=step.operator.name, inputs=inputs, outputs=step.operator.outputs, attributes=attributes
        )
