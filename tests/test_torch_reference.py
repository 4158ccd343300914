import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from tests.gradients.gradient_cases import CASES as GRADIENT_CASES
from tests.model.model_helpers import model_of
from tests.torch_operators import OPERATORS
from tests.torch_reference import random_weights, reference_outputs, reference_step, with_fed_weights

Array = np.ndarray
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
OURS = Path(__file__).resolve().parent.parent / "models"

# Sizes for networks without a fixed inner size; other light models have their own.
PIXELS = {
    "light_densenet121": 64,
    "light_squeezenet": 64,
    "densenet121": 64,
    "inception_v3": 96,
    "mobilenet_v2": 64,
    "nasnetalarge": 75,
    "resnet18": 64,
    "resnet50": 64,
    "resnet152": 64,
}
# These have all operators, in old opsets and in new ones.
QUICK = ("light_inception_v2", "light_shufflenet", "light_squeezenet", "darts", "inception_v3", "mobilenet_v2")
NETWORKS = [
    path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.slow)
    for folder in (LIGHT, OURS)
    for path in sorted(folder.glob("*.onnx"))
]
LITERAL_BATCH = [
    LIGHT / "light_bvlc_alexnet.onnx",
    pytest.param(LIGHT / "light_shufflenet.onnx", marks=pytest.mark.slow),
]


def load(path: Path) -> tuple[onnx.ModelProto, str, tuple[int, int, int, int]]:
    model = onnx.load(path)
    weights = {t.name for t in model.graph.initializer}
    image = next(value for value in model.graph.input if value.name not in weights)
    dimensions = image.type.tensor_type.shape.dim
    for dimension in dimensions[2:]:
        dimension.dim_value = PIXELS.get(path.stem, dimension.dim_value)
    return model, image.name, (1, 3, dimensions[2].dim_value, dimensions[3].dim_value)


def draw(shape: tuple[int, ...], seed: int = 3) -> Array:
    return np.random.default_rng(seed).random(shape, dtype=np.float32) - np.float32(0.5)


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def distance(actual: Array, expected: Array) -> float:
    """Norm of the difference, relative to the expected norm."""
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: path.stem)
def test_forward_of_networks_equals_onnxruntime(path: Path):
    model, image, shape = load(path)
    weights = random_weights(model)
    feeds = {image: draw(shape)}
    expected = run(with_fed_weights(model, weights), feeds | weights)
    for name, actual in reference_outputs(model, weights, feeds).items():
        assert np.ptp(actual) > 0
        assert distance(expected[name], actual) < 2e-5


def test_tensors_of_a_run_are_released_without_garbage_collection():
    model, image, shape = load(OURS / "resnet18.onnx")
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        reference_outputs(model, random_weights(model), {image: draw(shape)})
        assert count_tensors() == before
    finally:
        gc.enable()


def count_tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("path", LITERAL_BATCH, ids=lambda path: path.stem)
def test_literal_batches_are_replaced(path: Path):
    model, image, (_, *shape) = load(path)
    weights = random_weights(model)
    batch = draw((2, *shape))
    (both,) = reference_outputs(model, weights, {image: batch}, dtype=torch.float64).values()
    (second,) = reference_outputs(model, weights, {image: batch[1:]}, dtype=torch.float64).values()
    assert distance(both[1:], second) < 1e-9


# --- one operator at a time -----------------------------------------------------------------

