"""Weights of every kind are lifted out of the graph, and read on demand only."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgc.errors import ModelFileError
from onnxgc.model.core.stored_weights import ArrayWeight, FilledWeight, StoredWeight
from onnxgc.model.read import read_model
from tests.model.model_helpers import model_of, normal, run_read, text_model, with_weights


def test_initializers_that_are_inputs_are_weights():
    body = "(float[4,3] x, float[3,2] w) => (float[4,2] y) { y = MatMul(x, w) }"
    model = read_model(model_of(body, opset=9, ir_version=3, w=(3, 2)))
    assert model.inputs == ("x",)
    assert model.parameters == ("w",)


def test_constant_nodes_are_weights():
    body = """(float[4,2] x) => (float[4,2] y) {
        w = Constant<value = float[2,2] {1.0, 2.0, 3.0, 4.0}>()
        b = Constant<value_floats = [0.5, 0.25]>()
        s = Constant<value_float = 2.0>()
        z = MatMul(x, w)  v = Add(z, b)  y = Mul(v, s)
    }"""
    model = read_model(text_model(body))
    assert model.parameters == ("w", "b")
    assert model.weights["w"].load().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert model.weights["b"].load().tolist() == [0.5, 0.25]
    assert isinstance(model.weights["b"], ArrayWeight)
    assert float(model.constant("s")) == 2.0  # type: ignore[arg-type]


def test_constant_of_shape_is_not_materialised():
    body = """(float[1,1000000] x) => (float[1,1000000] y) <int64[2] s = {1000000, 1000000}> {
        w = ConstantOfShape<value = float[1] {0.5}>(s)  y = MatMul(x, w)
    }"""
    model = read_model(text_model(body))
    weight = model.weights["w"]
    assert isinstance(weight, FilledWeight)
    assert weight.type.size_bytes == 4 * 10**12
    assert model.parameters == ("w",)
    value = read_model(text_model(body.replace("1000000", "3"))).weights["w"].load()
    assert value.dtype == np.float32
    assert value.tolist() == [[0.5] * 3] * 3


def test_external_data_is_read_on_demand(tmp_path: Path):
    body = "(float[4,30] x) => (float[4,20] y) { z = MatMul(x, w) y = Add(z, b) }"
    weight = normal(30, 20)
    source = model_of(body, w=weight, b=(20,))
    path = tmp_path / "a.onnx"
    onnx.save(source, path, save_as_external_data=True, location="a.data", size_threshold=0)
    model = read_model(path)
    assert isinstance(model.weights["w"], StoredWeight)
    np.testing.assert_array_equal(model.weights["w"].load(), weight)

    (tmp_path / "a.data").unlink()
    again = read_model(path)
    assert again.parameters == ("w", "b")
    assert again.types == model.types
    with pytest.raises(ModelFileError, match="'w' cannot be read"):
        again.weights["w"].load()


def test_a_given_model_is_not_changed():
    body = """(float[N,3,8,8] x) => (float[N,4] y) {
        z = Conv(x, w)  r = Dropout(z)  i = Identity(r)  g = GlobalAveragePool(i)  y = Flatten(g)
    }"""
    source = model_of(body, opset=11, w=(4, 3, 3, 3))
    onnx.helper.set_model_props(source, {"author": "someone"})
    before = source.SerializeToString(deterministic=True)
    assert read_model(source, input_shapes={"x": (2, 3, 8, 8)}).metadata["author"] == "someone"
    assert source.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("opset, axes", [(11, (1, 2)), (17, (1,))])
def test_functions_of_an_older_opset_keep_their_meaning_and_may_call_each_other(opset: int, axes: tuple[int, ...]):
    """Up to opset 12 Softmax flattens all dimensions from its axis on."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        net (float[2,3,4] x) => (float[2,3,4] y) {{ z = Mul(x, w)  v = own.twice(z)  y = own.soft(v) }}
        <domain: "own", opset_import: ["": {opset}, "own": 1]>
        twice (a) => (b) {{ c = own.soft(a)  b = own.soft(c) }}
        <domain: "own", opset_import: ["": {opset}]>
        soft (a) => (b) {{ k = Constant<value = float {{0.5}}>()  c = Mul(a, k)  b = Softmax<axis=1>(c) }}"""
    )
    x, w = normal(2, 3, 4), normal(4)
    read = read_model(with_weights(model, w=w), loss="mse")
    assert not any(node.domain for node in read.nodes)
    (found,) = run_read(read, {"x": x}, "y")
    expected = x * w
    for _ in range(3):
        expected = np.exp(expected / 2) / np.exp(expected / 2).sum(axes, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
