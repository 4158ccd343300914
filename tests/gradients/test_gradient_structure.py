import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxgc.api import optimize
from onnxgc.errors import NoParametersError, UnsupportedOperatorError
from onnxgc.gradients import registry
from onnxgc.gradients.registry import RULES, STOPS, differentiate
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from tests.gradients.gradient_case import Case, case, emitted, normal, outcome, wrong

NETWORKS = (
    case("network", "parameter used twice", "u = MatMul(x, w) v = Tanh(u) y = MatMul(v, w)", x=(3, 4), w=(4, 4)),
    case("network", "parameter used three times by one", "y = Sum(w, x, w, w)", x=(3, 4), w=(4,)),
    case(
        "network",
        "three consumers",
        "u = Mul(x, w) a = Exp(u) b = Tanh(u) c = Mul(u, v) d = Mul(a, b) y = Add(c, d)",
        x=(3, 4),
        w=(4,),
        v=(3, 4),
    ),
    # One operator adds to the gradients of both its operands.
    case(
        "network",
        "two tensors read by the same two operators",
        "a = Mul(x, w) b = Tanh(x) c = Add(a, b) d = Mul(a, b) e = Div(c, s) y = Sub(d, e)",
        x=(3, 4),
        w=(4,),
        s=normal(3, 4, mean=5.0),
    ),
    # All three parameters have the gradient of the sum, and each needs a separate output.
    case("network", "two biases with one gradient", "u = Add(x, b) y = Add(u, c)", x=(3, 4), b=(3, 4), c=(3, 4)),
    case(
        "network",
        "a chain of views",
        "u = Reshape(x, s) v = Flatten(u) w = Transpose(v) y = Exp(w)",
        x=(2, 6),
        s=[3, 2, 2],
    ),
    case(
        "network",
        "a view of a parameter",
        "t = Transpose(w) r = Reshape(t, s) u = MatMul(x, r) y = Add(u, w)",
        x=(4, 4),
        w=(4, 4),
        s=[4, 4],
    ),
)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_gradients_of_networks(network: Case):
    assert wrong(network) == {}


def test_equal_gradients_are_separate_outputs():
    (network,) = [network for network in NETWORKS if network.name == "two biases with one gradient"]
    _, graph = emitted(network)
    names = list(graph.gradient_of.values())
    assert len(set(names)) == 3
    assert set(names) < {value.name for value in graph.model.graph.output}
    gradients = outcome(network).gradients
    assert np.array_equal(gradients["b"], gradients["c"])


def test_gradients_are_named_after_their_tensor_and_nodes_are_unique():
    for network in NETWORKS:
        _, graph = emitted(network)
        assert graph.gradient_of == {name: f"{name}_grad" for name in network.parameters}
        names = [node.name for node in graph.model.graph.node]
        assert len(set(names)) == len(names)


def _model(body: str, outputs: tuple[str, ...] = ("y",), **weights: Any) -> onnx.ModelProto:
    """A model on x [4, 3]."""
    graph = helper.make_graph(
        list(parser.parse_graph(f"body () => () {{ {body} }}").node),
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 3))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    for node in graph.node:
        node.name = f"/net/{node.output[0]}"
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])


def _weight(*shape: int) -> Array:
    return normal(*shape).value("structure")


_NORM: dict[str, Any] = {"s": _weight(3), "b": _weight(3), "m": _weight(3), "q": _weight(3) ** 2}
_DEEP = "u = MatMul(x, v) h = Relu(u) k = MatMul(h, w) y = Tanh(k)"


def test_gradients_pass_a_frozen_parameter_and_end_before_the_first_one():
    source = _model(_DEEP, v=_weight(3, 5), w=_weight(5, 2))
    model = read_model(source, loss="mse", freeze=["v"])
    step = differentiate(model)
    assert set(step.gradient_of) & {"v", "u", "h", "x"} == set()
    assert "w" in step.gradient_of
    sources = {chunk.source for chunk in step.chunks}
    assert not any(node.name in sources for node in model.nodes if set(node.outputs) & {"u", "h"})
    found = differentiate(read_model(source, loss="mse", freeze=["w"])).gradient_of
    assert "w" not in found
    assert {"v", "u", "h", "k"} <= set(found)


def test_inputs_and_statistics_have_no_gradient():
    body = "n = BatchNormalization(x, s, b, m, q) y = MatMul(n, w)"
    result = optimize(_model(body, **_NORM, w=_weight(3, 2)), loss="mse")
    assert set(result.training_graph.gradient_of) == {"s", "b", "w"}