X = (2, 6, 9, 8)
Case = tuple[str, dict[str, Any], list[Any], int]
# Settings of their own here; the others are in tests/gradients, which compares each loss with ONNX Runtime's.
CASES: list[Case] = [
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 0, 1, 1], "strides": [2, 2]}, [X], 17),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, [X], 19),
    (
        "AveragePool",
        {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 1, 0, 1], "ceil_mode": 1, "count_include_pad": 1},
        [X],
        19,
    ),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}, [X], 17),
    ("Clip", {"min": -0.1, "max": 0.2}, [X], 9),
    ("Conv", {"pads": [1, 0, 2, 1], "strides": [2, 1], "group": 2}, [X, (4, 3, 3, 3), (4,)], 17),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, [X, (4, 6, 2, 3)], 17),
    ("Conv", {"dilations": [2], "pads": [2, 2]}, [(2, 4, 11), (5, 4, 3)], 17),
    ("Flatten", {"axis": -1}, [X], 17),
    ("Gemm", {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}, [(4, 3), (5, 4), (5,)], 17),
    ("LogSoftmax", {}, [X], 9),
    ("MaxPool", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}, [X], 9),
    ("MaxPool", {"kernel_shape": [3, 2], "pads": [2, 1, 0, 1], "dilations": [2, 1], "ceil_mode": 1}, [X], 17),
    ("MaxPool", {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [0, 0, 1, 1], "ceil_mode": 1}, [X], 17),
    ("Pad", {"pads": [0, 0, 1, 1, 0, 0, 0, 2]}, [X], 9),
    ("ReduceSum", {"noop_with_empty_axes": 1}, [X], 17),
    ("Reshape", {}, [X, np.array([0, -1, 4])], 17),
    ("Shape", {"start": 1, "end": -1}, [X], 17),
    ("Slice", {}, [X, np.array([1, -2]), np.array([5, -99]), np.array([1, 3]), np.array([2, -1])], 17),
    ("Slice", {"starts": [1], "ends": [-1], "axes": [2]}, [X], 9),
    ("Softmax", {}, [X], 9),
    ("Squeeze", {}, [(2, 1, 3, 1)], 17),
    ("Unsqueeze", {"axes": [1, 2]}, [(6,)], 9),
    *((op, {}, [X, (9, 1)], 17) for op in ("Equal", "Greater", "Less")),
    ("Div", {}, [np.array([7, -7, 8]), np.array([2, 2, 4])], 17),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_operator_equals_onnxruntime(case: Case):
    operator, attributes, inputs, opset = case
    feeds: dict[str, Array] = {}
    for index, value in enumerate(inputs):
        feeds[f"in{index}"] = draw(value, index) if isinstance(value, tuple) else np.asarray(value)
    node = helper.make_node(operator, list(feeds), ["out"], **attributes)
    types = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()
    ]
    graph = helper.make_graph([node], "one", types, [onnx.ValueInfoProto(name="out")])
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", opset)])
    expected = run(onnx.shape_inference.infer_shapes(model), feeds)["out"]
    actual = reference_outputs(model, {}, feeds, dtype=torch.float32)["out"]
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_every_operator_has_a_case():
    compared = {node.op_type for case in GRADIENT_CASES if case.formula is None for node in case.model().graph.node}
    assert OPERATORS.keys() <= compared | {case[0] for case in CASES}


# --- a training step ------------------------------------------------------------------------


SMALL = """(float[N,3,6,6] x) => (float %s) {
    c = Conv<pads=[1,1,1,1]>(x, "conv.weight", "conv.bias")
    n = BatchNormalization<momentum=0.75>(c, "bn.weight", "bn.bias", "bn.mean", "bn.var")
    r = Relu(n)  d = Dropout(r, ratio)  p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)  f = Flatten(p)
    g = Gemm<transB=1>(f, "fc.weight", "fc.bias")  %s }"""


def small_model(tail: str = "", output: str = "g") -> onnx.ModelProto:
    shapes = {"conv.weight": (5, 3, 3, 3), "conv.bias": (5,), "fc.weight": (7, 45), "fc.bias": (7,)}
    shapes |= {f"bn.{part}": (5,) for part in ("weight", "bias", "mean", "var")}
    weights = {name: np.zeros(shape) for name, shape in shapes.items()}
    return model_of(SMALL % (output, tail), opset=17, ir_version=9, ratio=np.float32(0.25), **weights)


class SmallNetwork(torch.nn.Module):
    def __init__(self, mask: Array) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3, padding=1)
        self.bn = torch.nn.BatchNorm2d(5, momentum=0.25)
        self.fc = torch.nn.Linear(45, 7)
        self.mask = torch.from_numpy(mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x)).relu() * self.mask / 0.75
        return self.fc(torch.nn.functional.max_pool2d(x, 2).flatten(1))


SOFTMAX = "y = Softmax(g)"


