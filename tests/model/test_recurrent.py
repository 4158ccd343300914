"""LSTM, GRU and RNN: forward as ONNX Runtime's own operators, gradients as torch float64's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from onnxgc.api import optimize
from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.read import read_model
from tests.gradients.gradient_case import Case, Draw, case, errors
from tests.model.model_helpers import normal, run, run_read, text_model, with_weights

# Five steps are a chunk of three and one of two.
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
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
OPTIONAL = {"b": 3, "lengths": 4, "h0": 5, "c0": 6, "p": 7}


def by_definition(
    operator: str,
    values: Mapping[str, Tensor],
    *,
    direction: str = "forward",
    activations: list[str] | None = None,
    settings: list[tuple[float, ...]] | None = None,
    clip: float = 0.0,
    layout: int = 0,
    input_forget: int = 0,
    linear_before_reset: int = 0,
    lengths: list[int] | None = None,
) -> list[Tensor]:
    """Y, Y_h and for LSTM Y_c, by the equations of the ONNX specification."""
    x = values["x"].transpose(0, 1) if layout else values["x"]
    steps, batch, _ = x.shape
    hidden = values["r"].shape[-1]
    reverses = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    names = activations or _USUAL[operator] * len(reverses)
    given = settings or [()] * len(names)
    functions = [
        lambda t, f=_FUNCTIONS[name], s=setting: f(t, *s) for name, setting in zip(names, given, strict=True)
    ]
    each = len(functions) // len(reverses)
    reached = torch.tensor(lengths or [steps] * batch)

    def limited(t: Tensor) -> Tensor:
        return t.clamp(-clip, clip) if clip else t

    sequences, finals = [], []
    for d, is_reverse in enumerate(reverses):
        w, r = values["w"][d], values["r"][d]
        b = values["b"][d] if "b" in values else torch.zeros(2 * w.shape[0], dtype=w.dtype)
        wb, rb = b.split(w.shape[0])
        act = functions[d * each : (d + 1) * each]
        p = values["p"][d].split(hidden) if "p" in values else [torch.zeros(hidden, dtype=w.dtype)] * 3

        def initial(name: str, d: int = d) -> Tensor:
            if name not in values:
                return torch.zeros(batch, hidden, dtype=torch.float64)
            return values[name][:, d] if layout else values[name][d]

        state = [initial("h0"), initial("c0")]
        ys: list[Tensor] = [torch.empty(0)] * steps
        for t in reversed(range(steps)) if is_reverse else range(steps):
            h, c = state
            if operator == "RNN":
                new = [act[0](limited(x[t] @ w.T + h @ r.T + wb + rb)), c]
            elif operator == "GRU":
                wz, wr, wh = w.split(hidden)
                rz, rr, rh = r.split(hidden)
                wbz, wbr, wbh = wb.split(hidden)
                rbz, rbr, rbh = rb.split(hidden)
                z = act[0](limited(x[t] @ wz.T + h @ rz.T + wbz + rbz))
                s = act[0](limited(x[t] @ wr.T + h @ rr.T + wbr + rbr))
                inner = s * (h @ rh.T + rbh) if linear_before_reset else (s * h) @ rh.T + rbh
                n = act[1](limited(x[t] @ wh.T + inner + wbh))
                new = [(1 - z) * n + z * h, c]
            else:
                i, o, f, n = (x[t] @ w.T + h @ r.T + wb + rb).split(hidden, dim=1)
                i = act[0](limited(i + p[0] * c))
                f = 1 - i if input_forget else act[0](limited(f + p[2] * c))
                cell = f * c + i * act[1](limited(n))
                o = act[0](limited(o + p[1] * cell))
                new = [o * act[2](cell), cell]
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


def recurrent(
    operator: str,
    name: str,
    attributes: str = "",
    *,
    optional: tuple[str, ...] = ("b",),
    outputs: str = "y h c",
    opset: int = 18,
    lengths: Any = None,
    **settings: Any,
) -> Case:
    """A case of one operator; its loss is of all wanted outputs side by side."""
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
    texts = [f"hidden_size={HIDDEN}", *filter(None, [attributes])]
    texts += [f'{key}="{value}"' for key, value in settings.items() if isinstance(value, str)]
    texts += [f"{key}={value}" for key, value in settings.items() if isinstance(value, int | float)]
    names = settings.get("activations")
    if names:
        texts.append(f"activations=[{', '.join(f'{chr(34)}{item}{chr(34)}' for item in names)}]")
        for position, kind in enumerate(("alpha", "beta")):
            numbers = [s[position] for s in settings.get("settings", ()) if len(s) > position]
            if numbers:
                texts.append(f"activation_{kind}=[{', '.join(map(str, numbers))}]")
    body = f"{written} = {operator}<{', '.join(texts)}>({', '.join(i or chr(34) * 2 for i in inputs)})"
    body += " ".join(f" {part}_flat = Reshape({part}, flat)" for part in wanted)
    body += f" out = Concat<axis=0>({', '.join(f'{part}_flat' for part in wanted)})"

    def formula(values: Mapping[str, Tensor]) -> Tensor:
        found = dict(zip("yhc", by_definition(operator, values, lengths=lengths, **settings), strict=False))
        return torch.cat([found[part].reshape(-1) for part in wanted])

    constants: dict[str, Any] = {"flat": [-1]}
    if lengths is not None:
        constants["lengths"] = np.asarray(lengths, np.int32)
    return case(operator, name, body, outputs=("out",), opset=opset, formula=formula, **constants, **operands)


def _common(operator: str) -> list[Case]:
    states = ("b", "h0", "c0") if operator == "LSTM" else ("b", "h0")
    make = lambda name, **settings: recurrent(operator, name, **settings)  # noqa: E731
    return [
        make("plain"),
        make("without bias", optional=()),
        make("reverse", direction="reverse"),
        make("bidirectional", direction="bidirectional"),
        make("initial states", optional=states),
        make("bidirectional, initial states", optional=states, direction="bidirectional"),
        make("sequence alone", outputs="y"),
        make("last state alone", outputs="h"),
        make("clip", clip=0.7),
        make("lengths", lengths=[5, 2, 3], optional=states),
        make("lengths, short", lengths=[3, 1, 2]),
        make("lengths, reverse", lengths=[2, 5, 1], optional=states, direction="reverse"),
        make("lengths, bidirectional", lengths=[4, 2, 3], direction="bidirectional"),
        make("batch first", layout=1, optional=states),
        make("batch first, both", layout=1, optional=states, direction="bidirectional"),
        make("batch first, lengths", layout=1, lengths=[5, 2, 3]),
        *(make(f"opset {opset}", opset=opset) for opset in (9, 13, 14, 22)),
        make("opset 9, both", opset=9, optional=states, direction="bidirectional"),
    ]


_ACTIVATED = [
    ("Affine", (0.7, 0.1)),
    ("Elu", ()),
    ("Elu", (0.6,)),
    ("HardSigmoid", ()),
    ("HardSigmoid", (0.3, 0.4)),
    ("LeakyRelu", ()),
    ("LeakyRelu", (0.3,)),
    ("Relu", ()),
    ("ScaledTanh", (0.9, 0.6)),
    ("Sigmoid", ()),
    ("Softplus", ()),
    ("Softsign", ()),
    ("ThresholdedRelu", (0.2,)),
]
CASES = [
    *(entry for operator in GATES for entry in _common(operator)),
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
    recurrent("GRU", "linear before reset", linear_before_reset=1),
    recurrent("GRU", "linear before reset without bias", linear_before_reset=1, optional=()),
    recurrent("GRU", "linear before reset, both", linear_before_reset=1, direction="bidirectional"),
    recurrent("GRU", "linear before reset, clip", linear_before_reset=1, clip=0.6, optional=("b", "h0")),
    recurrent("LSTM", "peepholes", optional=("b", "p")),
    recurrent("LSTM", "peepholes, both", optional=("b", "p", "c0"), direction="bidirectional"),
    recurrent("LSTM", "peepholes, clip", optional=("b", "p", "c0"), clip=0.5),
    recurrent("LSTM", "coupled", input_forget=1),
    recurrent("LSTM", "coupled with peepholes", input_forget=1, optional=("b", "p", "c0")),
    recurrent(
        "LSTM",
        "activations",
        activations=["HardSigmoid", "Softsign", "Affine"],
        settings=[(0.3, 0.4), (), (0.8, 0.1)],
    ),
    recurrent("LSTM", "cell alone", outputs="c"),
]


def _ids(entry: Case) -> str:
    return str(entry)


@pytest.mark.parametrize("entry", CASES, ids=_ids)
def test_gradients_are_those_of_the_equations(entry: Case) -> None:
    wrong = {name: error for name, error in errors(entry).items() if not error <= entry.tolerance}
    assert wrong == {}


# ONNX Runtime's CPU kernels have no layout 1.
@pytest.mark.parametrize("entry", [entry for entry in CASES if "batch first" not in entry.name], ids=_ids)
def test_forward_is_that_of_the_operator(entry: Case) -> None:
    source = entry.model()
    model = read_model(source, loss="mse", trainable=list(entry.parameters))
    assert not any(node.op in GATES for node in model.nodes)
    (expected,) = run(source, entry.fed())
    feeds = {**entry.fed(), "target": np.zeros_like(expected)}
    (found,) = run_read(model, feeds, "out")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _reordered(weight: Tensor, order: str, wanted: str) -> Tensor:
    """The gates of a torch weight in ONNX's order."""
    parts = dict(zip(order, weight.chunk(len(order)), strict=True))
    return torch.cat([parts[gate] for gate in wanted])


