"""LSTM, GRU and RNN, unrolled step by step into standard operators.

The projection of the input is one product for a chunk of steps. A chunk has about the square root of all
steps: large enough to be fast, and small enough that recomputing some steps does not recompute the
projections of all, and that backward keeps the gradients of one chunk only. The weights stay the model's
own tensors, so each is one parameter that every step reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Node
from onnxgc.model.opset.recurrent_builder import RecurrentBuilder, UnrolledGraph
from onnxgc.model.opset.recurrent_cells import CELLS, State
from onnxgc.model.opset.recurrent_settings import GATES, Direction, RecurrentSettings
from onnxgc.model.static_shapes.unroll_limit import UnrollLimit

# The least number of operators in one step.
_MIN_STEP_NODES: Mapping[str, int] = {"LSTM": 11, "GRU": 11, "RNN": 2}


def with_unrolled_recurrence(draft: Draft) -> Draft:
    """The draft with LSTM, GRU and RNN unrolled; the types of the new tensors are not yet inferred.

    Raises:
        ShapeError: weights do not fit each other or the input.
        UnsupportedOperatorError: an unknown activation, or too many steps.
    """
    if not any(_is_recurrent(node, draft) for node in draft.nodes):
        return draft
    graph, limit = UnrolledGraph(draft), UnrollLimit()
    for node in draft.nodes:
        if _is_recurrent(node, draft):
            _Unrolling(graph, node).emit(limit)
        else:
            graph.nodes.append(node)
    return draft.with_changes(
        nodes=tuple(graph.nodes),
        weights={**draft.weights, **graph.constants},
        derived=draft.derived | graph.constants.keys(),
    )


def _is_recurrent(node: Node, draft: Draft) -> bool:
    if node.domain or node.op not in GATES:
        return False
    kind = draft.type_of(node.inputs[0])
    return kind is not None and kind.element_count > 0


class _Unrolling:
    """The steps and results of one node; `RecurrentSettings` lists the shapes."""

    def __init__(self, graph: UnrolledGraph, node: Node) -> None:
        self._graph = graph
        self._node = node
        self._settings = RecurrentSettings.of_node(node, graph.draft)
        self._builder = RecurrentBuilder(graph, node, self._settings)
        self._lengths: str | None = None
        self._masks: dict[int, str] = {}

    def emit(self, limit: UnrollLimit) -> None:
        settings = self._settings
        count = settings.steps * len(settings.directions)
        limit.add(self._node, settings.steps, count * _MIN_STEP_NODES[self._node.op])
        outputs: dict[tuple[int, int], str] = {}
        finals = [self._emit_direction(direction, outputs) for direction in settings.directions]
        self._emit_sequence(outputs)
        for position, parts in enumerate(zip(*finals, strict=True), start=1):
            self._emit_final_state(position, parts)

    def _emit_direction(self, direction: Direction, outputs: dict[tuple[int, int], str]) -> State:
        """Emits all steps of a direction, records their outputs, and returns the final state."""
        step = CELLS[self._node.op](self._builder, direction)
        state = self._initial_state(direction)
        order = range(self._settings.steps)
        for time in reversed(order) if direction.is_reverse else order:
            if not self._is_reached(time):
                outputs[time, direction.index] = self._zeros()
                continue
            before = state
            state = step(time, before)
            outputs[time, direction.index] = state[0]
            mask = self._mask(time)
            if mask is not None:
                at, builder = f"{direction.prefix}/step{time}", self._builder
                zero = builder.number(f"{self._node.name}/nothing", 0.0)
                outputs[time, direction.index] = builder.emit("Where", (mask, state[0], zero), f"{at}/y")
                state = tuple(
                    builder.emit("Where", (mask, new, old), f"{at}/{kind}_kept")
                    for kind, new, old in zip("hc", state, before, strict=False)
                )
        return state

    def _initial_state(self, direction: Direction) -> State:
        state, settings, builder = [], self._settings, self._builder
        for kind, index in zip("hc", (5, 6) if self._node.op == "LSTM" else (5,), strict=False):
            if builder.has_input(index):
                part = builder.part(index, direction, axis=1 if settings.is_batch_first else 0)
                state.append(
                    builder.reshape(part, f"{direction.prefix}/{kind}", settings.batch, settings.hidden)
                )
            else:
                state.append(self._zeros())
        return tuple(state)

    def _zeros(self) -> str:
        zeros = np.zeros((self._settings.batch, self._settings.hidden), self._builder.dtype)
        return self._graph.constant(f"{self._node.name}/zero_state", zeros)

    def _is_reached(self, time: int) -> bool:
        """Whether any sample is long enough for this step."""
        if not self._builder.has_input(4):
            return True
        lengths = self._graph.draft.weights.get(self._node.inputs[4])
        return lengths is None or bool(np.any(lengths.load() > time))

    def _mask(self, time: int) -> str | None:
        """The samples that are long enough for this step, [B, 1]; None where all are."""
        name = self._node.name
        if not self._builder.has_input(4):
            return None
        lengths = self._graph.draft.weights.get(self._node.inputs[4])
        if lengths is not None:
            reached = np.asarray(lengths.load() > time).reshape(-1, 1)
            return None if reached.all() else self._graph.constant(f"{name}/reached", reached)
        if self._lengths is None:
            self._lengths = self._builder.reshape(
                self._node.inputs[4], f"{name}/lengths", self._settings.batch, 1
            )
        if time not in self._masks:
            now = self._graph.constant(f"{name}/time", np.asarray(time, np.int32))
            self._masks[time] = self._builder.emit("Less", (now, self._lengths), f"{name}/step{time}/reached")
        return self._masks[time]

    def _emit_sequence(self, outputs: Mapping[tuple[int, int], str]) -> None:
        """Y as the concatenation of its parts [B, H], reshaped."""
        if not self._node.outputs[0]:
            return
        settings, count = self._settings, len(self._settings.directions)
        parts = [outputs[time, index] for time in range(settings.steps) for index in range(count)]
        if settings.is_batch_first:
            shape = (settings.batch, settings.steps, count, settings.hidden)
        else:
            shape = (settings.steps, count, settings.batch, settings.hidden)
        self._emit_output(0, parts, f"{self._node.name}/y", shape)

    def _emit_final_state(self, position: int, parts: Sequence[str]) -> None:
        if position >= len(self._node.outputs) or not self._node.outputs[position]:
            return
        settings, count = self._settings, len(parts)
        if settings.is_batch_first:
            shape = (settings.batch, count, settings.hidden)
        else:
            shape = (count, settings.batch, settings.hidden)
        self._emit_output(position, parts, f"{self._node.name}/final_{'hc'[position - 1]}", shape)

    def _emit_output(self, position: int, parts: Sequence[str], name: str, shape: tuple[int, ...]) -> None:
        axis = 1 if self._settings.is_batch_first else 0
        whole = self._builder.emit("Concat", parts, name, axis=axis) if len(parts) > 1 else parts[0]
        sizes = self._builder.ints(*shape)
        self._graph.add(self._node, "Reshape", (whole, sizes), (self._node.outputs[position],), {})
