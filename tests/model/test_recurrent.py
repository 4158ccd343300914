from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import numpy_helper

from onnxgc.api import optimize
from onnxgc.errors import ShapeError, UnsupportedOperatorError
from tests.gradients.gradient_case import Case, wrong
from tests.model.model_helpers import assert_same_output, model_of, normal, read, run
from tests.model.recurrent_cases import BATCH, CASES, FEATURES, GATES, HIDDEN, STEPS, by_definition


@pytest.mark.parametrize("solver", ["store-all", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_gradients_equal_those_of_the_equations(entry: Case, solver: str | None):
    assert wrong(replace(entry, solver=solver)) == {}


# ONNX Runtime's CPU kernels have no layout 1.
@pytest.mark.parametrize("entry", [entry for entry in CASES if "batch first" not in entry.name], ids=str)
def test_forward_equals_the_operator(entry: Case):
    source = entry.model()
    model = read(source, trainable=list(entry.parameters))
    assert not any(node.op in GATES for node in model.nodes)
    assert_same_output(source, model, entry.fed())


@pytest.mark.parametrize("operator", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow), "RNN"])
def test_lengths_may_be_an_input(operator: str):
    rows = GATES[operator] * HIDDEN
    inputs = f"float[{STEPS},{BATCH},{FEATURES}] x, int32[{BATCH}] lengths"
    body = f"""({inputs}) => (float[a,b] y) <int64[2] s = {{1, -1}}> {{
        q, h = {operator}<hidden_size={HIDDEN}, direction="bidirectional">(x, w, r, "", lengths)
        u = Reshape(q, s)  v = Reshape(h, s)  y = Concat<axis=1>(u, v) }}"""
    weights = {"w": normal(2, rows, FEATURES), "r": normal(2, rows, HIDDEN)}
    source = model_of(body, **weights)
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
    y, h, *_ = by_definition(operator, values, direction="bidirectional", lengths=lengths.tolist())
    loss = torch.cat([y.reshape(-1), h.reshape(-1)]).square().mean()
    truth = dict(zip("wr", torch.autograd.grad(loss, [values["w"], values["r"]]), strict=True))
    for name, gradient in zip(names, gradients, strict=True):
        np.testing.assert_allclose(gradient, truth[name], rtol=1e-4, atol=1e-6)


_PLAIN = f"(float[{STEPS},{BATCH},{FEATURES}] x) => (float[a,b,c,d] y)"


def _plain(operator: str, attributes: str = "", inputs: str = "x, w, r", **shapes: tuple[int, ...]) -> Any:
    rows = GATES[operator] * HIDDEN
    given = {"w": (1, rows, FEATURES), "r": (1, rows, HIDDEN), **shapes}
    body = f"{_PLAIN} {{ [cell] y = {operator}<hidden_size={HIDDEN}{attributes}>({inputs}) }}"
    return model_of(body, **given)


def test_steps_have_readable_names():
    model = read(_plain("LSTM"))
    assert model.parameters == ("w", "r")
    assert {"cell/step0/gates", "cell/step3/c"} <= {node.name for node in model.nodes}
    assert {node.origin for node in model.nodes if node.name.startswith("cell/")} == {"cell"}


def test_initial_states_train_unless_they_are_zero():
    source = _plain("LSTM", inputs='x, w, r, "", "", h, c', h=(1, BATCH, HIDDEN), c=(1, BATCH, HIDDEN))
    assert set(read(source).parameters) == {"w", "r", "h", "c"}
    for tensor in source.graph.initializer:
        if tensor.name == "c":
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((1, BATCH, HIDDEN), np.float32), "c"))
    assert set(read(source).parameters) == {"w", "r", "h"}


@pytest.mark.parametrize(
    "operator, attributes, message",
    [
        ("RNN", ', activations=["Affine"]', "RNN 'cell' has the activation 'Affine' without activation_alpha"),
        ("RNN", ', activations=["Swish"]', "RNN 'cell' has the activation 'Swish', which ONNX does not define"),
        ("LSTM", ', activations=["Tanh"]', "LSTM 'cell' has 1 activations but needs 3"),
    ],
)
def test_settings_that_onnx_does_not_define_are_refused(operator: str, attributes: str, message: str):
    with pytest.raises(UnsupportedOperatorError, match=message):
        read(_plain(operator, attributes))


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"GRU 'cell' needs \[1, 15, 2\] as its input 1 \('w'\)"):
        read(_plain("GRU", w=(1, 10, FEATURES)))


def test_the_projection_of_the_input_is_split_into_chunks():
    # A single product for all steps would be recomputed as a whole with every step.
    model = read(_plain("GRU"))
    products = [node for node in model.nodes if node.op == "Gemm" and "x_zr" in node.outputs[0]]
    assert [model.types[node.outputs[0]].shape for node in products] == [(9, 2 * HIDDEN), (6, 2 * HIDDEN)]
