import numpy as np
import onnx
import pytest
import torch

from onnxgc.api import optimize
from onnxgc.model.core.ir import Array, TrainableModel
from tests.model.model_helpers import model_of, normal, read, run, run_read

STATISTICS = {"g": normal(3, seed=1), "b": normal(3, seed=2), "m": normal(3, seed=3), "v": np.abs(normal(3, seed=4))}


def bn_model(attributes: str = "", *, opset: int = 15, shape: str = "2,3,4,5", outputs: str = "y") -> onnx.ModelProto:
    node = f"[bn] {outputs} = BatchNormalization{attributes}(x, g, b, m, v)"
    body = f"(float[{shape}] x) => (float[{shape}] y) {{ {node} }}"
    return model_of(body, opset=opset, ir_version=8, **STATISTICS)


def per_channel(value: Array, rank: int) -> Array:
    return value.reshape(1, -1, *[1] * (rank - 2))


def normalised(x: Array, epsilon: float) -> Array:
    axes = (0, *range(2, x.ndim))
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    scaled = (x - mean) / np.sqrt(variance + epsilon) * per_channel(STATISTICS["g"], x.ndim)
    return scaled + per_channel(STATISTICS["b"], x.ndim)


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 2, 3, 2)])
def test_batch_statistics_and_running_updates(shape: tuple[int, ...]):
    source = bn_model("<epsilon=0.001, momentum=0.8>", shape=",".join(map(str, shape)))
    model = read(source)
    x = (normal(*shape) * 2 + 5).astype(np.float32)
    feeds = {"x": x, "target": np.zeros(shape, np.float32)}
    y, mean, variance = run_read(model, feeds, "y", "m_new", "v_new")
    exact, axes = x.astype(np.float64), (0, *range(2, len(shape)))
    np.testing.assert_allclose(y, normalised(exact, 0.001), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, 0.8 * STATISTICS["m"] + 0.2 * exact.mean(axes), rtol=1e-5)
    np.testing.assert_allclose(variance, 0.8 * STATISTICS["v"] + 0.2 * exact.var(axes, ddof=1), rtol=1e-5)


def test_nodes_of_a_lowered_batch_normalization():
    model = read(bn_model())
    (bn,) = [node for node in model.nodes if node.op == "BatchNormalization"]
    assert (bn.rule, bn.outputs, bn.once) == ("BatchNormalization.batch", ("y",), False)
    assert bn.inputs[:3] == ("x", "g", "b")
    assert bn.attribute("training_mode", 0) == 0
    others = [node for node in model.nodes if node.origin == "bn" and node is not bn]
    assert all(node.once and node.rule == "" for node in others)
    assert [node.op for node in others[:5]] == ["ReduceMean", "Sub", "Mul", "ReduceMean", "Squeeze"]
    assert model.types[bn.inputs[3]].shape == model.types[bn.inputs[4]].shape == (3,)
    assert [(s.name, s.updated) for s in model.statistics] == [("m", "m_new"), ("v", "v_new")]
    assert model.parameters == ("g", "b")


@pytest.mark.parametrize(
    "attributes, opset, outputs",
    [
        ("<spatial=1>", 8, "y"),
        ("<momentum=0.9>", 9, "y, mo, vo, ms, vs"),
        ("<training_mode=1>", 15, "y, mo, vo"),
        ("<training_mode=0>", 15, "y"),
    ],
)
def test_all_forms_of_batch_normalization_are_equivalent(attributes: str, opset: int, outputs: str):
    model = read(bn_model(attributes, opset=opset, outputs=outputs))
    x = normal(2, 3, 4, 5)
    (y,) = run_read(model, {"x": x}, "y")
    np.testing.assert_allclose(y, normalised(x.astype(np.float64), 1e-5), rtol=1e-4, atol=1e-5)


def test_frozen_scale_keeps_batch_statistics():
    model = read(bn_model(), freeze=["g"])
    assert model.parameters == ("b",)
    assert len(model.statistics) == 2


