"""The use of a weight determines its role, not its name."""

from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.errors import NoParametersError
from onnxgc.model.read import explain_weights, read_model
from onnxgc.model.weight_roles.roles import Role
from tests.model.model_helpers import model_of, normal, read, text_model, with_weights


def roles(model: onnx.ModelProto, **options: list[str]) -> dict[str, str]:
    return {decision.name: str(decision.role) for decision in explain_weights(model, **options)}


IMAGE = "(float[2,3,8,8] x) => (float[a,b,c,d] y)"
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "convolution": (f"{IMAGE} {{ y = Conv(x, w, b) }}", {"w": (4, 3, 1, 1), "b": (4,)}),
    "transposed convolution": (f"{IMAGE} {{ y = ConvTranspose(x, w, b) }}", {"w": (3, 4, 2, 2), "b": (4,)}),
    "slope": (f"{IMAGE} {{ y = PRelu(x, s) }}", {"s": (3, 1, 1)}),
    "instance norm": (f"{IMAGE} {{ y = InstanceNormalization(x, g, b) }}", {"g": (3,), "b": (3,)}),
    "updates": ("(float[4,3] x) => (float[4,3] y) <int64[2,1] i = {0, 2}> { y = ScatterND(x, i, w) }", {"w": (2, 3)}),
    "learned past": (
        "(float[1,2,5,4] x) => (float[1,2,5,4] y) { y, o, q = Attention(x, x, x, , p, r) }",
        {"p": (1, 2, 3, 4), "r": (1, 2, 3, 4)},
    ),
    "layer norm": (f"{IMAGE} {{ y = LayerNormalization(x, g, b) }}", {"g": (8,), "b": (8,)}),
    "layer scale": (f"{IMAGE} {{ y = Mul(g, x) }}", {"g": (3, 1, 1)}),
    "product": ("(float[2,3] x) => (float[2,4] y) { y = Gemm(x, w, b) }", {"w": (3, 4), "b": (4,)}),
    "weight first": ("(float[3,2] x) => (float[4,2] y) { y = MatMul(w, x) }", {"w": (4, 3)}),
    "embedding": ("(int64[2,5] x) => (float[2,5,4] y) { y = Gather(w, x) }", {"w": (9, 4)}),
    "through rearranging": (
        """(float[2,6] x) => (float[2,4] y) <int64[2] s = {6, 4}, int64[1] a = {0}> {
            u = Unsqueeze(w, a)  v = Reshape(u, s)  i = Identity(v)  y = MatMul(x, i) }""",
        {"w": (4, 6)},
    ),
    "through a cast": ("(float16[2,6] x) => (float16[2,4] y) { v = Cast<to=10>(w)  y = MatMul(x, v) }", {"w": (6, 4)}),
    "bias of one element": (
        "(float[2,3,4] x) => (float[a,b,c] y) { h = MatMul(x, w)  y = Add(h, b) }",
        {"w": (4, 1), "b": (1,)},
    ),
    "class token": (
        """(float[2,5,4] x) => (float[2,6,4] y) <int64[3] s = {2, 1, 4}> {
            e = Expand(w, s)  c = Concat<axis=1>(e, x)  y = Add(c, p) }""",
        {"w": (1, 1, 4), "p": (1, 6, 4)},
    ),
    "learned keys": (
        """(float[1,5,8] x) => (float[1,5,8] y) { k = Concat<axis=1>(p, x)  v = Concat<axis=1>(r, x)
            y = Attention<q_num_heads=2, kv_num_heads=2>(x, k, v, b) }""",
        {"p": (1, 3, 8), "r": (1, 3, 8), "b": (5, 8)},
    ),
    "offsets": (
        """(float[1,1,4,4] x) => (float[1,1,3,3] y) { y = DeformConv(x, w, o) }""",
        {"w": (1, 1, 2, 2), "o": (1, 8, 3, 3)},
    ),
    "recurrent": (
        "(float[5,2,3] x) => (float[5,1,2,4] y) { y = LSTM<hidden_size=4>(x, w, r, b) }",
        {"w": (1, 16, 3), "r": (1, 16, 4), "b": (1, 32)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_uses_of_parameters(case: str):
    body, shapes = CASES[case]
    opset = 23 if "Attention" in body or "DeformConv" in body else 18
    model = text_model(body, opset=opset, ir_version=10)
    model = with_weights(model, **{name: normal(*shape) for name, shape in shapes.items()})
    found = roles(model)
    assert {name: found[name] for name in shapes} == dict.fromkeys(shapes, "parameter")
    if "Attention" not in body:
        assert set(read(model).parameters) == shapes.keys()


@pytest.mark.parametrize(
    "nodes, value",
    [
        ("y = Mul(z, c)", np.asarray([[0.5]])),
        ("y = Pow(z, c)", np.float32(2)),
        ("y = Clip(z, c)", np.float32(0)),
        ("y = Resize(z, , c)", np.asarray([1.0, 2.0])),
        ("q = Transpose(z)  y = Gather(q, c)", np.asarray([0, 1])),
        ("y = Add(z, c)", np.asarray([0.0, -100.0, 0.0, 0.0])),
        ("y = Where(t, z, c)", np.asarray([-np.inf, 0, 0, 0])),
    ],
)
def test_uses_of_constants(nodes: str, value: np.ndarray):
    body = f"(float[2,3] x, bool[2,4] t) => (float[a,b] y) {{ z = MatMul(x, w)  {nodes} }}"
    assert roles(model_of(body, w=(3, 4), c=value)) == {"w": "parameter", "c": "constant"}


def test_a_weight_that_is_part_of_an_output_trains_with_a_note():
    body = """(float[2,5,4] x) => (float[2,6,4] y) <int64[3] s = {2, 1, 4}> {
        z = MatMul(x, m)  e = Expand(w, s)  y = Concat<axis=1>(e, z) }"""
    model = read(model_of(body, m=(4, 4), w=(1, 1, 4)))
    assert model.parameters == ("m", "w")
    assert "parameter 'w' is copied into output 'y'; if it is not learned, pass --freeze 'w'" in model.notes


def test_zeros_that_an_exporter_adds_to_an_output_are_constant():
    body = """(float[2,5,4] x) => (float[2,6,4] y) {
        z = MatMul(x, m)  w = Constant<value = float[2,1,4] {0, 0, 0, 0, 0, 0, 0, 0}>()
        y = Concat<axis=1>(w, z) }"""
    assert roles(model_of(body, m=(4, 4)))["w"] == "constant"


def test_neutral_values_of_a_group_normalisation_are_constants():
    """The form in which torch's TorchScript exporter writes GroupNorm."""
    body = """(float[2,4,3] x) => (float[2,4,3] y) <int64[3] t = {0, 2, -1}, int64[3] s = {2, 4, 3}> {
        one = Constant<value_floats = [1.0, 1.0]>()  zero = Constant<value_floats = [0.0, 0.0]>()
        r = Reshape(x, t)  n = InstanceNormalization(r, one, zero)  u = Reshape(n, s)
        v = Mul(u, g)  y = Add(v, b) }"""
    source = model_of(body, g=(4, 1), b=(4, 1))
    assert read(source).parameters == ("g", "b")


def test_frequencies_of_positions_are_constants():
    body = """(float[2,5,4] x, int64[2,5,1] positions) => (float[2,5,4] y) {
        z = MatMul(x, w)  p = Cast<to=1>(positions)  f = Mul(p, inv)  s = Sin(f)  y = Mul(z, s) }"""
    model = model_of(body, w=(4, 4), inv=(4,))
    found = {decision.name: decision for decision in explain_weights(model)}
    assert found["inv"].role is Role.CONSTANT
    assert "frequency table" in found["inv"].reason


def test_reason_names_the_node():
    model = model_of(f"{IMAGE} {{ [stem] y = Conv(x, w) }}", w=(4, 3, 1, 1))
    (decision,) = explain_weights(model)
    assert decision.reason == "input 1 of Conv 'stem'"
    assert decision.used_by == ("stem",)


def test_scale_and_shift_of_the_data_both_have_a_note():
    body = "(float[2,3] x) => (float[2,4] y) { a = Mul(x, scale)  z = Add(a, shift)  y = MatMul(z, w) }"
    source = model_of(body, scale=(3,), shift=normal(3, seed=1), w=(3, 4))
    notes = read_model(source).notes
    for name in ("scale", "shift"):
        expected = f"is applied directly to input 'x'; if it normalises the data, pass --freeze '{name}'"
        assert any(expected in note for note in notes)
    frozen = read_model(source, freeze=["scale", "shift"])
    assert frozen.parameters == ("w",)
    assert not any("--freeze" in note for note in frozen.notes)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mask of attention": (
        "(float[1,5,8] x) => (float[1,5,8] y) { y = Attention<q_num_heads=2, kv_num_heads=2>(x, x, x, s) }",
        {"s": np.triu(np.full((5, 5), -1e9, np.float32), 1)},
    ),
    "angles": (
        """(float[1,2,4,8] x) => (float[1,2,4,8] y) <int64[1,4] i = {0,1,2,3}> {
            y = RotaryEmbedding(x, s, t, i) }""",
        {"s": normal(4, 4), "t": normal(4, 4)},
    ),
    "no elements": ("(float[2,0] x) => (float[2,0] y) { y = Add(x, s) }", {"s": normal(0)}),
    "no factors": ("(float[2,0] x) => (float[2,0] y) { y = Mul(x, s) }", {"s": normal(1, 0)}),
    "weights of classes": (
        "(float[4,3] x, int64[4] t) => (float y) { y = SoftmaxCrossEntropyLoss(x, t, s) }",
        {"s": normal(3)},
    ),
    "scales": ("(float[1,1,4,4] x) => (float[1,1,8,8] y) { y = Resize(x, , s) }", {"s": np.ones(4)}),
    "limit": ("(float[4] x) => (float[4] y) { y = Clip(x, s) }", {"s": np.float32(0.5)}),
    "scale of 4 bits": (
        "(float[2,16] x) => (float[2,3] y) { y = com.microsoft.MatMulNBits<K=16, N=3>(x, b, s) }",
        {"b": np.ones((3, 1, 8), np.uint8), "s": normal(3)},
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_inputs_that_are_settings(case: str):
    body, values = SETTINGS[case]
    opset = 23 if "Attention" in body or "Rotary" in body else 18
    imports = f'"" : {opset}, "com.microsoft" : 1'
    model = with_weights(onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> g {body}"), **values)
    assert {name: roles(model)[name] for name in values} == dict.fromkeys(values, "constant")


def test_the_note_on_constants_counts_them():
    body = """(float[2,3] x) => (float[2,3] y) { h = MatMul(x, w)  m = Mul(h, mask)  c = Clip(m, low)
        n = Add(c, other)  y = Mul(n, half) }"""
    values: dict[str, Any] = {"w": normal(3, 3), "low": np.float32(0.25), "half": np.float32(0.5)}
    values |= {"mask": np.array([0, 1, 1], np.float32), "other": np.array([0, -1e9, 0], np.float32)}
    notes = read(model_of(body, **values)).notes
    assert (
        "floating-point tensors that do not train: 'mask', 'other' (2 weights), and 2 single numbers; "
        "`onnxgc inspect` lists the reasons, and --trainable +NAME trains one"
    ) in notes


def test_globs_match_literal_brackets_and_respect_case():
    body = "(float[2,3] x) => (float[2,3] y) { h = MatMul(x, NAME0)  y = MatMul(h, NAME1) }"
    model = text_model(body)
    for node, index in zip(model.graph.node, range(2), strict=True):
        node.input[1] = f"layers[{index}].weight"
    model = with_weights(model, **{f"layers[{index}].weight": normal(3, 3) for index in range(2)})
    for glob in ("layers[0].*", "layers[[]0].weight", "layers?0?.*"):
        assert read(model, freeze=[glob]).parameters == ("layers[1].weight",)
    assert read(model, trainable=["layers[1]*"]).parameters == ("layers[1].weight",)
    with pytest.raises(NoParametersError, match="matches no weight"):
        read_model(model, freeze=["Layers*"])


def test_outputs_that_are_updated_statistics_are_dropped_with_a_note():
    body = """(float[4,3] x) => (float[4,3] y, float[3] new_mean, float[3] new_variance) {
        h = MatMul(x, w)
        y, new_mean, new_variance = BatchNormalization<training_mode=1>(h, g, b, mean, v) }"""
    values = {"w": normal(3, 3), "g": normal(3), "b": normal(3), "mean": normal(3), "v": np.ones(3)}
    found = read(model_of(body, **values))
    assert [statistic.name for statistic in found.statistics] == ["mean", "v"]
    assert found.outputs == ("y",)
    expected = "output 'new_mean' is the running statistic 'mean' after a step; in the training file it is"
    assert any(note.startswith(expected) for note in found.notes)


def test_globs_override_inferred_roles():
    body = """(float[2,3] x) => (float[2,4] y) {
        z = MatMul(x, body_w)  h = MatMul(z, head_w)  s = Mul(h, scale)  y = Add(s, head_b) }"""
    values: dict[str, Any] = {
        "body_w": normal(3, 3),
        "head_w": normal(3, 4),
        "head_b": normal(4),
        "scale": np.float32(2),
    }
    model = model_of(body, **values)
    assert read_model(model, freeze=["body_*"]).parameters == ("head_w", "head_b")
    assert read_model(model, trainable=["+scale"]).parameters == ("body_w", "head_w", "head_b", "scale")
    assert read_model(model, trainable=["scale", "+head_*"]).parameters == ("head_w", "head_b", "scale")
    assert read_model(model, freeze=["*"], trainable=["head_*"]).parameters == ("head_w", "head_b")
    assert roles(model, freeze=["body_*"])["body_w"] == "frozen"


def test_running_statistics_cannot_train():
    body = f"{IMAGE} {{ [bn] y = BatchNormalization(x, g, b, mean, v) }}"
    model = model_of(body, g=(3,), b=(3,), mean=(3,), v=np.ones(3))
    with pytest.raises(NoParametersError, match=r"--trainable 'mean' matches only running statistics.* 'bn'"):
        explain_weights(model, trainable=["mean"])
    expected = {"g": "parameter", "b": "parameter", "mean": "statistic", "v": "statistic"}
    assert roles(model) == roles(model, trainable=["*"]) == roles(model, freeze=["mean"]) == expected


def test_parameters_that_do_not_reach_the_loss_are_left_out():
    body = "(float[2,3] x) => (float[2,4] y, float[2,4] other) { y = MatMul(x, w)  other = MatMul(x, v) }"
    model = read_model(model_of(body, w=(3, 4), v=(3, 4)))
    assert model.parameters == ("w",)
    assert "v" not in model.weights
    assert "output 'other' does not reach the loss and is left out" in model.notes


def test_a_shared_running_statistic_becomes_a_separate_weight():
    """Exporters store equal weights once: an untrained bias and the initial running mean."""
    body = """(float[2,3] x) => (float[a,b] y) {
        h = MatMul(x, w)  n = BatchNormalization(h, one, zero, zero, one)  y = MatMul(n, w)
    }"""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    model = read(model_of(body, w=(3, 3), one=ones, zero=zeros))
    assert set(model.parameters) == {"w", "one", "zero"}
    statistics = [statistic.name for statistic in model.statistics]
    assert len(statistics) == 2
    assert not set(statistics) & set(model.parameters)
    assert any("stored once for several uses" in note for note in model.notes)