# Order of gates in torch, and in ONNX.
_ORDERS = {"LSTM": ("ifgo", "iofg"), "GRU": ("rzn", "zrn"), "RNN": ("h", "h")}


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_gradients_are_those_of_torchs_modules(operator: str, direction: str) -> None:
    torch.manual_seed(0)
    both = direction == "bidirectional"
    module = getattr(nn, operator)(FEATURES, HIDDEN, bidirectional=both).double()
    ends = ["l0", "l0_reverse"] if both else ["l0"]
    here, there = _ORDERS[operator]

    def stacked(value: Callable[[str], Tensor], *kinds: str) -> Tensor:
        return torch.stack(
            [torch.cat([_reordered(value(f"{kind}_{end}"), here, there) for kind in kinds]) for end in ends]
        )

    def weight(name: str) -> Tensor:
        return getattr(module, name).detach()

    values = {
        "w": stacked(weight, "weight_ih"),
        "r": stacked(weight, "weight_hh"),
        "b": stacked(weight, "bias_ih", "bias_hh"),
    }
    extra = ", linear_before_reset=1" if operator == "GRU" else ""
    count = len(ends)
    body = f"""(float[{STEPS},{BATCH},{FEATURES}] x) => (float[{STEPS},{count},{BATCH},{HIDDEN}] y) {{
        y = {operator}<hidden_size={HIDDEN}, direction="{direction}"{extra}>(x, w, r, b) }}"""
    source = with_weights(text_model(body), **{name: value.numpy() for name, value in values.items()})
    graph = optimize(source, loss="mse").training_graph
    x = normal(STEPS, BATCH, FEATURES)
    target = np.zeros((STEPS, count, BATCH, HIDDEN), np.float32)
    found = run(graph.model, {"x": x, "target": target}, *graph.gradient_of.values())

    output, _ = module(torch.from_numpy(x).double())
    output.square().mean().backward()

    def gradient(name: str) -> Tensor:
        return getattr(module, name).grad

    expected = {
        "w": stacked(gradient, "weight_ih"),
        "r": stacked(gradient, "weight_hh"),
        "b": stacked(gradient, "bias_ih", "bias_hh"),
    }
    assert set(graph.gradient_of) == set(expected)
    for name, value in zip(graph.gradient_of, found, strict=True):
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_lengths_may_be_fed(operator: str, direction: str) -> None:
    count = 2 if direction == "bidirectional" else 1
    rows = GATES[operator] * HIDDEN
    inputs = f"float[{STEPS},{BATCH},{FEATURES}] x, int32[{BATCH}] lengths"
    body = f"""({inputs}) => (float[a,b] y) <int64[2] s = {{1, -1}}> {{
        q, h = {operator}<hidden_size={HIDDEN}, direction="{direction}">(x, w, r, "", lengths)
        u = Reshape(q, s)  v = Reshape(h, s)  y = Concat<axis=1>(u, v) }}"""
    weights = {"w": normal(count, rows, FEATURES), "r": normal(count, rows, HIDDEN)}
    source = with_weights(text_model(body), **weights)
    lengths, x = np.asarray([2, 5, 1], np.int32), normal(STEPS, BATCH, FEATURES)
    (expected,) = run(source, {"x": x, "lengths": lengths})
    graph = optimize(source, loss="mse", keep_outputs=True).training_graph
    target = np.zeros_like(expected)
    names = list(graph.gradient_of)
    feeds = {"x": x, "lengths": lengths, "target": target}
    found, *gradients = run(graph.model, feeds, "y", *graph.gradient_of.values())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    values = {
        "x": torch.from_numpy(x).double(),
        **{name: torch.from_numpy(value).double().requires_grad_() for name, value in weights.items()},
    }
    y, h, *_ = by_definition(operator, values, direction=direction, lengths=lengths.tolist())
    loss = torch.cat([y.reshape(-1), h.reshape(-1)]).square().mean()
    truth = dict(zip("wr", torch.autograd.grad(loss, [values["w"], values["r"]]), strict=True))
    for name, gradient in zip(names, gradients, strict=True):
        np.testing.assert_allclose(gradient, truth[name], rtol=1e-4, atol=1e-6)


