"""One step of an RNN, GRU or LSTM, by the equations of its ONNX specification.

Each cell function emits the parts that all steps share, and returns a function from a time and a state to
the next state. The first tensor of a state is the hidden state H: [B, H], the second of an LSTM the cell
state C: [B, H].
Source: ONNX operator specifications RNN-14, GRU-14, LSTM-14.
"""

from collections.abc import Callable, Mapping

from onnxgc.model.opset.recurrent_builder import RecurrentBuilder
from onnxgc.model.opset.recurrent_settings import Direction

State = tuple[str, ...]
Step = Callable[[int, State], State]


def _rnn(b: RecurrentBuilder, direction: Direction) -> Step:
    """H' = f(X W^T + H R^T + Wb + Rb)."""
    hidden = b.settings.hidden
    weight = b.weight(1, direction, "w", hidden, b.settings.features)
    recurrent = b.weight(2, direction, "r", hidden, hidden)
    inputs = b.projected(direction, "x_w", weight, b.summed_bias(direction), hidden)

    def step(time: int, state: State) -> State:
        at = f"{direction.prefix}/step{time}"
        total = b.emit("Gemm", (state[0], recurrent, inputs(time)), f"{at}/sum", transB=1)
        return (b.activated(direction.activations[0], b.clipped(total, f"{at}/clipped"), f"{at}/h"),)

    return step


def _gru(b: RecurrentBuilder, direction: Direction) -> Step:
    """z, r = f(X Wzr^T + H Rzr^T + bzr), H' = (1 - z) n + z H.

    n = g(X Wh^T + (r H) Rh^T + Wbh + Rbh), or with linear_before_reset
    n = g(X Wh^T + r (H Rh^T + Rbh) + Wbh).
    """
    hidden, both = b.settings.hidden, 2 * b.settings.hidden
    name = direction.prefix
    resets_after = bool(b.node.attribute("linear_before_reset", 0))
    weight = b.weight(1, direction, "w", 3 * hidden, b.settings.features)
    weight_zr, weight_h = b.split(weight, (f"{name}/w_zr", f"{name}/w_h"), (both, hidden), 0)
    recurrent = b.weight(2, direction, "r", 3 * hidden, hidden)
    recurrent_zr, recurrent_h = b.split(recurrent, (f"{name}/r_zr", f"{name}/r_h"), (both, hidden), 0)
    bias_zr = bias_h = bias_reset = None
    if b.inputs[3]:
        bias = b.weight(3, direction, "b", 6 * hidden)
        wanted = [f"{name}/{part}" for part in ("wb_zr", "wb_h", "rb_zr", "rb_h")]
        of_zr, bias_h, also_zr, bias_reset = b.split(bias, wanted, (both, hidden, both, hidden), 0)
        bias_zr = b.emit("Add", (of_zr, also_zr), f"{name}/b_zr")
        if not resets_after:
            bias_h = b.emit("Add", (bias_h, bias_reset), f"{name}/b_h")
    inputs_zr = b.projected(direction, "x_zr", weight_zr, bias_zr, both)
    inputs_h = b.projected(direction, "x_h", weight_h, bias_h, hidden)
    f, g = direction.activations

    def candidate_sum(at: str, time: int, before: str, reset: str) -> str:
        """The argument of g."""
        if not resets_after:
            kept = b.emit("Mul", (reset, before), f"{at}/reset")
            return b.emit("Gemm", (kept, recurrent_h, inputs_h(time)), f"{at}/sum", transB=1)
        operands = (before, recurrent_h) if bias_reset is None else (before, recurrent_h, bias_reset)
        linear = b.emit("Gemm", operands, f"{at}/linear", transB=1)
        return b.emit("Add", (b.emit("Mul", (reset, linear), f"{at}/reset"), inputs_h(time)), f"{at}/sum")

    def step(time: int, state: State) -> State:
        at = f"{name}/step{time}"
        before = state[0]
        gates = b.emit("Gemm", (before, recurrent_zr, inputs_zr(time)), f"{at}/gates", transB=1)
        gates = b.clipped(gates, f"{at}/gates_clipped")
        update, reset = b.split(gates, (f"{at}/z_sum", f"{at}/r_sum"), (hidden, hidden), 1)
        update, reset = b.activated(f, update, f"{at}/z"), b.activated(f, reset, f"{at}/r")
        total = candidate_sum(at, time, before, reset)
        new = b.activated(g, b.clipped(total, f"{at}/clipped"), f"{at}/n")
        difference = b.emit("Sub", (before, new), f"{at}/difference")
        return (b.emit("Add", (new, b.emit("Mul", (update, difference), f"{at}/moved")), f"{at}/h"),)

    return step


def _lstm(b: RecurrentBuilder, direction: Direction) -> Step:
    """i, f = f(... + P C), n = g(...), C' = f C + i n, o = f(... + Po C'), H' = o h(C').

    The gates' sums are X W^T + H R^T + Wb + Rb, in the order i, o, f, n. With input_forget f = 1 - i.
    """
    hidden, name = b.settings.hidden, direction.prefix
    weight = b.weight(1, direction, "w", 4 * hidden, b.settings.features)
    recurrent = b.weight(2, direction, "r", 4 * hidden, hidden)
    inputs = b.projected(direction, "x_w", weight, b.summed_bias(direction), 4 * hidden)
    peepholes: State = ()
    if b.inputs[7]:
        flat = b.weight(7, direction, "p", 3 * hidden)
        peepholes = b.split(flat, [f"{name}/p_{gate}" for gate in "iof"], [hidden] * 3, 0)
    is_coupled = bool(b.node.attribute("input_forget", 0))
    f, g, h = direction.activations

    def gate_of(at: str, gate: str, total: str, cell: str, position: int) -> str:
        """A gate by its sum, to which a peephole adds the cell state."""
        if peepholes:
            looked = b.emit("Mul", (cell, peepholes[position]), f"{at}/{gate}_peep")
            total = b.emit("Add", (total, looked), f"{at}/{gate}_seen")
            total = b.clipped(total, f"{at}/{gate}_clipped")
        return b.activated(f, total, f"{at}/{gate}")

    def step(time: int, state: State) -> State:
        at = f"{name}/step{time}"
        before, cell = state
        gates = b.emit("Gemm", (before, recurrent, inputs(time)), f"{at}/gates", transB=1)
        if not peepholes:
            gates = b.clipped(gates, f"{at}/gates_clipped")
        wanted = [f"{at}/{gate}_sum" for gate in "iofn"]
        sum_i, sum_o, sum_f, sum_n = b.split(gates, wanted, [hidden] * 4, 1)
        if peepholes:
            sum_n = b.clipped(sum_n, f"{at}/n_clipped")
        gate_i = gate_of(at, "i", sum_i, cell, 0)
        if is_coupled:
            gate_f = b.emit("Sub", (b.number(f"{b.node.name}/one", 1.0), gate_i), f"{at}/f")
        else:
            gate_f = gate_of(at, "f", sum_f, cell, 2)
        new = b.activated(g, sum_n, f"{at}/n")
        kept = b.emit("Mul", (gate_f, cell), f"{at}/kept")
        cell = b.emit("Add", (kept, b.emit("Mul", (gate_i, new), f"{at}/added")), f"{at}/c")
        gate_o = gate_of(at, "o", sum_o, cell, 1)
        shown = b.activated(h, cell, f"{at}/shown")
        return (b.emit("Mul", (gate_o, shown), f"{at}/h"), cell)

    return step


CELLS: Mapping[str, Callable[[RecurrentBuilder, Direction], Step]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
