from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.pooling import BY_WINDOWS
from onnxgc.gradients.registry import RULES
from onnxgc.model.core.ir import Array
from onnxgc.torch import from_onnx
from onnxgc.torch.operators.registry import OPERATORS, SETTINGS
from tests.gradients.gradient_case import Case, truth
from tests.gradients.gradient_cases import CASES
from tests.model.model_helpers import text_model

TOLERANCE = 2e-5
TOLERANCE_IN_HALVES = 1e-3
# torch computes interpolation points differently, and casts to float16 round.
GRADIENT_TOLERANCES = {"Resize": 1e-5, "Cast": 1e-3}
# Attributes are float32 in the file, and read as the decimals that they round.
GRADIENT_TOLERANCE = 1e-6

_IN_SINGLE = tuple(entry for entry in CASES if entry.compute_type == TensorProto.FLOAT and entry.rule != BY_WINDOWS)
# ONNX Runtime rejects auto_pad if strides exceed the kernel, BatchNormalization in training mode, and float64
# for a declared float32.
_REJECTED = (
    "MaxPool: SAME_UPPER, far",
    "MaxPool: SAME_LOWER, far",
    "AveragePool: SAME_UPPER, far",
    "AveragePool: SAME_LOWER, far",
    "BatchNormalization.batch: opset 14, training",
    "Gather: float64",
)
_BESIDE_RUNTIME = tuple(entry for entry in _IN_SINGLE if str(entry) not in _REJECTED)
_DIFFERENTIATED = tuple(
    entry
    for entry in _IN_SINGLE
    if entry.loss == "mse"
    and len(entry.outputs) == 1
    and entry.change is None
    and entry.rule != "Dropout"
    # Modes differ in numbers only, which the results cover.
    and not entry.name.startswith("mode ")
)


def run(model: ModelProto, feeds: dict[str, Array]) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def results_of(model: ModelProto, feeds: dict[str, Array], **settings: Any) -> list[Array]:
    module = from_onnx(model, **settings).eval()
    with torch.no_grad():
        found = module(*(torch.from_numpy(value) for value in feeds.values()))
    return [value.numpy() for value in _listed(found)]


