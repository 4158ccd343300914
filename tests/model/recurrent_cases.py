"""Cases of LSTM, GRU and RNN: pairs of settings and activations, with the equations in torch as reference."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.gradients.gradient_case import Case, Draw, case

# Five steps make a chunk of three and a chunk of two.
STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 2, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "Affine": lambda x, a, b: a * x + b,
    "Elu": lambda x, a=1.0: torch.where(x > 0, x, a * torch.expm1(x)),
    "HardSigmoid": lambda x, a=0.2, b=0.5: torch.clamp(a * x + b, 0, 1),
    "LeakyRelu": lambda x, a=0.01: torch.where(x > 0, x, a * x),
    "Relu": torch.relu,
    "ScaledTanh": lambda x, a, b: a * torch.tanh(b * x),
    "Sigmoid": torch.sigmoid,
    "Softplus": nn.functional.softplus,
    "Softsign": nn.functional.softsign,
    "Tanh": torch.tanh,
    "ThresholdedRelu": lambda x, a: torch.where(x > a, x, torch.zeros_like(x)),
}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
OPTIONAL = {"b": 3, "lengths": 4, "h0": 5, "c0": 6, "p": 7}


def by_definition(
    operator: str,
    values: Mapping[str, Tensor],
    *,
    direction: str = "forward",
    activations: list[str] | None = None,
    settings: list[tuple[float, ...]] | None = None,
    layout: int = 0,
    lengths: list[int] | None = None,
    **options: float,
) -> list[Tensor]:
    """Y, Y_h and for LSTM Y_c, by the equations of the ONNX specification.

    `options` are clip, input_forget and linear_before_reset.
    """
    x = values["x"].transpose(0, 1) if layout else values["x"]
    steps, batch, _ = x.shape
    hidden = values["r"].shape[-1]
    reverses = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    names = activations or _DEFAULTS[operator] * len(reverses)
    given = settings or [()] * len(names)
    functions = [lambda t, f=_FUNCTIONS[name], s=setting: f(t, *s) for name, setting in zip(names, given, strict=True)]
    each = len(functions) // len(reverses)
    reached = torch.tensor(lengths or [steps] * batch)
    sequences, finals = [], []
    for d, is_reverse in enumerate(reverses):

        def initial(name: str, d: int = d) -> Tensor:
            if name not in values:
                return torch.zeros(batch, hidden, dtype=torch.float64)
            return values[name][:, d] if layout else values[name][d]

        own = {key: values[key][d] for key in ("w", "r", "b", "p") if key in values}
        step = _STEPS[operator](own, functions[d * each : (d + 1) * each], **options)
        state = [initial("h0"), initial("c0")]
        ys: list[Tensor] = [torch.empty(0)] * steps
        for t in reversed(range(steps)) if is_reverse else range(steps):
            new = step(x[t], *state)
            mask = (reached > t)[:, None]
            state = [torch.where(mask, a, b) for a, b in zip(new, state, strict=True)]
            ys[t] = torch.where(mask, new[0], torch.zeros_like(new[0]))
        sequences.append(torch.stack(ys))
        finals.append(state)
    y = torch.stack(sequences, dim=1)
    states = [torch.stack(list(parts)) for parts in zip(*finals, strict=True)]
    if layout:
        y, states = y.permute(2, 0, 1, 3), [s.transpose(0, 1) for s in states]
    return [y, *states] if operator == "LSTM" else [y, states[0]]


Step = Callable[[Tensor, Tensor, Tensor], list[Tensor]]
Functions = Sequence[Callable[[Tensor], Tensor]]


def _clipped(t: Tensor, clip: float) -> Tensor:
    return t.clamp(-clip, clip) if clip else t


def _biases(v: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    rows, dtype = v["w"].shape[0], v["w"].dtype
    return (v["b"] if "b" in v else torch.zeros(2 * rows, dtype=dtype)).split(rows)


def _rnn_step(v: Mapping[str, Tensor], act: Functions, *, clip: float = 0.0) -> Step:
    wb, rb = _biases(v)

    def step(x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        return [act[0](_clipped(x @ v["w"].T + h @ v["r"].T + wb + rb, clip)), c]

    return step


def _gru_step(v: Mapping[str, Tensor], act: Functions, *, clip: float = 0.0, linear_before_reset: float = 0) -> Step:
    hidden = v["r"].shape[-1]
    (wz, wr, wh), (rz, rr, rh) = v["w"].split(hidden), v["r"].split(hidden)
    (wbz, wbr, wbh), (rbz, rbr, rbh) = (part.split(hidden) for part in _biases(v))

    def step(x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        z = act[0](_clipped(x @ wz.T + h @ rz.T + wbz + rbz, clip))
        s = act[0](_clipped(x @ wr.T + h @ rr.T + wbr + rbr, clip))
        inner = s * (h @ rh.T + rbh) if linear_before_reset else (s * h) @ rh.T + rbh
        n = act[1](_clipped(x @ wh.T + inner + wbh, clip))
        return [(1 - z) * n + z * h, c]

    return step


def _lstm_step(v: Mapping[str, Tensor], act: Functions, *, clip: float = 0.0, input_forget: float = 0) -> Step:
    hidden = v["r"].shape[-1]
    wb, rb = _biases(v)
    p = v["p"].split(hidden) if "p" in v else [torch.zeros(hidden, dtype=v["w"].dtype)] * 3

    def step(x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        i, o, f, n = (x @ v["w"].T + h @ v["r"].T + wb + rb).split(hidden, dim=1)
        i = act[0](_clipped(i + p[0] * c, clip))
        f = 1 - i if input_forget else act[0](_clipped(f + p[2] * c, clip))
        cell = f * c + i * act[1](_clipped(n, clip))
        o = act[0](_clipped(o + p[1] * cell, clip))
        return [o * act[2](cell), cell]

    return step


_STEPS: Mapping[str, Callable[..., Step]] = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}


def recurrent(
    operator: str,
    name: str,
    *,
    optional: tuple[str, ...] = ("b",),
    outputs: str = "y h c",
    opset: int = 18,
    lengths: Any = None,
    **settings: Any,
) -> Case:
    count = 2 if settings.get("direction") == "bidirectional" else 1
    rows = GATES[operator] * HIDDEN
    batch_first = settings.get("layout", 0)
    state = Draw((BATCH, count, HIDDEN) if batch_first else (count, BATCH, HIDDEN))
    drawn = {
        "x": Draw((BATCH, STEPS, FEATURES) if batch_first else (STEPS, BATCH, FEATURES)),
        "w": Draw((count, rows, FEATURES)),
        "r": Draw((count, rows, HIDDEN)),
        "b": Draw((count, 2 * rows)),
        "h0": state,
        "c0": state,
        "p": Draw((count, 3 * HIDDEN)),
    }
    operands = {key: draw for key, draw in drawn.items() if key in ("x", "w", "r") or key in optional}
    inputs = ["x", "w", "r", "", "", "", "", ""]
    for key in optional:
        inputs[OPTIONAL[key]] = key
    if lengths is not None:
        inputs[4] = "lengths"
    while not inputs[-1]:
        inputs.pop()
    wanted = [part for part in outputs.split() if part != "c" or operator == "LSTM"]
    every = ("y", "h", "c")[: 3 if operator == "LSTM" else 2]
    written = ", ".join(part if part in wanted else '""' for part in every).rstrip('", ')
    attributes = ", ".join(_attribute_texts(settings))
    body = f"{written} = {operator}<{attributes}>({', '.join(i or chr(34) * 2 for i in inputs)})"
    body += " ".join(f" {part}_flat = Reshape({part}, flat)" for part in wanted)
    body += f" out = Concat<axis=0>({', '.join(f'{part}_flat' for part in wanted)})"

    def formula(values: Mapping[str, Tensor]) -> Tensor:
        found = dict(zip("yhc", by_definition(operator, values, lengths=lengths, **settings), strict=False))
        return torch.cat([found[part].reshape(-1) for part in wanted])

    constants: dict[str, Any] = {"flat": [-1]}
    if lengths is not None:
        constants["lengths"] = np.asarray(lengths, np.int32)
    return case(operator, name, body, outputs=("out",), opset=opset, formula=formula, **constants, **operands)


def _attribute_texts(settings: Mapping[str, Any]) -> list[str]:
    texts = [f"hidden_size={HIDDEN}"]
    texts += [f'{key}="{value}"' for key, value in settings.items() if isinstance(value, str)]
    texts += [f"{key}={value}" for key, value in settings.items() if isinstance(value, int | float)]
    names = settings.get("activations")
    if names:
        texts.append(f"activations=[{', '.join(f'{chr(34)}{item}{chr(34)}' for item in names)}]")
        for position, kind in enumerate(("alpha", "beta")):
            numbers = [s[position] for s in settings.get("settings", ()) if len(s) > position]
            if numbers:
                texts.append(f"activation_{kind}=[{', '.join(map(str, numbers))}]")
    return texts


LENGTHS: Mapping[str, list[int] | None] = {"whole": None, "padded": [5, 2, 3], "short": [3, 1, 2]}
_SETTINGS: Mapping[str, Sequence[Any]] = {
    "direction": ("forward", "reverse", "bidirectional"),
    "clip": (0, 0.7),
    "lengths": tuple(LENGTHS),
    "bias": (0, 1),
    "states": (0, 1),
    "outputs": ("y", "h", "y h"),
    "opset": (18, 22, 9),
}
_COLUMNS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "RNN": _SETTINGS,
    "GRU": {**_SETTINGS, "linear_before_reset": (0, 1)},
    "LSTM": {**_SETTINGS, "outputs": ("y", "h", "c", "y h c"), "peepholes": (0, 1), "input_forget": (0, 1)},
}


def _rows_of_all_pairs(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two columns occurs."""

    def pairs(row: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
        return set(map(frozenset, combinations(row.items(), 2)))

    missing = {
        frozenset(((a, x), (b, y))): None for a, b in combinations(columns, 2) for x in columns[a] for y in columns[b]
    }
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for name in columns:
            if name not in row:
                row[name] = max(columns[name], key=lambda x: len(pairs({**row, name: x}) & missing.keys()))
        rows.append(row)
        for pair in pairs(row):
            missing.pop(pair, None)
    return rows


def _rows_of_all_values(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    count = max(map(len, columns.values()))
    return [{name: values[number % len(values)] for name, values in columns.items()} for number in range(count)]


def _row_case(operator: str, row: Mapping[str, Any], layout: int = 0) -> Case:
    settings = dict(row)
    name = ", ".join(f"{key} {value}" for key, value in settings.items() if value)
    states = ("h0", "c0") if operator == "LSTM" else ("h0",)
    optional = [key for key, is_given in (("b", settings.pop("bias")), ("p", settings.pop("peepholes", 0))) if is_given]
    optional += states if settings.pop("states") else ()
    lengths = LENGTHS[settings.pop("lengths")]
    given = {key: value for key, value in settings.items() if value}
    if layout:
        name, given["layout"] = f"batch first, {name}", layout
    return recurrent(operator, name, optional=tuple(optional), lengths=lengths, **given)


_ACTIVATED: Sequence[tuple[str, tuple[float, ...]]] = [
    *((name, ()) for name in ("Elu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Softsign")),
    *(("Affine", (0.7, 0.1)), ("Elu", (0.6,)), ("HardSigmoid", (0.3, 0.4)), ("LeakyRelu", (0.3,))),
    *(("ScaledTanh", (0.9, 0.6)), ("ThresholdedRelu", (0.2,))),
]
CASES = [
    *(_row_case(operator, row) for operator in GATES for row in _rows_of_all_pairs(_COLUMNS[operator])),
    # Layout 1 exists from opset 14 on.
    *(
        _row_case(operator, row, layout=1)
        for operator in GATES
        for row in _rows_of_all_values({**_COLUMNS[operator], "opset": (18, 22)})
    ),
    *(
        recurrent("RNN", f"activation {name} {setting}", activations=[name], settings=[setting])
        for name, setting in _ACTIVATED
    ),
    recurrent(
        "GRU",
        "activations of both directions",
        direction="bidirectional",
        activations=["HardSigmoid", "Softsign", "Sigmoid", "ScaledTanh"],
        settings=[(0.3, 0.4), (), (), (0.8, 0.7)],
    ),
    recurrent(
        "LSTM", "activations", activations=["HardSigmoid", "Softsign", "Affine"], settings=[(0.3, 0.4), (), (0.8, 0.1)]
    ),
]
