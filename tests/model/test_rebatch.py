"""A file with a literal batch, read for another: each sample's result stays equal, or the file is refused."""

import re

import numpy as np
import onnx
import pytest

from onnxgc.errors import ShapeError
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from onnxgc.model.rebatch.axis_change import AxisChange, reshaped
from tests.model.model_helpers import normal, run, run_read, text_model, with_weights

BATCHES = [(1, 4), (2, 4), (3, 2)]
WEIGHTS = {
    "w": normal(6, 6),
    "g": normal(6, 6, seed=1),
    "token": normal(1, 1, 6),
    "place": normal(1, 1, 6, seed=2),
    "table": normal(3, 6),
    "half": np.asarray(0.5),
    "one": np.eye(1),
    "four": np.ones(4),
    "first": np.asarray(0),
}

# Nodes from `z` of [B, 4, 6] to `y` of [B, ...]; braces contain constants, which may be multiples of B.
REWRITTEN = {
    "flattened": "y = Reshape(z, {B, -1})",
    "zeros not copied": "y = Reshape<allowzero=1>(z, {B, -1})",
    "heads of all samples": """
        a = Reshape(z, {B, -1, 2, 3})  h = Transpose<perm=[0,2,1,3]>(a)  q = Reshape(h, {2B, -1, 3})
        k = Transpose<perm=[0,2,1]>(q)  s = MatMul(q, k)  p = Softmax<axis=2>(s)  v = MatMul(p, q)
        o = Reshape(v, {B, 2, -1, 3})  t = Transpose<perm=[0,2,1,3]>(o)  y = Reshape(t, {B, 4, 6})""",
    "batch in the middle": """
        t = Transpose<perm=[1,0,2]>(z)  a = Reshape(t, {-1, 2B, 3})  h = Transpose<perm=[1,0,2]>(a)
        y = Reshape(h, {B, -1, 6})""",
    "rest behind": """
        a = Reshape(z, {-1, 6})  b = Relu(a)  c = Reshape(b, {B, 4, -1})
        y = ReduceMean<keepdims=0>(c, {1})""",
    "rows": "a = Reshape(z, {4B, 6})  b = Gemm(a, g)  y = Reshape(b, {B, 4, 6})",
    "class token": "e = Expand(token, {B, 1, 6})  y = Concat<axis=1>(e, z)",
    "token with a place": "e = Expand(token, {B, 1, 6})  f = Add(e, place)  y = Concat<axis=1>(f, z)",
    "looked up": "i = Expand({1}, {B, 4})  e = Gather(table, i)  y = Add(z, e)",
    "elements looked up": "i = Expand({1}, {B, 4, 2})  y = GatherElements<axis=2>(z, i)",
    "elements written": """
        i = Expand({1}, {B, 4, 1})  u = Expand(half, {B, 4, 1})  y = ScatterElements<axis=2>(z, i, u)""",
    "keys for heads of all samples": """
        a = Reshape(z, {B, 4, 2, 3})  h = Transpose<perm=[0,2,1,3]>(a)  q = Reshape(h, {-1, 4, 3})
        p = Reshape(g, {2, 6, 3})  c = Tile(p, {B, 1, 1})  k = Transpose<perm=[0,2,1]>(c)  s = MatMul(q, k)
        m = Softmax<axis=2>(s)  v = MatMul(m, c)  o = Reshape(v, {B, 2, 4, 3})
        y = Transpose<perm=[0,2,1,3]>(o)""",
    "queries of parameters": """
        e = Expand(token, {B, 3, 6})  q = MatMul(e, g)  r = Reshape(q, {B, 3, 2, 3})
        h = Transpose<perm=[0,2,1,3]>(r)  f = Reshape(h, {2B, 3, 3})  a = Reshape(z, {B, 4, 2, 3})
        k = Transpose<perm=[0,2,3,1]>(a)  b = Reshape(k, {2B, 3, 4})  s = MatMul(f, b)
        y = Reshape(s, {B, -1, 3, 4})""",
    "one of several states": """
        e = Expand(token, {3, B, 6})  i = Gather<axis=0>(e, first)  s = Slice(e, {0}, {1}, {0})
        q = Squeeze(s, {0})  m = ReduceMean<keepdims=0>(z, {1})  y = Concat<axis=1>(m, i, q)""",
    "first half": "d = Neg(z)  c = Concat<axis=0>(z, d)  y = Slice(c, {0}, {B}, {0})",
    "both halves": "d = Neg(z)  c = Concat<axis=0>(z, d)  e, f = Split<axis=0>(c, {B, B})  y = Mul(e, f)",
    "copies of samples": """
        u = Unsqueeze(z, {1})  e = Expand(u, {B, 3, 4, 6})  a = Reshape(e, {3B, 4, 6})  b = Relu(a)
        c = Reshape(b, {B, 3, 4, 6})  y = ReduceMean<keepdims=0>(c, {1})""",
    "resized": """u = Unsqueeze(z, {1})  y = Resize<mode="nearest">(u, , , {B, 1, 8, 12})""",
}