@pytest.mark.parametrize(
    "loss, tail, torch_loss",
    [
        ("cross-entropy", "", torch.nn.functional.cross_entropy),
        ("cross-entropy", SOFTMAX, torch.nn.functional.cross_entropy),
        ("bce", "", torch.nn.functional.binary_cross_entropy_with_logits),
    ],
)
def test_step_equals_a_torch_module(loss: str, tail: str, torch_loss: Callable[..., torch.Tensor]):
    model = small_model(tail, "y" if tail else "g")
    weights = random_weights(model)
    x = draw((4, 3, 6, 6))
    mask = draw((4, 5, 6, 6)) > -0.25
    target = np.array([3, -100, 0, 6]) if loss == "cross-entropy" else draw((4, 7), 9) + np.float32(0.5)
    network = SmallNetwork(mask).double()
    names = {"bn.mean": "bn.running_mean", "bn.var": "bn.running_var"}
    network.load_state_dict({names.get(n, n): torch.from_numpy(v) for n, v in weights.items()}, strict=False)
    expected_target = torch.from_numpy(target)
    expected = torch_loss(
        network(torch.from_numpy(x).double()), expected_target if loss == "cross-entropy" else expected_target.double()
    )
    expected.backward()

    step = reference_step(model, weights, {"x": x}, target, loss=loss, masks={"d": mask})

    assert step.loss == pytest.approx(expected.item(), rel=1e-12)
    parameters = dict(network.named_parameters())
    assert step.gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        np.testing.assert_allclose(step.gradients[name], parameter.grad.numpy(), rtol=1e-9, atol=1e-14)
    for name, buffer in names.items():
        np.testing.assert_allclose(step.batch_statistics[name], network.get_buffer(buffer), rtol=1e-12)


def test_dropout_without_a_mask_is_the_identity():
    model = small_model()
    weights, feeds, labels = random_weights(model), {"x": draw((4, 3, 6, 6))}, np.array([3, 1, 0, 6])
    # A mask of kept elements scales by 1 / (1 - ratio); the next layer undoes it.
    scaled = weights | {"fc.weight": weights["fc.weight"] * np.float32(0.75)}
    kept = {"d": np.ones((4, 5, 6, 6), dtype=bool)}
    plain = reference_step(model, weights, feeds, labels)
    masked = reference_step(model, scaled, feeds, labels, masks=kept)
    assert masked.loss == pytest.approx(plain.loss, rel=1e-6)


def test_a_scalar_output_may_be_the_loss():
    model = small_model("mean = ReduceMean<keepdims=0>(g)", "mean")
    step = reference_step(model, random_weights(model), {"x": draw((4, 3, 6, 6))}, np.array(0), loss="mean")
    assert step.loss == step.outputs["mean"]
    np.testing.assert_allclose(step.gradients["fc.bias"], np.full(7, 1 / 7))


def test_weights_of_the_caller_are_not_modified():
    model = small_model()
    weights = random_weights(model)
    before = {name: value.copy() for name, value in weights.items()}
    reference_step(model, weights, {"x": draw((4, 3, 6, 6))}, np.array([3, 1, 0, 6]), dtype=torch.float32)
    for name, value in weights.items():
        np.testing.assert_array_equal(value, before[name])


def test_unknown_weights_are_rejected():
    model = small_model()
    with pytest.raises(ValueError, match=r"conv\.wait"):
        reference_step(model, {"conv.wait": np.zeros(1)}, {"x": draw((1, 3, 6, 6))}, np.array([0]))


def test_unknown_operators_are_rejected():
    model = small_model("y = Hardmax(g)", "y")
    with pytest.raises(NotImplementedError, match="Hardmax"):
        reference_outputs(model, {}, {"x": draw((1, 3, 6, 6))})


def test_gradients_of_a_network_equal_differences():
    """Directional derivatives equal central differences of the loss."""
    model, image, (_, *shape) = load(OURS / "mobilenet_v2.onnx")
    weights = {n: v.astype(np.float64) for n, v in random_weights(model).items()}
    feeds, labels = {image: draw((4, *shape))}, np.array([1, 20, 300, 999])
    step = reference_step(model, weights, feeds, labels)
    assert {n for n in weights if "running_" not in n} <= step.gradients.keys()
    direction = {n: g / max(float(np.linalg.norm(g)), 1e-30) for n, g in step.gradients.items() if n in weights}
    slope = sum(float((step.gradients[n] * d).sum()) for n, d in direction.items())
    width = 1e-9

    def loss_at(distance: float) -> float:
        moved = weights | {n: weights[n] + distance * d for n, d in direction.items()}
        return reference_step(model, moved, feeds, labels).loss

    assert (loss_at(width) - loss_at(-width)) / (2 * width) == pytest.approx(slope, rel=1e-5)
