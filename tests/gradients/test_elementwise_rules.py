"""Elementwise rules at special values (ties, zeros, infinities), in other types, and their reads."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from onnx import TensorProto, helper
from torch import Tensor

from onnxgc.api import optimize
from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.registry import STOPS, differentiate
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from tests.gradients.gradient_case import case, emitted, positive
from tests.model.model_helpers import model_of, run, text_model

INF, NAN = np.inf, np.nan


def _model(body: str, operands: Mapping[str, Array], dy: Array, **constants: Array) -> onnx.ModelProto:
    """y by `body` from `operands`, and a loss whose gradient with respect to y is the input dy."""
    dims = ",".join(map(str, dy.shape))
    nodes = f"{body} weighted = Mul(y, dy) total = ReduceSum<keepdims=0>(weighted)"
    return model_of(f"(float[{dims}] dy) => (float total) {{ {nodes} }}", **operands, **constants)


def _gradients(body: str, operands: Mapping[str, Array], dy: Array, **constants: Array) -> dict[str, Array]:
    model = _model(body, operands, dy, **constants)
    graph = optimize(model, loss="total", trainable=list(operands), check=False).training_graph
    return dict(
        zip(operands, run(graph.model, {"dy": dy}, *(graph.gradient_of[name] for name in operands)), strict=True)
    )


def _floats(*values: float) -> Array:
    return np.asarray(values, np.float32)


_ENDS = _floats(-INF, -3.4e38, -7.0, -1e-30, 0.0, 1e-30, 7.0, 3.4e38, INF)
# Without tiny positive numbers: added to 1 they round away, to the other side of a discontinuity at 0.
_JUMPING = _floats(-INF, -7.0, -1e-6, 0.0, 1e-6, 7.0, INF)


@pytest.mark.parametrize(
    "body, formula, x",
    [
        ("y = Relu(x)", torch.relu, _ENDS),
        ("y = LeakyRelu<alpha=0.3>(x)", lambda x: F.leaky_relu(x, 0.3), _ENDS),
        ("y = Elu<alpha=0.3>(x)", lambda x: F.elu(x, 0.3), _JUMPING),
        ("y = Elu(x)", F.elu, _ENDS),
        ("y = Selu(x)", F.selu, _JUMPING),
        ("y = HardSigmoid<alpha=0.25>(x)", lambda x: F.hardtanh(x / 4 + 0.5, 0.0, 1.0), _ENDS),
        ("y = ThresholdedRelu(x)", lambda x: F.threshold(x, 1.0, 0.0), _ENDS),
        ("y = ThresholdedRelu<alpha=-7.0>(x)", lambda x: F.threshold(x, -7.0, 0.0), _ENDS),
        ("y = Sigmoid(x)", torch.sigmoid, _ENDS),
        ("y = Softplus(x)", F.softplus, _ENDS),
        ("y = Tanh(x)", torch.tanh, _ENDS),
        ("y = Shrink<lambd=7.0, bias=7.0>(x)", lambda x: F.softshrink(x, 7.0), _ENDS),
        ("y = Softsign(x)", F.softsign, _floats(-1e30, -7, -1e-30, 0, 1e-30, 7, 1e30)),
        ("y = HardSwish(x)", F.hardswish, _floats(-1e30, -7, -2.9, -1e-30, 0, 2.9, 7, 1e30)),
        ("y = Abs(x)", torch.abs, _ENDS),
        ("y = Atan(x)", torch.atan, _floats(-1e15, -7, 0, 7, 1e15)),
        ("y = Erf(x)", torch.erf, _ENDS),
        ("y = Sinh(x)", torch.sinh, _floats(-80, -7, -1e-3, 0, 1e-3, 7, 80)),
        ("y = Cosh(x)", torch.cosh, _floats(-80, -7, -1e-3, 0, 1e-3, 7, 80)),
        ("y = Asinh(x)", torch.asinh, _floats(-1e15, -7, -1e-3, 0, 1e-3, 7, 1e15)),
        ("y = Sqrt(x)", torch.sqrt, _floats(0, 1e-30, 7)),
        ("y = Reciprocal(x)", torch.reciprocal, _floats(-7, -1e-5, 0, 1e-5, 7)),
    ],
)
def test_gradients_at_extreme_values_and_kinks(body: str, formula: Callable[[Tensor], Tensor], x: Array):
    leaf = torch.from_numpy(x).requires_grad_()
    dy = np.linspace(0.5, 1.5, x.size).astype(np.float32)
    (expected,) = torch.autograd.grad(formula(leaf), leaf, torch.from_numpy(dy))
    found = _gradients(body, {"x": x}, dy)["x"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slope", [0.0, -0.5, 3.0])
def test_prelu_at_zero(slope: float):
    x = _floats(-2, -0.0, 0.0, 3)
    leaves = [torch.from_numpy(value).requires_grad_() for value in (x, _floats(slope))]
    dy = _floats(1, 2, 3, 4)
    expected = torch.autograd.grad(F.prelu(*leaves), leaves, torch.from_numpy(dy))
    found = _gradients("y = PRelu(x, s)", {"x": x, "s": _floats(slope)}, dy)
    np.testing.assert_array_equal(found["x"], expected[0].numpy())
    np.testing.assert_array_equal(found["s"], expected[1].numpy())


_LEFT = _floats(1, 2, 2, INF, -INF, INF, -INF, 0.0, 1e-30, 3.4e38)
_RIGHT = _floats(2, 1, 2, INF, -INF, -INF, INF, -0.0, 2e-30, -3.4e38)


@pytest.mark.parametrize("operator, function", [("Max", torch.maximum), ("Min", torch.minimum)])
@pytest.mark.parametrize("a, b", [(_LEFT, _RIGHT), (_RIGHT, _LEFT)])
def test_equal_operands_share_the_gradient(operator: str, function: Callable[..., Tensor], a: Array, b: Array):
    leaves = [torch.from_numpy(value).requires_grad_() for value in (a, b)]
    dy = np.arange(1, a.size + 1, dtype=np.float32)
    expected = torch.autograd.grad(function(*leaves), leaves, torch.from_numpy(dy))
    found = _gradients(f"y = {operator}(a, b)", {"a": a, "b": b}, dy)
    np.testing.assert_array_equal(found["a"], expected[0].numpy())
    np.testing.assert_array_equal(found["b"], expected[1].numpy())


def test_a_maximum_with_the_lowest_number_passes_the_gradient():
    """Exporters clamp masked scores in this way."""
    lowest = np.asarray(np.finfo(np.float32).min)
    x = _floats(-INF, float(lowest), 0, 3.4e38, INF)
    found = _gradients("y = Max(x, c)", {"x": x}, _floats(1, 2, 3, 4, 5), c=lowest)["x"]
    np.testing.assert_array_equal(found, _floats(0, 1, 3, 4, 5))


def test_where_keeps_infinity_and_nan_from_the_other_operand():
    condition = np.asarray([True, False, True, False, True, False])
    dy = _floats(1, 2, INF, INF, NAN, NAN)
    operands = {"a": np.zeros(6, np.float32), "b": np.zeros(6, np.float32)}
    found = _gradients("y = Where(c, a, b)", operands, dy, c=condition)
    np.testing.assert_array_equal(found["a"], _floats(1, 0, INF, 0, NAN, 0))
    np.testing.assert_array_equal(found["b"], _floats(0, 2, 0, INF, 0, NAN))


def test_a_guarded_root_has_a_gradient_of_zero_at_guarded_elements():
    x = _floats(-4, 0.25, 4)
    body = "c = Greater(x, zero) s = Where(c, x, zero) y = Sqrt(s)"
    found = _gradients(body, {"x": x}, _floats(1, 1, 1), zero=np.asarray(0, np.float32))["x"]
    np.testing.assert_array_equal(found, _floats(0, 1, 0.25))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -0.5, 1.5])
@pytest.mark.parametrize("is_constant", [False, True], ids=["computed", "constant"])
def test_powers_of_zero_and_of_negative_numbers(exponent: float, is_constant: bool):
    whole = exponent == int(exponent)
    x = _floats(-2, -0.5, 0, 0.5, 2) if whole else _floats(0, 0.5, 2)
    leaves = [torch.from_numpy(value).requires_grad_() for value in (x, _floats(exponent))]
    dy = np.arange(1, x.size + 1, dtype=np.float32)
    base, power = torch.autograd.grad(torch.pow(*leaves), leaves, torch.from_numpy(dy), materialize_grads=True)
    if is_constant:
        found = _gradients("y = Pow(x, p)", {"x": x}, dy, p=np.asarray(exponent, np.float32))
    else:
        found = _gradients("y = Pow(x, p)", {"x": x, "p": _floats(exponent)}, dy)
    np.testing.assert_allclose(found["x"], base.numpy(), rtol=1e-5)
    if not is_constant and x.min() >= 0.0 and exponent >= 0.0:
        np.testing.assert_allclose(found["p"], power.numpy(), rtol=1e-5)
    if not is_constant and exponent > 0.0:
        assert np.isfinite(found["p"]).all()


@pytest.mark.parametrize("operator", ["Ceil", "Floor", "Round", "Sign"])
def test_piecewise_constant_operators_stop_the_gradient(operator: str):
    assert operator in STOPS
    found = _gradients(f"s = {operator}(x) y = Add(s, x)", {"x": _floats(-1.7, 0.4, 2.2)}, _floats(1, 2, 3))
    np.testing.assert_array_equal(found["x"], _floats(1, 2, 3))


def test_mod_of_floats_with_fmod_0_raises():
    model = read_model(
        _model("y = Mod<fmod=1>(x, c)", {"x": _floats(1, 2)}, _floats(1, 1), c=_floats(2)),
        loss="total",
        trainable=["x"],
    )
    # Changed after reading, since ONNX's checker rejects such a file.
    nodes = tuple(node.with_changes(attributes={"fmod": 0}) if node.op == "Mod" else node for node in model.nodes)
    with pytest.raises(UnsupportedOperatorError, match="Mod 'Mod_y' has fmod=0"):
        differentiate(replace(model, nodes=nodes))


_READ_RESULT = (
    *("Relu", "LeakyRelu", "Elu", "Selu", "HardSigmoid", "ThresholdedRelu", "Shrink", "Softsign", "Sigmoid", "Tanh"),
    *("Exp", "Reciprocal"),
)


@pytest.mark.parametrize(
    "rule, body, read",
    [
        *((rule, f"y = {rule}(x)", {"y"}) for rule in _READ_RESULT),
        *((rule, f"y = {rule}(x)", {"x"}) for rule in ("HardSwish", "Softplus", "Sinh")),
        ("LeakyRelu", "y = LeakyRelu<alpha=-0.5>(x)", {"x"}),
        ("Pow", "p = Constant<value_float=2.0>() y = Pow(x, p)", {"x"}),
        ("Pow", "p = Constant<value_float=0.5>() y = Pow(x, p)", {"y"}),
        ("Pow", "p = Constant<value_float=-0.5>() y = Pow(x, p)", {"y"}),
        ("Cosh", "y = Cosh(x)", {"x", "y"}),
        ("CumSum", "a = Constant<value_int=1>() y = CumSum(x, a)", set()),
        ("Trilu", "y = Trilu(x)", set()),
    ],
)
def test_tensors_that_backward_reads(rule: str, body: str, read: set[str]):
    step, _ = emitted(case(rule, "reads", body, x=positive(3, 4)))
    (source,) = [node for node in step.model.nodes if node.op == rule]
    chunks = [chunk for chunk in step.differentiated.chunks if chunk.source == source.name]
    named = {source.inputs[0]: "x", source.outputs[0]: "y"}
    found = {named.get(name) for chunk in chunks for name in step.differentiated.reads(chunk)}
    assert found - {None} == read


@pytest.mark.parametrize(
    "body",
    [
        *(f"y = {call}" for call in ("LeakyRelu(x)", "PRelu(x, w)", "Clip(x, low)", "Max(x, w)", "Min(x, w, x)")),
        *(f"y = {call}" for call in ("Pow(x, w)", "Div(x, w)", "Mod<fmod=1>(x, w)", "Erf(x)", "Trilu(x)", "Abs(x)")),
        "y = Cast<to=1>(x) u = Mul(y, y) z = Cast<to=16>(u)",
    ],
)
def test_gradients_in_bfloat16_use_operators_that_support_it(body: str):
    """ONNX Runtime has few of them on CPU, so the test checks types only."""
    last = "z" if " z = " in body else "y"
    proto = text_model(f"""(bfloat16[3, 4] a) => (bfloat16[3, 4] {last})
        <bfloat16[3, 4] v, bfloat16[4] w, bfloat16 low> {{ x = Mul(a, v) {body} }}""")
    shapes = {"v": (3, 4), "w": (4,), "low": ()}
    used = {name for node in proto.graph.node for name in node.input}
    del proto.graph.initializer[:]
    for name in shapes.keys() & used:
        value = helper.make_tensor(name, TensorProto.BFLOAT16, shapes[name], [0.5] * int(np.prod(shapes[name])))
        proto.graph.initializer.append(value)
    result = optimize(proto, loss="mse", trainable=sorted({"v", "w"} & used), check=False)
    types = result.planned.model.types
    assert {types[name].dtype for name in ("x", last)} == {TensorProto.BFLOAT16}
    # Opset 18 lacks these in bfloat16, and CUDA lacks comparisons in bfloat16.
    without = {"HardSigmoid", "ThresholdedRelu", "Greater", "Less", "Equal", "GreaterOrEqual"}
    emitted_ops = {node.op_type for node in result.training_graph.model.graph.node if "/grad/" in node.name}
    assert emitted_ops & without == ({"Greater"} if "Clip" in body else set())


def test_the_gradient_of_a_cast_to_bfloat16_is_float32():
    body = "d = Cast<to=16>(x) y = Cast<to=1>(d)"
    x = np.linspace(-2, 2, 6, dtype=np.float32)
    found = _gradients(body, {"x": x}, _floats(1, 0.5, -2, 4, 3, 1))
    np.testing.assert_array_equal(found["x"], _floats(1, 0.5, -2, 4, 3, 1))


@pytest.mark.parametrize(
    "call", ["Max(x, b)", "Min(x, b, b)", "Where(c, x, b)", "Pow(x, b)", "Elu(x)", "PRelu(x, b)", "Mean(x, b)"]
)
def test_gradients_of_empty_tensors(call: str):
    x = np.zeros((2, 0, 3), np.float32)
    operands = {"x": x, "b": _floats(1.5)} if "b" in call else {"x": x}
    constants = {"c": np.asarray(True)} if "Where" in call else {}
    found = _gradients(f"y = {call}", operands, x, **constants)
    assert found["x"].shape == x.shape
    if "b" in operands:
        np.testing.assert_array_equal(found["b"], _floats(0))
