import re

import numpy as np
import pytest

from onnxgc.api import optimize
from onnxgc.errors import UnsupportedOperatorError
from tests.model.model_helpers import model_of, normal, read, text_model, with_weights

_SETTINGS = "float s = {0.1}, uint8 z = {0}, float t = {0.2}, int8 n = {0}"
_WEIGHTS = {"i": np.ones((4, 4), np.int8), "v": normal(4, 4), "w": normal(4, 4, seed=1)}
_QDQ = f"""(float[2,3] x) => (float[2,5] y) <{_SETTINGS}> {{
    h = MatMul(x, w)
    [q1] a = QuantizeLinear(h, s, z)  b = DequantizeLinear(a, s, z)
    [q2] c = QuantizeLinear(v, t, n)  d = DequantizeLinear(c, t, n)
    y = MatMul(b, d) }}"""


def test_quantisation_after_parameters_is_an_error_that_counts_all_operators():
    source = model_of(_QDQ, w=(3, 4), v=(4, 5))
    with pytest.raises(UnsupportedOperatorError, match=r"quantised.*2 QuantizeLinear \(first 'q1'\)"):
        read(source)


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
def test_integer_operators_are_an_error(nodes: str, kinds: str):
    body = f"(float[2,3] x) => (float[2,5] y) <{_SETTINGS}> {{ h = MatMul(x, w)  {nodes} }}"
    source = model_of(body, domains=', "com.microsoft": 1', w=(3, 4), i=np.ones((4, 5), np.int8))
    with pytest.raises(UnsupportedOperatorError, match=kinds):
        read(source)


_HEAD = "a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)"


@pytest.mark.parametrize(
    "nodes, freeze, trained",
    [
        ("d = DequantizeLinear(i, t, n)  h = MatMul(x, d)  y = MatMul(h, w)", [], {"w"}),
        (f"{_HEAD}  y = MatMul(b, w)", [], {"w"}),
        (f"h = MatMul(x, v)  {_HEAD.replace('(x', '(h')}  y = MatMul(b, w)", ["v"], {"w"}),
        (
            "h = MatMul(x, w) [q] c = QuantizeLinear(v, t, n) d = DequantizeLinear(c, t, n) y = MatMul(h, d)",
            ["v"],
            {"w"},
        ),
    ],
)
def test_parameters_behind_quantised_operators_train(nodes: str, freeze: list[str], trained: set[str]):
    """Also if weights are stored as integers."""
    source = with_weights(
        text_model(f"(float[2,4] x) => (float[2,4] y) <{_SETTINGS}> {{ {nodes} }}"),
        **{name: value for name, value in _WEIGHTS.items() if re.search(rf"\b{name}[,)]", nodes)},
    )
    assert optimize(source, loss="mse", freeze=freeze).training_graph.gradient_of.keys() == trained
    if freeze:
        with pytest.raises(UnsupportedOperatorError, match="1 QuantizeLinear"):
            read(source)


def test_a_quantised_model_without_parameters_is_an_error():
    nodes = "a = QuantizeLinear(x, s, z)  m = QLinearMatMul(a, s, z, i, t, n, s, z)  y = DequantizeLinear(m, s, z)"
    source = model_of(f"(float[2,4] x) => (float[2,4] y) <{_SETTINGS}> {{ {nodes} }}", i=_WEIGHTS["i"])
    with pytest.raises(UnsupportedOperatorError, match="the model is quantised"):
        read(source)