@pytest.fixture
def fewer_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: rule for name, rule in RULES.items() if name not in ("Acosh", "Asinh")}
    monkeypatch.setattr(registry, "RULES", kept)


@pytest.mark.usefixtures("fewer_rules")
def test_one_error_names_all_operators_without_a_rule():
    body = "a = Mul(x, w) b = Asinh(a) c = Acosh(b) d = Asinh(c) y = Add(d, x)"
    with pytest.raises(UnsupportedOperatorError) as raised:
        optimize(_model(body, w=_weight(3)), loss="mse")
    for part in ("Acosh", "Asinh", "'/net/b'", "'/net/c'", "'/net/d'"):
        assert part in str(raised.value)


@pytest.mark.usefixtures("fewer_rules")
def test_an_operator_off_the_path_needs_no_rule():
    body = "a = Asinh(x) b = MatMul(a, w) z = Acosh(b) y = Tanh(b)"
    result = optimize(_model(body, outputs=("y", "z"), w=_weight(3, 2)), loss="mse")
    assert set(result.training_graph.gradient_of) == {"w"}


@pytest.mark.parametrize(
    "body",
    ["y = Mul(x, x)", "v = Floor(u) y = Mul(v, x)", "i = ArgMax<axis=1>(u) f = Cast<to=1>(i) y = Mul(f, x)"],
    ids=["at a dead end", "behind Floor", "behind integers"],
)
def test_a_parameter_that_does_not_reach_the_loss_raises(body: str):
    with pytest.raises(NoParametersError):
        optimize(_model(f"u = MatMul(x, w) {body}", w=_weight(3, 3)), loss="mse")


def test_the_default_loss_is_of_an_output_that_depends_on_parameters():
    model = _model("y = Mul(x, x) z = Mul(x, w)", ("y", "z"), w=_weight(3))
    assert "loss: mse of output 'z'" in " ".join(optimize(model, loss="mse").planned.model.notes)


def test_rules_and_stops_are_disjoint():
    assert not set(RULES) & STOPS


@pytest.mark.parametrize(
    "model, named",
    [
        (
            lambda: _model(
                "y, p, r = BatchNormalization<training_mode=1>(x, s, b, m, q) z = Add(y, p)", ("z", "r"), **_NORM
            ),
            ("BatchNormalization", "'/net/y'", "statistics"),
        ),
        (
            lambda: _model("r = ReduceMax<keepdims=0>(x) p = Sigmoid(r) u = Mul(x, w) y = Dropout(u, p)", w=_weight(3)),
            ("Dropout", "'/net/y'", "ratio"),
        ),
    ],
    ids=["statistics read", "computed ratio"],
)
def test_a_missing_gradient_raises(model: Callable[[], onnx.ModelProto], named: tuple[str, ...]):
    with pytest.raises(UnsupportedOperatorError) as raised:
        optimize(model(), loss="mse")
    assert [part for part in named if part not in str(raised.value)] == []


def test_a_rule_that_gives_no_gradient_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "RULES", {**RULES, "Tanh": lambda g: None})
    with pytest.raises(UnsupportedOperatorError, match="Tanh '/net/y' has no gradient rule for its input 0"):
        optimize(_model("u = Mul(x, w) y = Tanh(u)", w=_weight(3)), loss="mse")


@pytest.mark.parametrize(
    "body, removed, computed",
    [
        ("y = Slice(u, one, three)", "one", "starts"),
        ("y = Slice(u, zero, three, one)", "one", "axes"),
        ("y = Slice(u, zero, three, , one)", "one", "steps"),
        ("y = Pad(u, pads)", "pads", "pads"),
        ("y = Pad(u, two, , one)", "one", "axes"),
    ],
)
def test_slices_and_pads_by_computed_numbers_raise(body: str, removed: str, computed: str):
    numbers: dict[str, Any] = {"zero": [0], "one": [1], "three": [3], "pads": [1, 0, 1, 0], "two": [1, 1]}
    used = {name: value for name, value in numbers.items() if name in re.findall(r"\w+", body)}
    model = read_model(_model(f"u = Mul(x, w) {body}", w=_weight(3), **used), loss="mse")
    # Reading needs the constant for a static shape, so the test removes it afterwards.
    weights = {name: weight for name, weight in model.weights.items() if name != removed}
    with pytest.raises(UnsupportedOperatorError, match=f"'/net/y' computes its {computed} in the graph"):
        differentiate(replace(model, weights=weights))