def _listed(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def assert_equal(found: Array, expected: Array, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, tolerance, tolerance)


@pytest.mark.parametrize("entry", _BESIDE_RUNTIME, ids=str)
def test_results_equal_those_of_onnx_runtime(entry: Case) -> None:
    model, feeds = entry.model(), entry.fed()
    found = results_of(model, feeds, trainable=entry.parameters)
    is_half = "float16" in str(entry) or "Resize: linear in blocks" in str(entry)
    for value, expected in zip(found, run(model, feeds), strict=True):
        assert_equal(value, expected, TOLERANCE_IN_HALVES if is_half else TOLERANCE)


# Autograd differentiates what the results cover: the others are slow tests.
_FIRST_OF_RULE = {entry.rule: entry for entry in reversed(_DIFFERENTIATED)}


@pytest.mark.parametrize(
    "entry",
    [
        entry if entry is _FIRST_OF_RULE[entry.rule] else pytest.param(entry, marks=pytest.mark.slow)
        for entry in _DIFFERENTIATED
    ],
    ids=str,
)
def test_gradients_equal_the_reference_in_float64(entry: Case) -> None:
    module = from_onnx(entry.model(), trainable=entry.parameters).double().train()
    fed = (torch.from_numpy(value) for value in entry.fed().values())
    y = module(*(value.double() if value.is_floating_point() else value for value in fed))
    target = np.random.default_rng(0).standard_normal(y.shape)
    torch.nn.functional.mse_loss(y, torch.from_numpy(target)).backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    names = {onnx_name: key for key, onnx_name in module.onnx_names().items()}
    for name, expected in truth(entry, target, {})[1].items():
        gradient = found[names[name]]
        assert gradient is not None
        error = np.linalg.norm(gradient.numpy() - expected)
        tolerance = GRADIENT_TOLERANCES.get(entry.rule, GRADIENT_TOLERANCE)
        assert error <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("entry", {entry.rule: entry for entry in _IN_SINGLE}.values(), ids=str)
def test_operators_run_on_the_modules_device_without_synchronising(entry: Case) -> None:
    fed = [torch.from_numpy(value) for value in entry.fed().values()]
    module = from_onnx(entry.model(), trainable=entry.parameters).eval()
    expected = module(*fed)
    found = module.to("meta")(*(value.to("meta") for value in fed))
    for value, other in zip(_listed(found), _listed(expected), strict=True):
        assert (value.device.type, value.shape, value.dtype) == ("meta", other.shape, other.dtype)


def test_every_operator_with_a_gradient_is_supported() -> None:
    # BatchNormalization covers both modes in torch.
    assert set(RULES) - set(OPERATORS) == {"BatchNormalization.batch", BY_WINDOWS}
    assert set(SETTINGS) - set(OPERATORS) == set()


FLOATS = np.asarray([[1.5, -2.0, np.inf, 0.5], [-0.5, np.nan, -np.inf, 2.5]], np.float32)
FINITE = np.asarray([[1.5, -2.0, 3.0, 0.5], [-0.5, 3.0, 0.0, 2.5]], np.float32)
INTEGERS = np.asarray([[7, -7, 3, 2], [-1, 5, 0, 9]], np.int64)
BYTES = np.asarray([[7, 255, 3, 2], [1, 5, 0, 9]], np.uint8)
BOOLEANS = np.asarray([[True, False, True, True], [False, False, True, False]])

_WITHOUT_GRADIENT: tuple[tuple[str, Array, str], ...] = (
    *(
        ("bool", FLOATS, body)
        for body in ("IsNaN(x)", "IsInf(x)", "IsInf<detect_negative=0>(x)", "IsInf<detect_positive=0>(x)")
    ),
    *(("float", FINITE, body) for body in ("Sign(x)", "Round(x)", "Floor(x)", "Ceil(x)", "Hardmax<axis=1>(x)")),
    ("int64", FINITE, "ArgMax<axis=1, keepdims=0>(x)"),
    ("int64", FINITE, "ArgMax<axis=-1, select_last_index=1>(x)"),
    ("int64", FINITE, "ArgMin(x)"),
    *(("bool", FINITE, f"{op}(x, n)") for op in ("Less", "GreaterOrEqual", "LessOrEqual", "Equal")),
    ("int64", FINITE, "Cast<to=7>(x)"),
    ("bool", FINITE, "Cast<to=9>(x)"),
    *(
        ("int64", INTEGERS, body)
        for body in (
            "Div(x, three)", "Mod(x, three)", "Mod<fmod=1>(x, three)", "Max(x, three)", "ReduceMax(x)",
            "ReduceSum<keepdims=0>(x)", "CumSum<exclusive=1, reverse=1>(x, one)",
        )
    ),
    ("float", INTEGERS, "Cast<to=1>(x)"),
    ("uint8", BYTES % 4, 'BitShift<direction="LEFT">(x, x)'),
    ("uint8", BYTES % 4, 'BitShift<direction="RIGHT">(x, x)'),
    ("uint8", BYTES, "BitwiseNot(x)"),
    *(("bool", BOOLEANS, body) for body in ("And(x, n)", "Or(x, n)", "Xor(x, x)")),
)  # fmt: skip


@pytest.mark.parametrize("output, value, body", _WITHOUT_GRADIENT, ids=lambda entry: str(entry)[:60])
def test_operators_without_a_gradient(output: str, value: Array, body: str) -> None:
    kind = {"float32": "float"}.get(value.dtype.name, value.dtype.name)
    before = "three = Constant<value_int=3>() one = Constant<value_int=1>() "
    before += {"float": "n = Neg(x) ", "bool": "n = Not(x) "}.get(kind, "")
    model = text_model(f"({kind}[2,4] x) => ({output} y) {{ {before} y = {body} }}")
    (found,), (expected,) = results_of(model, {"x": value}), run(model, {"x": value})
    assert_equal(found, expected, 0.0)


def test_max_unpool_adds_zeros_up_to_its_output_shape() -> None:
    """ONNX Runtime reads the indices in an image of `output_shape`, unlike ONNX's reference."""
    model = text_model(
        "(float[1,1,2,2] x, int64[1,1,2,2] at)"
        "=> (float[1,1,5,6] y) <int64[4] s = {1, 1, 5, 6}>"
        "{ y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, at, s) }"
    )
    feeds = {"x": np.asarray([[[[1, 2], [3, 4]]]], np.float32), "at": np.asarray([[[[5, 7], [13, 15]]]])}
    x, indices = map(torch.from_numpy, feeds.values())
    found = OPERATORS["MaxUnpool"](x, indices, [1, 1, 5, 6], kernel_shape=[2, 2], strides=[2, 2])
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    assert_equal(found.numpy(), np.asarray(expected), 0.0)


def test_random_tensors_have_their_distribution_shape_and_type() -> None:
    model = text_model(
        "(double[64,64] x)"
        "=> (float[64,32] a, double[64,64] b, float[64,32] c, float[64,64] d) {"
        "a = RandomNormal<shape=[64,32], mean=3.0, scale=0.5>() b = RandomNormalLike<mean=3.0, scale=0.5>(x)"
        "c = RandomUniform<shape=[64,32], low=2.0, high=4.0>()"
        "d = RandomUniformLike<dtype=1, low=2.0, high=4.0>(x) }"
    )
    results = results_of(model, {"x": np.zeros((64, 64))})
    assert [value.dtype for value in results] == [np.float32, np.float64, np.float32, np.float32]
    assert [value.shape for value in results] == [(64, 32), (64, 64), (64, 32), (64, 64)]
    np.testing.assert_allclose([value.mean() for value in results], 3, atol=0.1)
    np.testing.assert_allclose([value.std() for value in results], [0.5, 0.5, 3**-0.5, 3**-0.5], atol=0.05)


def test_masked_rows_of_a_softmax_have_finite_gradients() -> None:
    model = text_model(
        "(float[2,3] x) => (float[2,3] y)"
        "<float[2,3] w = {0, 0, 0, 0, 0, 0}> {"
        "a = Add(x, w) s = Softmax(a) n = IsNaN(s) zero = Constant<value_float=0.0>() y = Where(n, zero, s) }"
    )
    module = from_onnx(model, trainable=["w"])
    y = module(torch.tensor([[-torch.inf] * 3, [0.0, 1.0, 2.0]]))
    assert y[0].tolist() == [0, 0, 0]
    y[:, 0].sum().backward()
    gradient = module.get_parameter("w").grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert gradient[1].abs().sum() > 0


def test_dropout_is_on_in_training_only() -> None:
    model = text_model(
        "(float[8,64] x) => (float[8,64] y, bool[8,64] mask)"
        "{ ratio = Constant<value_float=0.25>() y, mask = Dropout(x, ratio) }"
    )
    module, x = from_onnx(model), torch.ones(8, 64)
    y, mask = module.eval()(x)
    assert torch.equal(y, x)
    assert mask.all()
    torch.manual_seed(0)
    y, mask = module.train()(x)
    assert torch.equal(y, mask / 0.75)
    assert 0.6 < mask.float().mean() < 0.9
    torch.manual_seed(1)
    assert not torch.equal(module(x)[1], mask)


def test_one_error_names_all_unsupported_operators() -> None:
    model = text_model("(float[2,2] x) => (float y, float[2,2] z){ [one] y = Det(x) [two] a = Det(x) z = Mul(x, a) }")
    with pytest.raises(UnsupportedOperatorError, match=r"not supported in torch: Det \('one', 'two'\)"):
        from_onnx(model)
