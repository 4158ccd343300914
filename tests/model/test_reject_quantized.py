"""Quantised models are an error; weights that are only stored as integers are not."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgc.api import optimize
from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.read import read_model
from tests.model.model_helpers import normal, text_model, with_weights

_SETTINGS = "float s = {0.1}, uint8 z = {0}, float t = {0.2}, int8 n = {0}"
_QDQ = f"""(float[2,3] x) => (float[2,5] y) <{_SETTINGS}> {{
    h = MatMul(x, w)
    [q1] a = QuantizeLinear(h, s, z)  b = DequantizeLinear(a, s, z)
    [q2] c = QuantizeLinear(v, t, n)  d = DequantizeLinear(c, t, n)
    y = MatMul(b, d) }}"""


def test_quantisation_after_parameters_is_an_error_that_counts_all_operators() -> None:
    source = with_weights(text_model(_QDQ), w=normal(3, 4), v=normal(4, 5))
    with pytest.raises(UnsupportedOperatorError, match=r"quantised.*2 QuantizeLinear \(first 'q1'\)"):
        read_model(source, loss="mse")


@pytest.mark.parametrize(
    "nodes, kinds",
    [
        (
            "p, q, r = DynamicQuantizeLinear(h)  m = MatMulInteger(p, i, r)  y = Cast<to=1>(m)",
            "1 DynamicQuantizeLinear .*, 1 MatMulInteger",
        ),
        (
            """a = QuantizeLinear(h, s, z)  m = QLinearMatMul(a, s, z, i, t, n, s, z)
            y = DequantizeLinear(m, s, z)""",
            "1 QLinearMatMul .*, 1 QuantizeLinear",
        ),
        ("m = com.microsoft.DynamicQuantizeMatMul(h, i, t)  y = Exp(m)", "1 com.microsoft::DynamicQuantizeMatMul"),
    ],
)
def test_integer_operators_are_an_error(nodes: str, kinds: str) -> None:
    body = f"(float[2,3] x) => (float[2,5] y) <{_SETTINGS}> {{ h = MatMul(x, w)  {nodes} }}"
    source = with_weights(text_model(body, domains=', "com.microsoft": 1'), w=normal(3, 4), i=np.ones((4, 5), np.int8))
    with pytest.raises(UnsupportedOperatorError, match=kinds):
        read_model(source, loss="mse")


def test_a_quantised_model_without_parameters_is_an_error() -> None:
    body = f"""(float[2,4] x) => (float[2,5] y) <{_SETTINGS}> {{
        a = QuantizeLinear(x, s, z)  m = QLinearMatMul(a, s, z, i, t, n, s, z)
        y = DequantizeLinear(m, s, z) }}"""
    with pytest.raises(UnsupportedOperatorError, match="the model is quantised"):
        read_model(with_weights(text_model(body), i=np.ones((4, 5), np.int8)), loss="mse")


def test_weights_stored_as_integers_stay_constant() -> None:
    body = f"""(float[2,4] x) => (float[2,3] y) <{_SETTINGS}> {{
        d = DequantizeLinear(i, t, n)  h = MatMul(x, d)  r = Relu(h)  y = MatMul(r, w) }}"""
    source = with_weights(text_model(body), i=np.ones((4, 5), np.int8), w=normal(5, 3))
    assert optimize(source, loss="mse").training_graph.gradient_of.keys() == {"w"}


def test_a_head_after_quantised_operators_trains() -> None:
    body = f"""(float[2,4] x) => (float[2,3] y) <{_SETTINGS}> {{
        a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  y = MatMul(b, w) }}"""
    source = with_weights(text_model(body), w=normal(4, 3))
    assert optimize(source, loss="mse").training_graph.gradient_of.keys() == {"w"}


def test_parameters_after_quantisation_train_if_those_before_are_frozen() -> None:
    source = with_weights(
        text_model(_QDQ.replace("(v, t, n)", "(x, t, n)").replace("y = MatMul(b, d)", "y = MatMul(b, v)")),
        w=normal(3, 4),
        v=normal(4, 5),
    )
    assert optimize(source, loss="mse", freeze=["w"]).training_graph.gradient_of.keys() == {"v"}


def test_quantising_a_parameter_in_the_graph_is_an_error() -> None:
    body = f"""(float[2,4] x) => (float[2,3] y) <{_SETTINGS}> {{
        h = MatMul(x, w)  [q] c = QuantizeLinear(v, t, n)  d = DequantizeLinear(c, t, n)
        y = MatMul(h, d) }}"""
    source = with_weights(text_model(body), w=normal(4, 4), v=normal(4, 3))
    with pytest.raises(UnsupportedOperatorError, match=r"1 QuantizeLinear \(first 'q'\)"):
        read_model(source, loss="mse")
    assert optimize(source, loss="mse", freeze=["v"]).training_graph.gradient_of.keys() == {"w"}
