import json

import numpy as np
import onnx
import pytest

from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.read import read_model
from tests.model.model_helpers import model_of, normal, read, run_read, text_model


def linear(shape: tuple[int, ...], *nodes: str, opset: int = 18, dtype: str = "float") -> onnx.ModelProto:
    """`z = x + w` with w = 0 of the shape without its batch, then the given nodes down to y."""
    dims = ",".join(map(str, shape))
    body = f"({dtype}[{dims}] x) => ({dtype} y) {{ {'z' if nodes else 'y'} = Add(x, w) {' '.join(nodes)} }}"
    model = text_model(body, opset=opset)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    element = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape[1:], element), "w"))
    return model


def log_softmax(x: Array, axis: int) -> Array:
    shifted = x.astype(np.float64) - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def cross_entropy(x: Array, labels: Array, axis: int) -> float:
    counted = labels != -100
    index = np.expand_dims(np.where(counted, labels, 0), axis)
    picked = np.take_along_axis(log_softmax(x, axis), index, axis).squeeze(axis)
    return float(-(picked * counted).sum() / max(counted.sum(), 1))


def loss_of(model: TrainableModel, x: Array, target: Array) -> float:
    (value,) = run_read(model, {"x": x, model.targets[0]: target}, model.loss)
    assert value.shape == ()
    assert value.dtype == np.float32
    return float(value)


@pytest.mark.parametrize(
    "shape, nodes, opset, label_shape, axis",
    [
        ((4, 5), ("y = Softmax(z)",), 18, (4,), 1),
        ((4, 5), ("y = LogSoftmax(z)",), 18, (4,), 1),
        ((4, 5, 1, 1), (), 18, (4,), 1),
        ((4, 5, 1, 1), ("f = Flatten(z)", "v = Softmax<axis=1>(f)", "y = Identity(v)"), 11, (4,), 1),
        ((4, 5, 3, 2), ("y = Softmax<axis=1>(z)",), 18, (4, 3, 2), 1),
        ((4, 3, 5), ("y = Softmax<axis=2>(z)",), 9, (4, 3), 2),
    ],
)
def test_cross_entropy(
    shape: tuple[int, ...], nodes: tuple[str, ...], opset: int, label_shape: tuple[int, ...], axis: int
):
    model = read_model(linear(shape, *nodes, opset=opset))
    assert model.loss_kind == "cross-entropy"
    assert model.types["labels"].shape == label_shape
    assert model.types["labels"].dtype == onnx.TensorProto.INT64
    assert not any(node.op in ("Softmax", "SoftmaxCrossEntropyLoss") for node in model.nodes)
    x = normal(*shape) * 3
    labels = np.random.default_rng(0).integers(0, 5, label_shape)
    expected = cross_entropy(x, labels.reshape(label_shape + (1,) * (len(shape) - 1 - len(label_shape))), axis)
    assert loss_of(model, x, labels) == pytest.approx(expected, rel=1e-5)


def test_ignored_labels_are_left_out_of_the_mean_and_large_logits_do_not_overflow():
    model = read_model(linear((4, 5)))
    x = normal(4, 5) * 1000
    labels = np.asarray([1, -100, 4, -100])
    assert loss_of(model, x, labels) == pytest.approx(cross_entropy(x[[0, 2]], labels[[0, 2]], 1), rel=1e-5)
    assert loss_of(model, x, np.full(4, -100)) == 0.0


def test_explicit_cross_entropy_of_a_language_model_has_classes_last():
    assert read_model(linear((2, 5, 3)), loss="cross-entropy").types["labels"].shape == (2, 3)
    source = model_of("(float[2,3,4] x) => (float[2,3,7] y) { y = MatMul(x, w) }", w=(4, 7))
    model = read_model(source, loss="cross-entropy")
    assert model.types["labels"].shape == (2, 3)
    x, labels = normal(2, 3, 4), np.asarray([[0, 6, 2], [-100, 1, 5]])
    logits = x @ normal(4, 7)
    assert loss_of(model, x, labels) == pytest.approx(cross_entropy(logits, labels, 2), rel=1e-5)


@pytest.mark.parametrize(
    "shape, nodes", [((4, 2, 3), ()), ((4, 3, 2, 2), ()), ((4, 1), ()), ((4, 1), ("y = Squeeze<axes=[1]>(z)",))]
)
def test_other_outputs_have_mean_squared_error(shape: tuple[int, ...], nodes: tuple[str, ...]):
    model = read_model(linear(shape, *nodes, opset=11))
    assert model.loss_kind == "mse"
    assert model.types["target"] == model.types["y"]


