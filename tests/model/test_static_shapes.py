import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgc.model.core.ir import TrainableModel
from tests.model.model_helpers import assert_same_output, model_of, normal, read


def mse(model: onnx.ModelProto, **shapes: tuple[int, ...]) -> TrainableModel:
    return read(model, input_shapes=shapes)


def test_symbolic_dimensions_become_one_with_a_note():
    body = "(float[batch,3,height,width] x) => (float[batch,4,h,w] y) { y = Conv(x, w) }"
    model = mse(model_of(body, w=(4, 3, 1, 1)))
    assert model.types["x"].shape == (1, 3, 1, 1)
    assert any(
        "'batch', 'height', 'width' are set to 1; pass --input-shapes x:batch,3,height,width" in note
        for note in model.notes
    )
    given = mse(model_of(body, w=(4, 3, 1, 1)), x=(5, 3, 2, 2))
    assert not any("set to 1" in note for note in given.notes)


def test_a_declared_empty_dimension_is_kept_with_a_note():
    body = "(float[0,3] x) => (float[0,2] y) { y = MatMul(x, w) }"
    model = mse(model_of(body, w=(3, 2)))
    assert model.types["y"].shape == (0, 2)
    assert any("declared empty, [0, 3]; pass --input-shapes x:N,3" in note for note in model.notes)


def test_a_symbol_takes_its_size_from_another_input():
    nodes = "m = ReduceMax<keepdims=0>(z, a) h = Add(x, m) y = MatMul(h, w)"
    body = f"(float[N,3] x, float[N,3,M] z) => (float[N,2] y) {{ {nodes} }}"
    source = model_of(body, w=(3, 2), a=np.array([2]))
    model = mse(source, x=(5, 3))
    assert model.types["z"].shape == (5, 3, 1)
    assert "input 'z': dimension 'N' is set to 5, as given for another input" in model.notes
    assert "input 'z': dimension 'M' is set to 1; pass --input-shapes z:5,3,M" in model.notes


def test_an_input_that_keeps_the_batch_of_the_file_is_reported():
    body = "(float[1,3] x, float[1,3] mask) => (float[1,2] y) { h = Add(x, mask) y = MatMul(h, w) }"
    source = model_of(body, w=(3, 2))
    note = "if it holds samples too, pass --input-shapes mask:5,3"
    assert any(text.endswith(note) for text in mse(source, x=(5, 3)).notes)
    assert not any(text.endswith(note) for text in mse(source, x=(5, 3), mask=(5, 3)).notes)
    assert not any(text.endswith(note) for text in mse(source, x=(1, 3)).notes)


def test_stale_declared_shapes_are_dropped():
    body = "(float[1,3,8,8] x) => (float[1,4,8,8] y) { z = Conv(x, w)  y = Relu(z) }"
    source = model_of(body, w=(4, 3, 1, 1))
    source.graph.value_info.append(helper.make_tensor_value_info("z", 1, [1, 4, 8, 8]))
    model = mse(source, x=(6, 3, 10, 12))
    assert model.types["z"].shape == model.types["y"].shape == (6, 4, 10, 12)


@pytest.mark.parametrize(
    "target, expected", [([1, -1], (3, 12)), ([1, 2, 2, 3], (3, 2, 2, 3)), ([4, 3], (12, 3)), ([2, 2, 3], (6, 2, 3))]
)
def test_literal_reshape_targets_follow_the_batch(target: list[int], expected: tuple[int, ...]):
    body = "(float[1,2,2,3] x) => (float[a] y) { z = Mul(x, w)  y = Reshape(z, s) }"
    source = model_of(body, w=(3,), s=np.asarray(target))
    del source.graph.output[0].type.tensor_type.shape.dim[:]
    source.graph.output[0].type.tensor_type.ClearField("shape")
    assert mse(source, x=(3, 2, 2, 3)).types["y"].shape == expected


@pytest.mark.parametrize("opset", [11, 18, 21])
def test_shape_arithmetic_is_folded(opset: int):
    axes = "<axes=[0]>(n)" if opset < 13 else "(n, zeros)"
    body = f"""(float[N,4,6] x) => (float[a,b] y) <int64[1] zeros = {{0}}> {{
        s = Shape(x)  i = Constant<value = int64 {{0}}>()  n = Gather(s, i)  m = Unsqueeze{axes}
        r = Constant<value = int64[1] {{-1}}>()  t = Concat<axis=0>(m, r)  z = Mul(x, w)  y = Reshape(z, t) }}"""
    model = mse(model_of(body, opset=opset, w=(6,)), x=(5, 4, 6))
    assert model.types["y"].shape == (5, 24)
    assert [node.op for node in model.nodes[:2]] == ["Mul", "Reshape"]
    target = model.constant(model.nodes[1].inputs[1])
    assert target is not None
    assert target.tolist() == [5, -1]