REFUSED = {
    "four groups": (
        "a = Reshape(z, {4, -1})  s = Softmax<axis=0>(a)  y = Reshape(s, {B, 4, 6})",
        "inferred from a literal shape only|does not show which of its sizes change",
    ),
    "a certain sample": ("y = Gather<axis=0>(z, first)", "selects particular samples of 'z'"),
    "all but a sample": ("y = Slice(z, {1}, {1000}, {0})", "selects particular samples of 'z'"),
    "a sum": ("s = ReduceSum<keepdims=0>(z)  y = Mul(s, half)", "it sums over samples"),
    "pairs": ("f = Reshape(z, {B, -1})  t = Transpose(f)  y = MatMul(f, t)", "pairs samples with samples"),
    "padded": ("y = Pad(z, {1, 0, 0, 0, 0, 0})", "pads 'z' along the batch"),
}


def exported(body: str, batch: int) -> onnx.ModelProto:
    literals: dict[str, Array] = {}

    def named_literal(match: re.Match[str]) -> str:
        texts = [text.strip() for text in match[1].split(",")]
        sizes = [int(text[:-1] or 1) * batch if text.endswith("B") else int(text) for text in texts]
        literals[f"literal{len(literals)}"] = np.asarray(sizes)
        return f"literal{len(literals) - 1}"

    nodes = re.sub(r"\{([^}]*)\}", named_literal, body)
    model = text_model(f"(float[{batch},4,6] x) => (float[] y) {{ z = MatMul(x, w)  {nodes} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    read = {name for node in model.graph.node for name in node.input}
    return with_weights(model, **{n: v for n, v in WEIGHTS.items() if n in read}, **literals)


def read_at(source: onnx.ModelProto, batch: int) -> tuple[Array, Array]:
    x = normal(batch, 4, 6, seed=5)
    model = read_model(source, input_shapes={"x": x.shape}, loss="mse")
    (found,) = run_read(model, {"x": x}, "y")
    return x, found


@pytest.mark.parametrize("name", REWRITTEN)
@pytest.mark.parametrize("old, new", BATCHES)
def test_each_sample_keeps_its_result(name: str, old: int, new: int):
    source = exported(REWRITTEN[name], old)
    x, found = read_at(source, new)
    assert found.shape[0] == new
    for sample in range(new):
        # The same sample at another position, among other samples.
        batch = normal(old, 4, 6, seed=9)
        batch[-1] = x[sample]
        np.testing.assert_allclose(found[sample], run(source, {"x": batch})[0][-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("old, new", BATCHES)
def test_graphs_that_may_mix_samples_are_refused(name: str, old: int, new: int):
    body, reason = REFUSED[name]
    with pytest.raises(ShapeError, match=reason) as caught:
        read_at(exported(body, old), new)
    assert str(caught.value).count("export the model with dynamic dimensions") == 1


def assert_in_pairs(source: onnx.ModelProto) -> None:
    """Checks that a file for two samples, read for four, gives the results of both pairs."""
    x, found = read_at(source, 4)
    expected = np.concatenate([run(source, {"x": x[start : start + 2]})[0] for start in (0, 2)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# InstanceNormalization as exporters write it for a literal batch.
CHANNELS = "a = Reshape(z, {1, -1, 6})  m = ReduceMean(a, {0, 2})  b = Sub(a, m)  y = Reshape(b, {B, 4, 6})"


def test_samples_may_be_channels():
    assert_in_pairs(exported(CHANNELS, 2))


@pytest.mark.parametrize(
    "body",
    [
        CHANNELS,
        "a = Reshape(z, {1, -1, 6})  b, p, q = BatchNormalization<training_mode=1>(a, four, four, four, four)"
        "  y = Reshape(b, {B, 4, 6})",
    ],
)
def test_samples_of_a_batch_of_one_that_may_be_channels_are_refused(body: str):
    with pytest.raises(ShapeError, match=r"literal shape only|may fold samples into its channels"):
        read_at(exported(body, 1), 4)


@pytest.mark.parametrize("old", [2, 3])
def test_a_constant_that_differs_between_samples_is_refused(old: int):
    source = exported("y = Mul(z, each)", old)
    source.graph.initializer.append(onnx.numpy_helper.from_array(normal(old, 1, 1), "each"))
    with pytest.raises(ShapeError, match=r"'each' of .* depends on the batch dimension"):
        read_at(source, 5)


def test_an_identity_matrix_of_one_sample_is_refused():
    body = "m = ReduceMean<keepdims=0>(z, {1})  t = Transpose(m)  p = MatMul(m, t)  y = Sub(p, one)"
    with pytest.raises(ShapeError, match="pairs samples with samples"):
        read_at(exported(body, 1), 4)


@pytest.mark.parametrize("old", [1, 2])
def test_random_numbers_are_drawn_for_each_new_sample(old: int):
    body = f"r = RandomUniform<shape=[{old},1,1]>()  k = Add(r, half)  d = Floor(k)  y = Mul(z, d)"
    model = read_model(exported(body, old), input_shapes={"x": (64, 4, 6)}, loss="mse")
    (random,) = (node for node in model.nodes if node.op == "RandomUniform")
    assert random.attribute("shape") == [64, 1, 1]
    assert model.types["y"].shape == (64, 4, 6)


def test_initial_states_of_recurrent_networks_are_rewritten():
    zeros = "t = Transpose<perm=[1,0,2]>(z)  h = Expand(half, {1, B, 3})"
    body = f"{zeros}  s, last = GRU<hidden_size=3>(t, a, r, , , h)  y = Transpose<perm=[1,0,2]>(last)"
    source = exported(body, 2)
    for name, value in (("a", normal(1, 9, 6)), ("r", normal(1, 9, 3))):
        source.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    assert_in_pairs(source)


def test_indices_of_strided_views_are_rewritten():
    """Exporters write torch.as_strided as a flat tensor and the index of each element."""
    places = np.arange(2)[:, None, None] * 24 + np.arange(6)[None, :, None] + np.arange(4)[None, None] * 6
    source = exported("f = Reshape(z, {-1})  y = Gather<axis=0>(f, places)", 2)
    source.graph.initializer.append(onnx.numpy_helper.from_array(places, "places"))
    assert_in_pairs(source)


@pytest.mark.parametrize(
    "body, batch, shape",
    [
        ("a = Slice(z, {0}, {2}, {1})  y = ReduceMean<keepdims=0>(a, {0})", 2, "2, 6"),
        ("t = Transpose<perm=[1,0,2]>(z)  y = Reshape(t, {1, -1})", 1, "1, 96"),
    ],
)
def test_an_output_that_keeps_the_batch_is_refused(body: str, batch: int, shape: str):
    with pytest.raises(ShapeError, match=rf"output 'y' of \[{shape}\] keeps the file's batch of {batch} where 4 is"):
        read_at(exported(body, batch), 4)


def test_a_note_reports_rewritten_literals():
    source = exported("y = Reshape(z, {B, -1})", 2)
    (note,) = (n for n in read_model(source, input_shapes={"x": (4, 4, 6)}).notes if "literal" in n)
    assert note == "1 literal shapes contained the file's batch of 2 and were rewritten for 4 ('Reshape_y')"


def test_other_sizes_do_not_change_the_batch():
    model = read_model(exported("y = Reshape(z, {-1, 24})", 2), input_shapes={"x": (2, 8, 6)}, loss="mse")
    assert model.types["y"].shape == (2, 48)
    assert any("contained the file's sizes and were rewritten" in note for note in model.notes)


def test_a_batch_above_one_has_one_position():
    (placed,) = reshaped([AxisChange(0, 4, 8)], (4, 3, 4), (4, 4, 3))
    assert placed == (AxisChange(0, 4, 8),)
    assert list(reshaped([AxisChange(0, 4, 8, inner=2)], (8, 3), (2, 4, 3))) == []
    assert list(reshaped([AxisChange(0, 4, 8, outer=2)], (8, 3), (2, 4, 3))) == [(AxisChange(1, 4, 8),)]


def test_a_batch_of_one_is_unmerged_or_else_outermost():
    assert [one[0].axis for one in reshaped([AxisChange(0, 1, 4)], (1, 8), (1, 8))] == [0, 1]
    assert [one[0].axis for one in reshaped([AxisChange(1, 1, 4)], (5, 1, 6), (5, 2, 3))] == [1, 0]
    assert [one[0].axis for one in reshaped([AxisChange(1, 1, 4)], (5, 1, 6), (5, 6))] == [0, 1]
