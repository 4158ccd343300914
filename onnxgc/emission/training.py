"""From a schedule to one portable ONNX file that trains."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxgc import __version__
from onnxgc.emission.barriers import ZERO, BarrierWriter
from onnxgc.emission.dimensions import dimension_names
from onnxgc.gradients.engine import ConstantPool, fresh_name
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.stored_weights import ArrayWeight, write_weight
from onnxgc.planning.schedule import Compute, Recompute, Release, Schedule
from onnxgc.planning.simulate import simulate
from onnxgc.tracing.gradient_types import type_of_array
from onnxgc.tracing.runtime_costs import VIEW_OPERATORS
from onnxgc.tracing.step_graph import TrainingStep

_COPY_SUFFIX = re.compile(r"__recompute\d*$")
SCHEMA_VERSION = 1
UPDATE = "update"
_POOLS = ("AveragePool", "MaxPool")


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """The emitted model, the gradient output of each parameter, and the schedule it follows."""

    model: onnx.ModelProto
    gradient_of: Mapping[str, str]
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes that follow one another: forward, one segment's recomputation, one backward chunk, updates."""

    role: str
    nodes: tuple[Node, ...]
    segments: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Written:
    """A node of the file with its role and segment."""

    node: Node
    role: str
    segment: int | None = None

    def annotated(self) -> onnx.NodeProto:
        proto = self.node.to_proto()
        notes = {"onnxgc.role": self.role, "onnxgc.node": self.node.origin or self.node.name}
        if self.segment is not None:
            notes["onnxgc.segment"] = str(self.segment)
        for key, value in notes.items():
            proto.metadata_props.add(key=key, value=value)
        return proto


@dataclass(frozen=True, slots=True)
class _LiveConstants:
    """Nodes that compute constants which the runtime must not see, and the nodes that read them.

    `live` maps the name of a reading node, in forward or backward, to its second input as computed.
    """

    nodes: tuple[Node, ...]
    live: Mapping[str, str]

    def applied_to(self, node: Node) -> Node:
        live = self.live.get(node.name, self.live.get(_COPY_SUFFIX.sub("", node.name)))
        return node if live is None else node.with_changes(inputs=(node.inputs[0], live, *node.inputs[2:]))


def emit_training_graph(
    step: TrainingStep,
    schedule: Schedule,
    *,
    metadata: Mapping[str, str],
    values: Mapping[str, Array] | None = None,
) -> TrainingGraph:
    """The training graph of one step in the order of `schedule`.

    `values` replaces weights by name. Inputs, outputs, names and metadata follow the training
    file's contract (docs/training-file.md).
    """
    return _Emitter(step, schedule, metadata, values or {}).emit()


