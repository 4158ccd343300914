"""LSTM, GRU and RNN as standard operators, one step after the other.

What steps do with the input is one product for as many steps as is the root of their number: large
enough to be fast, and small enough that recomputing some steps does not compute the products of all,
nor has backward to hold the gradients of all. The weights stay the model's own tensors, so that each is
one parameter however many steps read it.
Source: ONNX operator specifications RNN-14, GRU-14, LSTM-14.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper

from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.stored_weights import ArrayWeight
from onnxgc.model.static_shapes.unroll_limit import UnrollLimit

_GATES: Mapping[str, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}
# Rows of a product below which more of them take little longer.
_LEAST_ROWS = 8
# Operators that one step comes to, at least.
_STEP_NODES: Mapping[str, int] = {"LSTM": 11, "GRU": 11, "RNN": 2}
_DEFAULT_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
# Which of alpha and beta each function takes, with its default; None must be given.
_PLAIN: tuple[()] = ()
_ACTIVATIONS: Mapping[str, tuple[str, tuple[float | None, ...]]] = {
    "affine": ("Affine", (None, None)),
    "elu": ("Elu", (1.0,)),
    "hardsigmoid": ("HardSigmoid", (0.2, 0.5)),
    "leakyrelu": ("LeakyRelu", (0.01,)),
    "relu": ("Relu", _PLAIN),
    "scaledtanh": ("ScaledTanh", (None, None)),
    "sigmoid": ("Sigmoid", _PLAIN),
    "softplus": ("Softplus", _PLAIN),
    "softsign": ("Softsign", _PLAIN),
    "tanh": ("Tanh", _PLAIN),
    "thresholdedrelu": ("ThresholdedRelu", (None,)),
}


def with_unrolled_recurrence(draft: Draft) -> Draft:
    """The draft without LSTM, GRU and RNN; the types of what takes their place are not known yet.

    Raises:
        ShapeError: weights do not fit each other or the input.
        UnsupportedOperatorError: an unknown activation, or too many steps.
    """
    if not any(_is_recurrent(node, draft) for node in draft.nodes):
        return draft
    graph = _Graph(draft)
    for node in draft.nodes:
        if _is_recurrent(node, draft):
            _Recurrence(graph, node).lower()
        else:
            graph.nodes.append(node)
    return draft.with_changes(
        nodes=tuple(graph.nodes),
        weights={**draft.weights, **graph.constants},
        derived=draft.derived | graph.constants.keys(),
    )


def _is_recurrent(node: Node, draft: Draft) -> bool:
    if node.domain or node.op not in _GATES:
        return False
    kind = draft.type_of(node.inputs[0])
    return kind is not None and kind.element_count > 0


@dataclass(slots=True)
class _Graph:
    """The nodes of the new draft, and the constants that they read."""

    draft: Draft
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, ArrayWeight] = field(default_factory=dict)
    budget: UnrollLimit = field(default_factory=UnrollLimit)
    tensors: NameSource = field(init=False)
    node_names: NameSource = field(init=False)
    shared: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = NameSource(self.draft.tensor_names())
        self.node_names = NameSource(node.name for node in self.draft.nodes)

    def constant(self, wanted: str, value: Array) -> str:
        key = (str(value.dtype), value.shape, value.tobytes())
        if key not in self.shared:
            self.shared[key] = self.tensors.fresh(wanted)
            self.constants[self.shared[key]] = ArrayWeight(value)
        return self.shared[key]

    def add(
        self, source: Node, op: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]
    ) -> None:
        name = self.node_names.fresh(outputs[0])
        self.nodes.append(
            Node(
                op,
                tuple(inputs),
                tuple(outputs),
                attributes,
                name=name,
                origin=source.origin,
                module=source.module,
                rule=op,
            )
        )


@dataclass(frozen=True, slots=True)
class _Activation:
    """One of ONNX's activation functions with its settings, alpha before beta."""

    function: str
    settings: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Direction:
    """What is particular to one direction: its index in the weights, its names and its functions."""

    index: int
    is_reverse: bool
    prefix: str
    activations: tuple[_Activation, ...]