def test_parameters_are_not_folded_and_keep_their_names_if_frozen():
    body = """(float[2,3] x) => (float[2,4] y) <float two = {2.0}> {
        v = Transpose(w)  u = Mul(v, two)  z = MatMul(x, u)  y = Add(z, b) }"""
    source = model_of(body, w=(4, 3), b=(4,))
    model = mse(source)
    assert [node.op for node in model.nodes[:3]] == ["Transpose", "Mul", "MatMul"]
    assert model.parameters == ("w", "b")
    frozen = read(source, freeze=["w"])
    assert frozen.parameters == ("b",)
    assert "w" in frozen.weights


def test_a_computed_zero_bias_is_constant():
    """Torch's exporter writes it for a convolution without bias (optimize=False)."""
    body = """(float[1,3,8,8] x) => (float[1,4,8,8] y) <float zero = {0.0}> {
        n = Shape<start=0, end=1>(w)  b = Expand(zero, n)  y = Conv(x, w, b)
    }"""
    model = mse(model_of(body, w=(4, 3, 1, 1)))
    assert model.parameters == ("w",)
    assert model.weights["b"].load().tolist() == [0.0] * 4


def test_sequences_become_split():
    body = """(float[2,5] x) => (float[2,2] y)
        <int64 size = {2}, int64 i0 = {0}, int64 i1 = {-2}> {
        z = Mul(x, w)  q = SplitToSequence<axis=1>(z, size)
        a = SequenceAt(q, i0)  b = SequenceAt(q, i1)  y = Sub(a, b)
    }"""
    source = model_of(body, w=(5,))
    model = mse(source)
    assert [node.op for node in model.nodes[:3]] == ["Mul", "Split", "Sub"]
    assert_same_output(source, model, {"x": normal(2, 5, seed=3)}, rtol=0, atol=0)


def test_cast_like_becomes_cast():
    body = "(float[2,3] x, float16[1] h) => (float16[2,3] y) { z = Mul(x, w)  y = CastLike(z, h) }"
    model = mse(model_of(body, w=(3,)))
    cast = model.nodes[1]
    assert (cast.op, cast.attribute("to")) == ("Cast", onnx.TensorProto.FLOAT16)


def test_unsorted_nodes_are_sorted():
    source = model_of("(float[2,3] x) => (float[2,3] y) { z = Mul(x, w)  y = Relu(z) }", w=(3,))
    nodes = list(source.graph.node)[::-1]
    del source.graph.node[:]
    source.graph.node.extend(nodes)
    assert [node.op for node in mse(source).nodes[:2]] == ["Mul", "Relu"]


def test_node_names_are_made_unique():
    body = "(float[2,3] x) => (float[2,3] y) { [a] z = Mul(x, w)  [a] v = Relu(z)  y = Tanh(v) }"
    model = mse(model_of(body, w=(3,)))
    assert [node.name for node in model.nodes[:3]] == ["a", "a_2", "Tanh_y"]
    assert [node.origin for node in model.nodes[:3]] == ["a", "a", "Tanh_y"]


def test_a_contrib_operator_keeps_its_domain():
    body = "(float[2,3] x) => (float[2,4] y) { z = MatMul(x, w)  y = com.microsoft.RotaryEmbedding(z, g, g, g) }"
    node = mse(model_of(body, domains=', "com.microsoft": 1', w=(3, 4), g=(4,))).nodes[1]
    assert (node.domain, node.op, node.rule) == (
        "com.microsoft", "RotaryEmbedding", "com.microsoft::RotaryEmbedding"
    )  # fmt: skip


def test_model_without_standard_operators():
    body = "(float[2,3] x) => (float[2,3] y) { y = com.microsoft.BiasGelu(x, b) }"
    source = model_of(body, domains=', "com.microsoft": 1', b=(3,))
    del source.opset_import[0]
    assert mse(source).opset == 18


@pytest.mark.parametrize(
    "batch_dims, indices, expected", [(0, [1, -2], ()), (0, [1], (4,)), (1, [[0], [1], [2]], (3,))]
)
def test_gather_nd_with_a_constant_index(batch_dims: int, indices: list[int], expected: tuple[int, ...]):
    body = f"""(float[3,4] x) => (float[] y) {{
        z = Mul(x, w)  v = GatherND<batch_dims={batch_dims}>(z, i)  y = Exp(v) }}"""
    source = model_of(body, w=(4,), i=np.asarray(indices))
    source.graph.output[0].type.tensor_type.ClearField("shape")
    model = mse(source)
    assert model.types["y"].shape == expected
    assert_same_output(source, model, {"x": normal(3, 4, seed=3)}, rtol=1e-6)