class _Emitter:
    def __init__(
        self,
        step: TrainingStep,
        schedule: Schedule,
        metadata: Mapping[str, str],
        values: Mapping[str, Array],
    ) -> None:
        self._step = step
        self._schedule = schedule
        self._metadata = metadata
        self._values = values
        self._taken = set(step.types) | set(step.constants) | set(step.model.weights)
        self._taken.update(schedule.original_of)
        self._constants = ConstantPool(self._taken)
        self._zero = fresh_name(ZERO, self._taken)
        self._updates = step.updates
        # An update reads these after everybody else: whoever reads the old value must have done so.
        self._waiting: frozenset[str] = frozenset()
        if step.updates is not None:
            self._waiting = frozenset((*step.updates.replaced.values(), *step.parameter_gradients.values()))
        self._peak_bytes = simulate(schedule, step.graph).peak_bytes
        # Hundredths of a percent of the peak: whether they come early does not matter.
        small_bytes = self._peak_bytes // 4096
        weights = set(step.model.weights) | set(step.constants) | {step.differentiated.seed}
        self._barriers = BarrierWriter(
            self._type_of,
            self._constants.add,
            lambda name: name in weights or name in self._constants.values,
            self._zero,
            small_bytes,
            lambda wanted: fresh_name(wanted, self._taken),
            step.model.loss,
        )
        self._barriers.declare(self._zero, TensorType(onnx.TensorProto.INT64, (1,)))

    def _type_of(self, name: str) -> TensorType:
        declared = self._barriers.types.get(name)
        if declared is not None:
            return declared
        if name in self._constants.values:
            return type_of_array(self._constants.values[name])
        return self._step.types[self._schedule.original_of.get(name, name)]

    def emit(self) -> TrainingGraph:
        written: list[_Written] = []
        views: dict[str, str] = {}
        for name in self._step.model.inputs:
            add, view_node, view = self._barriers.opaque_view(name)
            written.extend((_Written(add, "forward"), _Written(view_node, "forward")))
            views[name] = view
        live = self._live_constants()
        written.extend(_Written(node, "forward") for node in live.nodes)
        is_first = True
        for group in self._groups():
            group_nodes = [
                live.applied_to(
                    node.with_changes(inputs=tuple(views.get(name, name) for name in node.inputs))
                )
                for node in group.nodes
            ]
            segment_of = dict(zip((node.name for node in group_nodes), group.segments, strict=True))
            waiting = self._waiting if group.role == UPDATE else frozenset()
            ordered = group_nodes if is_first else self._barriers.group(group_nodes, waiting)
            if is_first and not any(self._step.model.loss in node.outputs for node in group_nodes):
                # Something is computed again before the loss is there.
                self._barriers.token = group_nodes[-1].outputs[0]
            is_first = False
            written.extend(_Written(node, group.role, segment_of.get(node.name)) for node in ordered)
        written = self._with_waiting_updates(written)
        return TrainingGraph(
            self._model([one.annotated() for one in written], [one.node for one in written]),
            dict(self._step.parameter_gradients),
            self._schedule,
        )

    def _with_waiting_updates(self, written: Sequence[_Written]) -> list[_Written]:
        """The nodes, and barriers from readers of what is replaced to what replaces it, where none is there.

        Groups wait for the end of the one before them, but not for all in it, and one that runs again may
        have a reader that nothing else waits for.
        """
        if self._updates is None:
            return list(written)
        replaced = self._updates.replaced
        shown = {old: old for old in replaced.values()}
        readers: dict[str, list[int]] = {old: [] for old in replaced.values()}
        known: list[int] = []
        """The nodes that read what is replaced; bit i of a set of them is the i-th."""
        before: dict[str, int] = {}
        """By tensor, the set of such nodes that it waits for."""
        behind: dict[int, list[_Written]] = {}
        in_front: dict[int, list[_Written]] = {}
        changed: dict[int, _Written] = {}
        for index, one in enumerate(written):
            node = one.node
            waits = 0
            for name in reads_of(node):
                waits |= before.get(name, 0)
            for name in node.outputs:
                old = replaced.get(name)
                missing = [bit for bit in readers.get(old or "", ()) if not waits >> bit & 1]
                for bit in missing:
                    reader = written[known[bit]].node
                    token, held, node = self._barriers.wait(node, reader.outputs[0])
                    behind.setdefault(known[bit], []).extend(_Written(made, one.role) for made in token)
                    in_front.setdefault(index, []).extend(_Written(made, one.role) for made in held)
                    waits |= 1 << bit
                changed[index] = _Written(node, one.role, one.segment)
            for old in dict.fromkeys(shown[name] for name in reads_of(node) if name in shown):
                waits |= 1 << len(known)
                readers[old].append(len(known))
                known.append(index)
            if node.op in VIEW_OPERATORS and node.inputs[0] in shown:
                shown[node.outputs[0]] = shown[node.inputs[0]]
            before.update(dict.fromkeys(node.outputs, waits))
        return [
            made
            for index, one in enumerate(written)
            for made in (*in_front.get(index, ()), changed.get(index, one), *behind.get(index, ()))
        ]

    def _live_constants(self) -> _LiveConstants:
        """Constants that make ONNX Runtime rewrite what must stay.

        It removes a Dropout with a constant ratio whose mask nobody reads, in training mode too: where
        only the recomputed copy's mask is read, forward would run without one. And it takes a Pad by
        constants into the pool behind it, which then refuses pads that reach its kernel's size.
        """
        step = self._step
        pooled = {node.inputs[0] for node in step.nodes.values() if node.op in _POOLS}
        readers = {
            node.name: node.inputs[1]
            for node in step.nodes.values()
            if len(node.inputs) > 1
            and node.inputs[1]
            and (node.op == "Dropout" or (node.op == "Pad" and node.outputs[0] in pooled))
        }
        nodes: list[Node] = []
        live: dict[str, str] = {}
        for constant in dict.fromkeys(readers.values()):
            kind = self._type_of(constant)
            zero, shaped, result = (
                fresh_name(f"{constant}/{part}", self._taken) for part in ("zero", "shaped_zero", "live")
            )
            nodes.append(Node("Cast", (self._zero,), (zero,), {"to": kind.dtype}, zero))
            self._barriers.declare(zero, TensorType(kind.dtype, (1,)))
            if not kind.shape:
                axes = self._constants.add(np.asarray([0], np.int64))
                nodes.append(Node("Squeeze", (zero, axes), (shaped,), name=shaped))
                self._barriers.declare(shaped, kind)
            nodes.append(Node("Add", (constant, zero if kind.shape else shaped), (result,), name=result))
            self._barriers.declare(result, kind)
            live[constant] = result
        return _LiveConstants(tuple(nodes), {name: live[constant] for name, constant in readers.items()})

    def _groups(self) -> Iterator[_Group]:
        """The schedule cut into groups, views of views taken from their source."""
        key: tuple[str, int | None] | None = None
        nodes: list[Node] = []
        segments: list[int | None] = []
        view_source: dict[str, str] = {}
        runs: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for step in self._schedule.steps:
            if isinstance(step, Release):
                for name in step.tensors:
                    if name in nodes[-1].outputs:
                        nodes.append(self._reader(name))
                        segments.append(None)
                continue
            this = self._group_key(step)
            if key is not None and this != key and nodes:
                yield _Group(key[0], tuple(nodes), tuple(segments))
                nodes, segments = [], []
            key = this
            written = self._with_kernels(self._node(step, view_source, runs))
            nodes.extend(written)
            segments.extend([step.segment] * len(written))
        if key is not None and nodes:
            yield _Group(key[0], tuple(nodes), tuple(segments))

    def _group_key(self, step: Compute | Recompute) -> tuple[str, int | None]:
        if isinstance(step, Recompute):
            return ("recompute", step.segment)
        if self._updates is not None and step.operator.name in self._updates.nodes:
            return (UPDATE, step.chunk)
        return ("forward", None) if step.chunk is None else ("backward", step.chunk)

    def _with_kernels(self, node: Node) -> tuple[Node, ...]:
        """The node, or the two that a runtime without a kernel for it would put at the end of its order."""
        if node.op != "HardSwish" or node.domain:
            return (node,)
        gate = fresh_name(f"{node.outputs[0]}/gate", self._taken)
        self._barriers.types[gate] = self._type_of(node.outputs[0])
        slope = {**node.attributes, "alpha": 1 / 6, "beta": 0.5}
        inner = node.with_changes(
            op="HardSigmoid", outputs=(gate,), attributes=slope, name=f"{node.name}/gate"
        )
        return inner, node.with_changes(op="Mul", inputs=(node.inputs[0], gate), attributes={})

    def _reader(self, tensor: str) -> Node:
        """A node that reads what nobody else does: without a reader the runtime would never free it."""
        output = fresh_name(f"{tensor}/unread", self._taken)
        rank = len(self._type_of(tensor).shape)
        self._barriers.declare(output, TensorType(onnx.TensorProto.INT64, (rank,)))
        return Node("Shape", (tensor,), (output,), name=output)

    def _node(
        self,
        step: Compute | Recompute,
        view_source: dict[str, str],
        runs: Counter[tuple[str, tuple[str, ...]]],
    ) -> Node:
        original = self._step.nodes[step.source if isinstance(step, Recompute) else step.operator.name]
        names = iter(step.operator.inputs)
        inputs = tuple(next(names) if name else "" for name in original.inputs)
        attributes = dict(original.attributes)
        earlier_runs = runs[original.name, inputs]
        runs[original.name, inputs] += 1
        if earlier_runs:
            # It reads what an earlier run reads, so nothing else tells them apart. Others have none: on an
            # activation the runtime's fusions would hand on an attribute that they do not know.
            attributes["__recompute"] = earlier_runs
        if original.op == "Reshape" and not isinstance(step, Recompute) and step.chunk is not None:
            inputs = (view_source.get(inputs[0], inputs[0]), *inputs[1:])
            if step.operator.outputs[0] not in self._step.graph.outputs:
                view_source[step.operator.outputs[0]] = inputs[0]
        return original.with_changes(
            name=step.operator.name, inputs=inputs, outputs=step.operator.outputs, attributes=attributes
        )

    def _model(self, nodes: list[onnx.NodeProto], written: list[Node]) -> onnx.ModelProto:
        step, model = self._step, self._step.model
        fed = [*model.inputs, *model.targets]
        trained = [name for name in model.parameters if name in step.parameter_gradients]
        used = {name for node in written for name in reads_of(node)}
        running = [statistic.name for statistic in model.statistics if statistic.name in used]
        fed_weights = [*trained, *running]
        frozen = [name for name in model.weights if name in used and name not in set(fed_weights)]
        scale = TensorType(step.types[model.loss].dtype, ())
        seed = step.differentiated.seed
        inputs = [
            *(_value_info(name, step.types[name]) for name in (*fed, *fed_weights, *self._fed_to_updates())),
            _value_info(seed, scale),
            _value_info(self._zero, self._type_of(self._zero)),
        ]
        initializers = [
            numpy_helper.from_array(np.ones((), helper.tensor_dtype_to_np_dtype(scale.dtype)), seed),
            numpy_helper.from_array(np.zeros(1, np.int64), self._zero),
            *(
                numpy_helper.from_array(value, name)
                for name, value in (*step.constants.items(), *self._constants.values.items())
                if name in used
            ),
        ]
        outputs = step.graph.outputs
        graph = helper.make_graph(
            nodes,
            model.name or "training",
            inputs,
            [_value_info(name, step.types[name]) for name in outputs],
            initializers,
            value_info=self._value_infos(written, set(outputs)),
        )
        names = {
            **json.loads(model.metadata.get("onnxgc.names", "{}")),
            "loss_scale": seed,
            "barrier_zero": self._zero,
            "gradients": dict(step.parameter_gradients),
            "statistics": {statistic.name: statistic.updated for statistic in model.statistics},
            **self._names_of_updates(),
        }
        domains = sorted({node.domain for node in written} - {""})
        proto = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", model.opset),
                *(helper.make_opsetid(domain, model.domains.get(domain, 1)) for domain in domains),
            ],
            ir_version=model.ir_version,
            producer_name="onnxgc",
            producer_version=__version__,
        )
        for name in (*fed_weights, *frozen):
            # Straight into the model: every list on the way would copy all weights once more.
            self._write_weight(name, proto.graph.initializer.add())
        helper.set_model_props(
            proto,
            {
                **model.metadata,
                "onnxgc.version": __version__,
                "onnxgc.schema": str(SCHEMA_VERSION),
                "onnxgc.names": json.dumps(names),
                **self._metadata,
            },
        )
        return proto

    def _fed_to_updates(self) -> tuple[str, ...]:
        updates, draw = self._updates, filter(None, [self._step.model.draw])
        return (*draw,) if updates is None else (*updates.scalars.values(), *draw, *updates.state_names)

    def _names_of_updates(self) -> dict[str, Any]:
        """What the metadata says of an optimizer's inputs and outputs; nothing without one."""
        updates = self._updates
        if updates is None:
            return {}
        new_of = updates.new_of
        norm = {"gradient_norm": updates.norm} if updates.norm else {}
        return {
            "gradients": {},
            "parameters": {name: new_of[name] for name in updates.states if name in new_of},
            "states": {name: new_of[name] for name in updates.state_names},
            "states_of": {name: list(states) for name, states in updates.states.items()},
            **updates.scalars,
            **norm,
        }

    def _write_weight(self, name: str, target: onnx.TensorProto) -> None:
        value = self._values.get(name)
        write_weight(self._step.model.weights[name] if value is None else ArrayWeight(value), name, target)

    def _value_infos(self, written: list[Node], outputs: set[str]) -> list[onnx.ValueInfoProto]:
        """Types of all inner tensors, with names for first dimensions."""
        computed = [name for node in written for name in node.outputs if name]
        read = {name for node in written for name in reads_of(node)}
        types = {name: self._type_of(name) for name in read.union(computed)}
        first = dimension_names(
            written,
            types,
            outputs=outputs,
            numbered=self._barriers.vectors,
            peak_bytes=self._peak_bytes,
        )
        infos = []
        for name in computed:
            if name in outputs:
                continue
            shape: list[int | str] = list(types[name].shape)
            if name in first:
                shape[0] = first[name]
            infos.append(helper.make_tensor_value_info(name, types[name].dtype, shape))
        return infos


def _value_info(name: str, tensor_type: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor_type.dtype, tensor_type.shape)