@pytest.mark.parametrize("kind", ["mse", "l1", "bce"])
def test_elementwise_losses(kind: str):
    model = read_model(linear((2, 3, 4)), loss=kind)
    x, target = normal(2, 3, 4), np.random.default_rng(1).random((2, 3, 4)).astype(np.float32)
    difference = (x - target).astype(np.float64)
    probability = 1 / (1 + np.exp(-x.astype(np.float64)))
    expected = {
        "mse": np.mean(difference**2),
        "l1": np.mean(np.abs(difference)),
        "bce": np.mean(-target * np.log(probability) - (1 - target) * np.log(1 - probability)),
    }[kind]
    assert loss_of(model, x, target) == pytest.approx(expected, rel=1e-5)
    softmax = read_model(linear((4, 5), "y = Softmax(z)"), loss=kind)
    assert "Softmax" in [node.op for node in softmax.nodes]


def test_bce_absorbs_a_trailing_sigmoid():
    model = read_model(linear((4, 5), "y = Sigmoid(z)"), loss="bce")
    assert model.outputs == ("z",)
    assert not any(node.op == "Sigmoid" for node in model.nodes)
    x = np.full((4, 5), 200, np.float32)
    assert loss_of(model, x, np.zeros((4, 5), np.float32)) == pytest.approx(200)


def test_the_loss_of_other_types_is_float32():
    model = read_model(linear((4, 5), dtype="float16"))
    x = normal(4, 5).astype(np.float16)
    labels = np.asarray([0, 1, 2, 3])
    assert loss_of(model, x, labels) == pytest.approx(cross_entropy(x.astype(np.float32), labels, 1), rel=1e-5)
    assert model.types["y"].dtype == onnx.TensorProto.FLOAT16
    model = read(linear((4, 5), dtype="double"))
    x = normal(4, 5).astype(np.float64)
    assert loss_of(model, x, x * 0) == pytest.approx(float(np.mean(x**2)), rel=1e-6)


@pytest.mark.parametrize("loss", ["auto", "total"])
def test_scalar_output_is_the_loss(loss: str):
    body = """(float[4,3] x) => (float[4,2] y, float total) {
        y = MatMul(x, w)  q = Mul(y, y)  total = ReduceMean<keepdims=0>(q) }"""
    model = read_model(model_of(body, w=(3, 2)), loss=loss)
    assert (model.loss, model.loss_kind, model.targets) == ("total", "output", ())
    assert model.outputs == ("y", "total")
    assert json.loads(model.metadata["onnxgc.names"]) == {"loss": "total"}


def test_named_output_of_one_element_becomes_a_scalar():
    body = "(float[4,3] x) => (float[1,1] s) { y = MatMul(x, w)  s = ReduceMean(y) }"
    model = read_model(model_of(body, w=(3, 2)), loss="s")
    assert model.types[model.loss].shape == ()
    assert model.loss == "loss"


def test_taken_names_get_a_suffix():
    body = "(float[4,3] labels) => (float[4,2] y) { loss = MatMul(labels, w)  y = Relu(loss) }"
    model = read_model(model_of(body, w=(3, 2)))
    assert (model.loss, model.targets) == ("loss_2", ("labels_2",))
    assert json.loads(model.metadata["onnxgc.names"]) == {"labels": "labels_2", "loss": "loss_2"}


def test_a_note_reports_the_chosen_output():
    body = """(float[4,3] x) => (int64[4] k, float[4,2] a, float[4,2] b) {
        a = MatMul(x, w)  b = Relu(a)  k = ArgMax<axis=1, keepdims=0>(a) }"""
    model = read_model(model_of(body, w=(3, 2)))
    note = next(note for note in model.notes if note.startswith("loss:"))
    assert "cross-entropy of output 'a' [4, 2]" in note
    assert "'k', 'b'" in note
    assert model.outputs == ("a",)


@pytest.mark.parametrize("loss", ["auto", "bce", "cross-entropy"])
def test_an_output_without_parameters_is_not_chosen(loss: str):
    body = """(float[2,3] x) => (float s, float[2,3] copy, float[2,4] y) {
        s = ReduceSum<keepdims=0>(x)  copy = Identity(x)  y = MatMul(x, w) }"""
    model = read_model(model_of(body, w=(3, 4)), loss=loss)
    assert model.parameters == ("w",)
    assert any("of output 'y' [2, 4]" in note for note in model.notes)


def test_a_loss_consists_of_standard_operators():
    plain = {
        *("Add", "Equal", "Not", "Cast", "Where", "Unsqueeze", "LogSoftmax", "GatherElements", "Squeeze", "Neg"),
        *("Mul", "ReduceSum", "Max", "Div"),
    }
    model = read_model(linear((4, 5)))
    assert {node.op for node in model.nodes} <= plain
    assert all(node.rule == node.op and not node.once for node in model.nodes)