class _Recurrence:
    """The lowering of one node.

    X: [T, B, I], W: [D, G H, I], R: [D, G H, H], B: [D, 2 G H], states: [D, B, H], Y: [T, D, B, H]; with
    layout 1 X: [B, T, I], states: [B, D, H], Y: [B, T, D, H].
    """

    def __init__(self, graph: _Graph, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.gates = _GATES[node.op]
        self.is_batch_first = bool(node.attribute("layout", 0))
        source, recurrent = self._type(0), self._type(2)
        self.dtype = helper.tensor_dtype_to_np_dtype(source.dtype)
        self.hidden = recurrent.shape[-1]
        first, second, self.features = source.shape
        self.batch, self.steps = (first, second) if self.is_batch_first else (second, first)
        self.directions = self._directions()
        self.clip = float(node.attribute("clip", 0.0))
        self.chunk = max(math.isqrt(self.steps - 1) + 1, -(-_LEAST_ROWS // self.batch))
        self._chunks: dict[int, str] = {}
        self._rows: dict[int, str] = {}
        self._parts: dict[tuple[int, int], tuple[str, ...]] = {}
        self._lengths: str | None = None
        self._masks: dict[int, str] = {}
        self._check_shapes()

    def lower(self) -> None:
        node, count = self.node, self.steps * len(self.directions)
        self.graph.budget.take(node, self.steps, count * _STEP_NODES[node.op])
        outputs: dict[tuple[int, int], str] = {}
        finals: list[tuple[str, ...]] = []
        for direction in self.directions:
            step = _STEPS[node.op](self, direction)
            state = self._initial_state(direction)
            order = range(self.steps)
            for time in reversed(order) if direction.is_reverse else order:
                if not self._is_reached(time):
                    outputs[time, direction.index] = self._zeros()
                    continue
                before = state
                state = step(time, before)
                outputs[time, direction.index] = state[0]
                mask = self._mask(time)
                if mask is not None:
                    at = f"{direction.prefix}/step{time}"
                    nothing = self.number(f"{node.name}/nothing", 0.0)
                    outputs[time, direction.index] = self.emit("Where", (mask, state[0], nothing), f"{at}/y")
                    state = tuple(
                        self.emit("Where", (mask, new, old), f"{at}/{kind}_kept")
                        for kind, new, old in zip("hc", state, before, strict=False)
                    )
            finals.append(state)
        self._give_sequence(outputs)
        for position, parts in enumerate(zip(*finals, strict=True), start=1):
            self._give_state(position, parts)

    # -- what a step may ask ------------------------------------------------------------------

    def emit(self, op: str, inputs: Sequence[str], wanted: str, **attributes: Any) -> str:
        return self.emit_many(op, inputs, (wanted,), **attributes)[0]

    def emit_many(
        self, op: str, inputs: Sequence[str], wanted: Sequence[str], **attributes: Any
    ) -> tuple[str, ...]:
        outputs = tuple(self.graph.tensors.fresh(name) for name in wanted)
        self.graph.add(self.node, op, inputs, outputs, attributes)
        return outputs

    def number(self, wanted: str, value: float) -> str:
        return self.graph.constant(wanted, np.asarray(value, self.dtype))

    def ints(self, *values: int) -> str:
        return self.graph.constant(f"{self.node.name}/sizes", np.asarray(values, np.int64))

    def split(self, tensor: str, wanted: Sequence[str], sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        if len(sizes) == 1:
            return (tensor,)
        return self.emit_many("Split", (tensor, self.ints(*sizes)), wanted, axis=axis)

    def reshape(self, tensor: str, wanted: str, *shape: int) -> str:
        return self.emit("Reshape", (tensor, self.ints(*shape)), wanted)

    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def weight(self, index: int, direction: _Direction, name: str, *shape: int) -> str:
        """One direction's part of input `index`, in the given shape."""
        part = self._part(index, direction, axis=0)
        return self.reshape(part, f"{direction.prefix}/{name}", *shape)

    def projected(
        self, direction: _Direction, name: str, weight: str, bias: str | None, rows: int
    ) -> Callable[[int], str]:
        """X W^T + b of each step, [B, rows]: one product for a chunk of steps, when the first asks for it."""
        found: dict[int, str] = {}

        def of_step(time: int) -> str:
            if time not in found:
                start = time - time % self.chunk
                steps = range(start, min(start + self.chunk, self.steps))
                operands = (self._chunk_of_x(start), weight, *([bias] if bias is not None else []))
                product = self.emit("Gemm", operands, f"{direction.prefix}/step{start}/{name}", transB=1)
                wanted = [f"{direction.prefix}/step{step}/{name}" for step in steps]
                axis, size = 0, self.batch
                if self.is_batch_first and len(steps) > 1:
                    axis, size = 1, rows
                    product = self.reshape(product, f"{product}_wide", self.batch, len(steps) * rows)
                found.update(zip(steps, self.split(product, wanted, [size] * len(steps), axis), strict=True))
            return found[time]

        return of_step

    def _chunk_of_x(self, start: int) -> str:
        """The input of a chunk of steps, all samples and steps as rows."""
        if not self._chunks:
            starts = range(0, self.steps, self.chunk)
            sizes = [min(self.chunk, self.steps - first) for first in starts]
            wanted = [f"{self.node.name}/x{first}" for first in starts]
            parts = self.split(self.node.inputs[0], wanted, sizes, 1 if self.is_batch_first else 0)
            self._chunks = dict(zip(starts, parts, strict=True))
        if start not in self._rows:
            count = min(self.chunk, self.steps - start) * self.batch
            self._rows[start] = self.reshape(
                self._chunks[start], f"{self.node.name}/x{start}_rows", count, self.features
            )
        return self._rows[start]

    def clipped(self, tensor: str, wanted: str) -> str:
        if not self.clip:
            return tensor
        low = self.number(f"{self.node.name}/low", -self.clip)
        high = self.number(f"{self.node.name}/high", self.clip)
        return self.emit("Clip", (tensor, low, high), wanted)

    def activated(self, activation: _Activation, tensor: str, wanted: str) -> str:
        function, settings = activation.function, activation.settings
        if function == "Affine":
            scaled = self._scaled(tensor, settings[0], wanted)
            return self.emit("Add", (scaled, self.number(f"{wanted}_shift", settings[1])), wanted)
        if function == "ScaledTanh":
            inner = self._scaled(tensor, settings[1], wanted)
            return self._scaled(self.emit("Tanh", (inner,), wanted), settings[0], wanted)
        named = dict(zip(("alpha", "beta"), settings, strict=False))
        return self.emit(function, (tensor,), wanted, **named)

    # -- the ends -----------------------------------------------------------------------------

    def _scaled(self, tensor: str, factor: float, wanted: str) -> str:
        return self.emit("Mul", (tensor, self.number(f"{wanted}_factor", factor)), f"{wanted}_scaled")

    def _part(self, index: int, direction: _Direction, axis: int) -> str:
        tensor = self.node.inputs[index]
        if len(self.directions) == 1:
            return tensor
        key = (index, axis)
        if key not in self._parts:
            wanted = [f"{each.prefix}/input{index}" for each in self.directions]
            self._parts[key] = self.split(tensor, wanted, [1] * len(wanted), axis)
        return self._parts[key][direction.index]

    def _initial_state(self, direction: _Direction) -> tuple[str, ...]:
        state = []
        for kind, index in zip("hc", (5, 6) if self.node.op == "LSTM" else (5,), strict=False):
            if self.has(index):
                part = self._part(index, direction, axis=1 if self.is_batch_first else 0)
                state.append(self.reshape(part, f"{direction.prefix}/{kind}", self.batch, self.hidden))
            else:
                state.append(self._zeros())
        return tuple(state)

    def _zeros(self) -> str:
        zeros = np.zeros((self.batch, self.hidden), self.dtype)
        return self.graph.constant(f"{self.node.name}/zero_state", zeros)

    def _is_reached(self, time: int) -> bool:
        lengths = self.graph.draft.weights.get(self.node.inputs[4]) if self.has(4) else None
        return lengths is None or bool(np.any(lengths.load() > time))

    def _mask(self, time: int) -> str | None:
        """Which samples reach this step, [B, 1]; None where all do."""
        if not self.has(4):
            return None
        lengths = self.graph.draft.weights.get(self.node.inputs[4])
        if lengths is not None:
            reached = np.asarray(lengths.load() > time).reshape(-1, 1)
            return None if reached.all() else self.graph.constant(f"{self.node.name}/reached", reached)
        if self._lengths is None:
            self._lengths = self.reshape(self.node.inputs[4], f"{self.node.name}/lengths", self.batch, 1)
        if time not in self._masks:
            now = self.graph.constant(f"{self.node.name}/time", np.asarray(time, np.int32))
            self._masks[time] = self.emit(
                "Less", (now, self._lengths), f"{self.node.name}/step{time}/reached"
            )
        return self._masks[time]

    def _give_sequence(self, outputs: Mapping[tuple[int, int], str]) -> None:
        """Y from its parts [B, H]: all of them side by side are Y already, up to the shape."""
        if not self.node.outputs[0]:
            return
        count = len(self.directions)
        parts = [outputs[time, index] for time in range(self.steps) for index in range(count)]
        axis = 1 if self.is_batch_first else 0
        whole = self.emit("Concat", parts, f"{self.node.name}/y", axis=axis) if len(parts) > 1 else parts[0]
        shape = (
            (self.batch, self.steps, count, self.hidden)
            if self.is_batch_first
            else (self.steps, count, self.batch, self.hidden)
        )
        self._give(0, whole, shape)

    def _give_state(self, position: int, parts: Sequence[str]) -> None:
        if position >= len(self.node.outputs) or not self.node.outputs[position]:
            return
        axis = 1 if self.is_batch_first else 0
        name = f"{self.node.name}/final_{'hc'[position - 1]}"
        whole = self.emit("Concat", parts, name, axis=axis) if len(parts) > 1 else parts[0]
        count = len(parts)
        shape = (self.batch, count, self.hidden) if self.is_batch_first else (count, self.batch, self.hidden)
        self._give(position, whole, shape)

    def _give(self, position: int, tensor: str, shape: tuple[int, ...]) -> None:
        output = self.node.outputs[position]
        self.graph.add(self.node, "Reshape", (tensor, self.ints(*shape)), (output,), {})

    # -- settings -----------------------------------------------------------------------------

    def _type(self, index: int) -> TensorType:
        kind = self.graph.draft.type_of(self.node.inputs[index])
        if kind is None:
            name = self.node.inputs[index]
            raise ShapeError(self.graph.draft.problems.get(name, f"tensor '{name}' has no static shape"))
        return kind

    def _directions(self) -> tuple[_Direction, ...]:
        name, kind = self.node.name, str(self.node.attribute("direction", "forward"))
        if kind == "bidirectional":
            names = [(f"{name}/forward", False), (f"{name}/reverse", True)]
        else:
            names = [(name, kind == "reverse")]
        activations = self._activations(len(names))
        each = len(activations) // len(names)
        return tuple(
            _Direction(index, is_reverse, prefix, activations[index * each : (index + 1) * each])
            for index, (prefix, is_reverse) in enumerate(names)
        )

    def _activations(self, directions: int) -> tuple[_Activation, ...]:
        """The functions of all directions; alphas and betas go to those that take one, in turn."""
        usual = _DEFAULT_ACTIVATIONS[self.node.op] * directions
        functions = self.node.attribute("activations") or usual
        if len(functions) != len(usual):
            raise UnsupportedOperatorError(
                f"{self._where} has {len(functions)} activations, and needs {len(usual)}; "
                "export it with as many"
            )
        given = [iter(self.node.attribute(f"activation_{kind}") or ()) for kind in ("alpha", "beta")]
        found: list[_Activation] = []
        for function in functions:
            if function.lower() not in _ACTIVATIONS:
                raise UnsupportedOperatorError(
                    f"{self._where} has the activation '{function}', which ONNX does not have; "
                    f"export the model with one of {', '.join(sorted(_ACTIVATIONS))}"
                )
            name, defaults = _ACTIVATIONS[function.lower()]
            settings = [next(values, default) for values, default in zip(given, defaults, strict=False)]
            numbers = tuple(float(setting) for setting in settings if setting is not None)
            if len(numbers) < len(settings):
                raise UnsupportedOperatorError(
                    f"{self._where} has the activation '{function}' without activation_alpha or "
                    "activation_beta, and ONNX has no default for it; export the model with both"
                )
            found.append(_Activation(name, numbers))
        return tuple(found)

    @property
    def _where(self) -> str:
        return self.node.place

    def _check_shapes(self) -> None:
        count, rows, hidden = len(self.directions), self.gates * self.hidden, self.hidden
        state = (self.batch, count, hidden) if self.is_batch_first else (count, self.batch, hidden)
        wanted = {
            1: (count, rows, self.features),
            2: (count, rows, hidden),
            3: (count, 2 * rows),
            4: (self.batch,),
            5: state,
            6: state,
            7: (count, 3 * hidden),
        }
        for index, shape in wanted.items():
            if self.has(index) and self._type(index).shape != shape:
                raise ShapeError(
                    f"{self._where} needs {list(shape)} as its input {index} ('{self.node.inputs[index]}'), "
                    f"which is {list(self._type(index).shape)}; check the model and --input-shapes"
                )


State = tuple[str, ...]
_Step = Callable[[int, State], State]


def _rnn(r: _Recurrence, direction: _Direction) -> _Step:
    """H' = f(X W^T + H R^T + Wb + Rb)."""
    weight = r.weight(1, direction, "w", r.hidden, r.features)
    recurrent = r.weight(2, direction, "r", r.hidden, r.hidden)
    inputs = r.projected(direction, "x_w", weight, _summed_bias(r, direction), r.hidden)

    def step(time: int, state: State) -> State:
        at = f"{direction.prefix}/step{time}"
        total = r.emit("Gemm", (state[0], recurrent, inputs(time)), f"{at}/sum", transB=1)
        return (r.activated(direction.activations[0], r.clipped(total, f"{at}/clipped"), f"{at}/h"),)

    return step


def _gru(r: _Recurrence, direction: _Direction) -> _Step:
    """z, r = f(X Wzr^T + H Rzr^T + bzr), H' = (1 - z) n + z H.

    n = g(X Wh^T + (r H) Rh^T + Wbh + Rbh), or with linear_before_reset
    n = g(X Wh^T + r (H Rh^T + Rbh) + Wbh).
    """
    hidden, both = r.hidden, 2 * r.hidden
    name = direction.prefix
    resets_after = bool(r.node.attribute("linear_before_reset", 0))
    weight = r.weight(1, direction, "w", 3 * hidden, r.features)
    weight_zr, weight_h = r.split(weight, (f"{name}/w_zr", f"{name}/w_h"), (both, hidden), 0)
    recurrent = r.weight(2, direction, "r", 3 * hidden, hidden)
    recurrent_zr, recurrent_h = r.split(recurrent, (f"{name}/r_zr", f"{name}/r_h"), (both, hidden), 0)
    bias_zr = bias_h = bias_reset = None
    if r.has(3):
        bias = r.weight(3, direction, "b", 6 * hidden)
        wanted = [f"{name}/{part}" for part in ("wb_zr", "wb_h", "rb_zr", "rb_h")]
        of_zr, bias_h, also_zr, bias_reset = r.split(bias, wanted, (both, hidden, both, hidden), 0)
        bias_zr = r.emit("Add", (of_zr, also_zr), f"{name}/b_zr")
        if not resets_after:
            bias_h = r.emit("Add", (bias_h, bias_reset), f"{name}/b_h")
    inputs_zr = r.projected(direction, "x_zr", weight_zr, bias_zr, both)
    inputs_h = r.projected(direction, "x_h", weight_h, bias_h, hidden)
    f, g = direction.activations

    def step(time: int, state: State) -> State:
        at = f"{name}/step{time}"
        before = state[0]
        gates = r.emit("Gemm", (before, recurrent_zr, inputs_zr(time)), f"{at}/gates", transB=1)
        gates = r.clipped(gates, f"{at}/gates_clipped")
        update, reset = r.split(gates, (f"{at}/z_sum", f"{at}/r_sum"), (hidden, hidden), 1)
        update, reset = r.activated(f, update, f"{at}/z"), r.activated(f, reset, f"{at}/r")
        if resets_after:
            operands = (before, recurrent_h) if bias_reset is None else (before, recurrent_h, bias_reset)
            linear = r.emit("Gemm", operands, f"{at}/linear", transB=1)
            total = r.emit(
                "Add", (r.emit("Mul", (reset, linear), f"{at}/reset"), inputs_h(time)), f"{at}/sum"
            )
        else:
            kept = r.emit("Mul", (reset, before), f"{at}/reset")
            total = r.emit("Gemm", (kept, recurrent_h, inputs_h(time)), f"{at}/sum", transB=1)
        new = r.activated(g, r.clipped(total, f"{at}/clipped"), f"{at}/n")
        difference = r.emit("Sub", (before, new), f"{at}/difference")
        return (r.emit("Add", (new, r.emit("Mul", (update, difference), f"{at}/moved")), f"{at}/h"),)

    return step


def _lstm(r: _Recurrence, direction: _Direction) -> _Step:
    """i, f = f(... + P C), n = g(...), C' = f C + i n, o = f(... + Po C'), H' = o h(C').

    The gates' sums are X W^T + H R^T + Wb + Rb, in the order i, o, f, n. With input_forget f = 1 - i.
    """
    hidden, name = r.hidden, direction.prefix
    weight = r.weight(1, direction, "w", 4 * hidden, r.features)
    recurrent = r.weight(2, direction, "r", 4 * hidden, hidden)
    inputs = r.projected(direction, "x_w", weight, _summed_bias(r, direction), 4 * hidden)
    peepholes: State = ()
    if r.has(7):
        flat = r.weight(7, direction, "p", 3 * hidden)
        peepholes = r.split(flat, [f"{name}/p_{gate}" for gate in "iof"], [hidden] * 3, 0)
    is_coupled = bool(r.node.attribute("input_forget", 0))
    f, g, h = direction.activations

    def seen(at: str, gate: str, total: str, cell: str, position: int) -> str:
        """A gate's sum, which sees the cell where there are peepholes."""
        if peepholes:
            looked = r.emit("Mul", (cell, peepholes[position]), f"{at}/{gate}_peep")
            total = r.emit("Add", (total, looked), f"{at}/{gate}_seen")
            total = r.clipped(total, f"{at}/{gate}_clipped")
        return r.activated(f, total, f"{at}/{gate}")

    def step(time: int, state: State) -> State:
        at = f"{name}/step{time}"
        before, cell = state
        gates = r.emit("Gemm", (before, recurrent, inputs(time)), f"{at}/gates", transB=1)
        if not peepholes:
            gates = r.clipped(gates, f"{at}/gates_clipped")
        wanted = [f"{at}/{gate}_sum" for gate in "iofn"]
        sum_i, sum_o, sum_f, sum_n = r.split(gates, wanted, [hidden] * 4, 1)
        if peepholes:
            sum_n = r.clipped(sum_n, f"{at}/n_clipped")
        gate_i = seen(at, "i", sum_i, cell, 0)
        if is_coupled:
            gate_f = r.emit("Sub", (r.number(f"{r.node.name}/one", 1.0), gate_i), f"{at}/f")
        else:
            gate_f = seen(at, "f", sum_f, cell, 2)
        new = r.activated(g, sum_n, f"{at}/n")
        kept = r.emit("Mul", (gate_f, cell), f"{at}/kept")
        cell = r.emit("Add", (kept, r.emit("Mul", (gate_i, new), f"{at}/added")), f"{at}/c")
        gate_o = seen(at, "o", sum_o, cell, 1)
        shown = r.activated(h, cell, f"{at}/shown")
        return (r.emit("Mul", (gate_o, shown), f"{at}/h"), cell)

    return step


def _summed_bias(r: _Recurrence, direction: _Direction) -> str | None:
    """Wb + Rb of an LSTM or RNN, where only their sum matters."""
    if not r.has(3):
        return None
    both = r.weight(3, direction, "b", 2, r.gates * r.hidden)
    return r.emit("ReduceSum", (both, r.ints(0)), f"{direction.prefix}/wb_rb", keepdims=0)


_STEPS: Mapping[str, Callable[[_Recurrence, _Direction], _Step]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
