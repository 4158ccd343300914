"""LSTM, GRU and RNN, unrolled step by step into standard operators.

The projection of the input is one product for a chunk of steps. A chunk has about the square root of all
steps: large enough to be fast, and small enough that recomputing some steps does not recompute the
projections of all, and that backward keeps the gradients of one chunk only. The weights stay the model's
own tensors, so each is one parameter that every step reads.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node
from onnxgc.model.opset.recurrent_builder import RecurrentBuilder
from onnxgc.model.opset.recurrent_cells import CELLS, State
from onnxgc.model.opset.recurrent_settings import GATES, Direction
from onnxgc.model.static_shapes.control_flow import check_unrolled

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
    writer, operators = GraphWriter(draft), 0
    for node in draft.nodes:
        if not _is_recurrent(node, draft):
            writer.nodes.append(node)
            continue
        builder = RecurrentBuilder(writer, node)
        steps, directions = builder.settings.steps, builder.settings.directions
        operators += steps * len(directions) * _MIN_STEP_NODES[node.op]
        check_unrolled(node, steps, operators)
        _Unrolling(builder).emit()
    return writer.result(derived=draft.derived | (writer.weights.keys() - draft.weights.keys()))


def _is_recurrent(node: Node, draft: Draft) -> bool:
    if node.domain or node.op not in GATES:
        return False
    kind = draft.type_of(node.inputs[0])
    return kind is not None and kind.element_count > 0


class _Unrolling:
    """The steps and results of one node; `RecurrentSettings` lists the shapes."""

    def __init__(self, builder: RecurrentBuilder) -> None:
        self._builder = builder
        self._node = builder.node
        self._settings = builder.settings
        lengths = builder.writer.draft.weights.get(builder.inputs[4])
        self._known_lengths = None if lengths is None else lengths.load()
        self._lengths = ""
        self._masks: dict[int, str] = {}

    def emit(self) -> None:
        settings, count = self._settings, len(self._settings.directions)
        steps, batch, hidden = settings.steps, settings.batch, settings.hidden
        outputs: dict[tuple[int, int], str] = {}
        finals = [self._emit_direction(direction, outputs) for direction in settings.directions]
        sequence = [outputs[time, index] for time in range(steps) for index in range(count)]
        if settings.is_batch_first:
            sequence_shape, state_shape = (batch, steps, count, hidden), (batch, count, hidden)
        else:
            sequence_shape, state_shape = (steps, count, batch, hidden), (count, batch, hidden)
        self._emit_output(0, sequence, "y", sequence_shape)
        for position, parts in enumerate(zip(*finals, strict=True), start=1):
            self._emit_output(position, parts, f"final_{'hc'[position - 1]}", state_shape)

    def _emit_direction(self, direction: Direction, outputs: dict[tuple[int, int], str]) -> State:
        """Emits all steps of a direction, records their outputs, and returns the final state."""
        step = CELLS[self._node.op](self._builder, direction)
        state = self._initial_state(direction)
        order = range(self._settings.steps)
        for time in reversed(order) if direction.is_reverse else order:
            if self._known_lengths is not None and not np.any(self._known_lengths > time):
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
        state, settings, builder = list[str](), self._settings, self._builder
        for kind, index in zip("hc", (5, 6) if self._node.op == "LSTM" else (5,), strict=False):
            if builder.inputs[index]:
                part = builder.part(index, direction, axis=1 if settings.is_batch_first else 0)
                wanted = f"{direction.prefix}/{kind}"
                state.append(builder.reshape(part, wanted, settings.batch, settings.hidden))
            else:
                state.append(self._zeros())
        return tuple(state)

    def _zeros(self) -> str:
        zeros = np.zeros((self._settings.batch, self._settings.hidden), self._builder.dtype)
        return self._builder.constant(f"{self._node.name}/zero_state", zeros)

    def _mask(self, time: int) -> str | None:
        """The samples that are long enough for this step, [B, 1]; None where all are."""
        name, builder = self._node.name, self._builder
        if not builder.inputs[4]:
            return None
        if self._known_lengths is not None:
            reached = np.asarray(self._known_lengths > time).reshape(-1, 1)
            return None if reached.all() else builder.constant(f"{name}/reached", reached)
        if not self._lengths:
            self._lengths = builder.reshape(builder.inputs[4], f"{name}/lengths", self._settings.batch, 1)
        if time not in self._masks:
            now = builder.constant(f"{name}/time", np.asarray(time, np.int32))
            self._masks[time] = builder.emit("Less", (now, self._lengths), f"{name}/step{time}/reached")
        return self._masks[time]

    def _emit_output(self, position: int, parts: Sequence[str], name: str, shape: tuple[int, ...]) -> None:
        """One output of the node: the concatenation of its parts [B, H], reshaped."""
        output = "".join(self._node.outputs[position : position + 1])
        if not output:
            return
        whole, builder = parts[0], self._builder
        if len(parts) > 1:
            axis = 1 if self._settings.is_batch_first else 0
            whole = builder.emit("Concat", parts, f"{self._node.name}/{name}", axis=axis)
        builder.add("Reshape", (whole, builder.ints(*shape)), (output,))