_PLAIN = f"(float[{STEPS},{BATCH},{FEATURES}] x) => (float[a,b,c,d] y)"


def _plain(operator: str, attributes: str = "", inputs: str = "x, w, r", **shapes: tuple[int, ...]) -> Any:
    rows = GATES[operator] * HIDDEN
    given = {"w": (1, rows, FEATURES), "r": (1, rows, HIDDEN), **shapes}
    body = f"{_PLAIN} {{ [cell] y = {operator}<hidden_size={HIDDEN}{attributes}>({inputs}) }}"
    return with_weights(text_model(body), **{name: normal(*shape) for name, shape in given.items()})


def test_steps_have_readable_names() -> None:
    model = read_model(_plain("LSTM"), loss="mse")
    assert model.parameters == ("w", "r")
    assert {"cell/step0/gates", "cell/step3/c"} <= {node.name for node in model.nodes}
    assert {node.origin for node in model.nodes if node.name.startswith("cell/")} == {"cell"}


def test_initial_states_train_unless_they_are_zero() -> None:
    source = _plain("LSTM", inputs='x, w, r, "", "", h, c', h=(1, BATCH, HIDDEN), c=(1, BATCH, HIDDEN))
    assert set(read_model(source, loss="mse").parameters) == {"w", "r", "h", "c"}
    for tensor in source.graph.initializer:
        if tensor.name == "c":
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((1, BATCH, HIDDEN), np.float32), "c"))
    assert set(read_model(source, loss="mse").parameters) == {"w", "r", "h"}


@pytest.mark.parametrize(
    "operator, attributes, message",
    [
        (
            "RNN",
            ', activations=["Affine"]',
            "RNN 'cell' has the activation 'Affine' without activation_alpha",
        ),
        ("RNN", ', activations=["Swish"]', "RNN 'cell' has the activation 'Swish', which ONNX does not have"),
        ("LSTM", ', activations=["Tanh"]', "LSTM 'cell' has 1 activations, and needs 3"),
    ],
)
def test_settings_that_onnx_does_not_have_are_refused(operator: str, attributes: str, message: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        read_model(_plain(operator, attributes), loss="mse")


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"GRU 'cell' needs \[1, 15, 2\] as its input 1 \('w'\)"):
        read_model(_plain("GRU", w=(1, 10, FEATURES)), loss="mse")


def test_a_step_computes_its_own_part_of_the_input_again() -> None:
    # One product for all steps would have to be whole in every recomputation.
    model = read_model(_plain("GRU"), loss="mse")
    products = [node for node in model.nodes if node.op == "Gemm" and "x_zr" in node.outputs[0]]
    assert [model.types[node.outputs[0]].shape for node in products] == [(9, 2 * HIDDEN), (6, 2 * HIDDEN)]