def test_nodes_update_a_shared_running_statistic_one_after_the_other():
    body = """(float[2,3,4,5] x) => (float[2,3,4,5] y) {
        z = BatchNormalization(x, g, b, m, v)  r = Relu(z)  y = BatchNormalization(r, g, b, m, v) }"""
    model = read(model_of(body, opset=15, **STATISTICS))
    x = normal(2, 3, 4, 5)
    (mean,) = run_read(model, {"x": x}, model.statistics[0].updated)
    first = 0.9 * STATISTICS["m"] + 0.1 * x.mean((0, 2, 3))
    second = np.maximum(normalised(x.astype(np.float64), 1e-5), 0).mean((0, 2, 3))
    np.testing.assert_allclose(mean, 0.9 * first + 0.1 * second, rtol=1e-4)
    assert len(model.statistics) == 2
    assert any("shared" in note for note in model.notes)


def dropout_model(nodes: str, opset: int = 18) -> TrainableModel:
    body = f"""(float[64,64] x) => (float[64,64] y) <float half = {{0.5}}, float none = {{0.0}}> {{
        z = Mul(x, w)  {nodes} }}"""
    return read(model_of(body, opset=opset, w=(64,)))


def test_dropout_is_on_and_seeded():
    model = dropout_model("a = Dropout(z, half)  y = Dropout(a)")
    first, second = [node for node in model.nodes if node.op == "Dropout"]
    assert first.attribute("seed") != second.attribute("seed")
    assert bool(model.weights[first.inputs[2]].load()) is True
    assert [float(model.weights[node.inputs[1]].load()) for node in (first, second)] == [0.5, 0.5]
    assert model.types[first.outputs[1]].dtype == onnx.TensorProto.BOOL
    x = np.ones((64, 64), np.float32)
    (found,) = run_read(model, {"x": x}, "y")
    assert 0.2 < (found != 0).mean() < 0.3
    np.testing.assert_allclose(found, np.where(found != 0, 4 * normal(64), 0), rtol=1e-6)


def test_a_dropout_without_effect_is_removed_and_a_mask_with_a_reader_stays():
    model = dropout_model("n = Dropout(z, none)  a, k = Dropout(n)  f = Cast<to=1>(k)  y = Mul(a, f)")
    (dropout,) = [node for node in model.nodes if node.op == "Dropout"]
    assert dropout.outputs == ("a", "k")


@pytest.mark.parametrize(
    "nodes, left",
    [
        ("i = Identity(z)  j = Identity(i)  y = Add(i, j)", ["Mul", "Add"]),
        ("v = Identity(w)  y = Add(z, v)", ["Mul", "Add"]),
        ("i = Cast<to=1>(z)  y = Relu(i)", ["Mul", "Relu"]),
        ("i = Relu(z)  j = Identity(i)  k = Neg(i)  l = Add(j, k)  y = Identity(l)", ["Mul", "Relu", "Neg", "Add"]),
    ],
)
def test_identities_are_removed_but_output_names_stay(nodes: str, left: list[str]):
    model = dropout_model(nodes)
    ops = [node.op for node in model.nodes]
    assert ops[: len(left)] == left
    assert model.nodes[len(left) - 1].outputs == ("y",)
    assert model.outputs == ("y",)
    x = normal(64, 64)
    run_read(model, {"x": x})


def test_unread_indices_are_removed():
    body = """(float[1,2,8,8] x) => (float[1,2,4,4] y) {
        z = Mul(x, w)  y, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(z) }"""
    model = read(model_of(body, w=(8,)))
    assert model.nodes[1].outputs == ("y",)


def test_one_value_per_channel_has_a_note():
    model = read(bn_model(shape="1,3,1,1"))
    assert any("'bn' reads one value per channel" in note for note in model.notes)
    (variance,) = run_read(model, {"x": normal(1, 3, 1, 1)}, "v_new")
    np.testing.assert_allclose(variance, 0.9 * STATISTICS["v"], rtol=1e-6)


def test_freeze_bn_keeps_the_running_statistics():
    source = bn_model()
    model = read(source, freeze_bn=True)
    x = normal(2, 3, 4, 5)
    (y,) = run_read(model, {"x": x}, "y")
    mean, variance = per_channel(STATISTICS["m"], 4), per_channel(STATISTICS["v"], 4)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * per_channel(STATISTICS["g"], 4)
    np.testing.assert_allclose(y, expected + per_channel(STATISTICS["b"], 4), rtol=1e-4, atol=1e-5)
    assert model.statistics == ()
    assert model.parameters == ("g", "b")
    assert any("--freeze-bn" in note for note in model.notes)


def test_float32_statistics_keep_their_type_beside_a_float16_input():
    body = "(float16[4,3,4,5] x) => (float16[4,3,4,5] y) { y = BatchNormalization(x, g, b, m, v) }"
    values = {name: value.astype(np.float16) if name in "gb" else value for name, value in STATISTICS.items()}
    model = read(model_of(body, opset=15, **values))
    (bn,) = [node for node in model.nodes if node.op == "BatchNormalization"]
    assert {model.types[name].dtype for name in (*bn.inputs[3:], "m_new")} == {onnx.TensorProto.FLOAT}


def test_float16_statistics_are_computed_in_float32():
    kind = "float16[2,3,4,5]"
    body = f"({kind} x) => ({kind} y) {{ y = BatchNormalization(x, g, b, m, v) }}"
    halves = {name: value.astype(np.float16) for name, value in STATISTICS.items()}
    model = read(model_of(body, opset=15, **halves))
    # Squares of these overflow float16.
    x = (normal(2, 3, 4, 5) * 150).astype(np.float16)
    mean, variance = run_read(model, {"x": x}, "m_new", "v_new")
    exact = x.astype(np.float64)
    assert exact.var((0, 2, 3), ddof=1).max() < np.finfo(np.float16).max < np.square(exact).max()
    old = {name: value.astype(np.float64) for name, value in halves.items()}
    np.testing.assert_allclose(mean, 0.9 * old["m"] + 0.1 * exact.mean((0, 2, 3)), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(variance, 0.9 * old["v"] + 0.1 * exact.var((0, 2, 3), ddof=1), rtol=1e-2)


MIXED = """(float[2,3,4,5] x) => (float[2,3,4,5] y) {
    [first] h = BatchNormalization<training_mode=%d>(x, g, b, m, v)
    [second] y = BatchNormalization<training_mode=%d>(h, g2, b2, m2, v2)
}"""


def test_batch_normalization_marked_as_evaluation_keeps_its_statistics():
    others = {f"{name}2": value for name, value in STATISTICS.items()}
    source = model_of(MIXED % (0, 1), opset=15, **STATISTICS, **others)
    model = read(source)
    assert [statistic.name for statistic in model.statistics] == ["m2", "v2"]
    assert any("'first' keeps its running statistics" in note for note in model.notes)
    for modes in ((0, 0), (1, 1)):
        source = model_of(MIXED % modes, opset=15, **STATISTICS, **others)
        assert len(read(source).statistics) == 4
    assert read(source, freeze_bn=True).statistics == ()


def test_mean_variance_normalization_of_a_constant_channel():
    """Its deviation is zero, so only the mean has a gradient there."""
    body = (
        "(float[2,3,4,4] x) => (float[] loss) { a = Add(x, w) y = MeanVarianceNormalization(a) p = Mul(y, v) "
        "q = Add(p, v) l = Mul(q, q) loss = ReduceSum<keepdims=0>(l) }"
    )
    w, v = np.zeros((1, 3, 4, 4)), normal(1, 3, 4, 4).astype(np.float64)
    x = normal(2, 3, 4, 4)
    x[:, 0] = 0.3
    source = model_of(body, w=w, v=v)
    emitted = optimize(source, loss="loss", check=False).training_graph.model
    found = dict(zip([output.name for output in emitted.graph.output], run(emitted, {"x": x}), strict=True))
    assert all(np.isfinite(value).all() for value in found.values())
    wt, vt = (torch.from_numpy(value).requires_grad_() for value in (w, v))
    centred = torch.from_numpy(x).double() + wt
    centred = centred - centred.mean((0, 2, 3), keepdim=True)
    spread = (centred**2).mean((0, 2, 3), keepdim=True)
    normalised = centred / (spread.clamp(min=1e-36).sqrt() + 1e-9)
    ((normalised * vt + vt) ** 2).sum().backward()
    for name, wanted in (("w_grad", wt.grad), ("v_grad", vt.grad)):
        assert wanted is not None
        # In the constant channel the result is the rounding error of the mean over a deviation of zero.
        np.testing.assert_allclose(found[name][:, 1:], wanted.numpy()[:, 1:], rtol=1e-4, atol=1e-4)
