from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from onnxgc.errors import ShapeError
from onnxgc.torch import from_onnx
from tests.model.model_helpers import normal, run, text_model, with_weights


def test_statistics_that_share_an_initializer_are_written_separately() -> None:
    """Exporters store equal weights once, such as a bias and a running mean."""
    body = "(float[4,3] x) => (float[4,3] y) { a = Add(x, zeros)y = BatchNormalization(a, ones, zeros, zeros, ones) }"
    model = with_weights(text_model(body), zeros=np.zeros(3), ones=np.ones(3))
    module = from_onnx(model, trainable=["zeros"])
    x = torch.randn(4, 3) + 2
    module.train()(x)
    proto = module.to_onnx()
    onnx.checker.check_model(proto)
    with torch.no_grad():
        expected = module.eval()(x).numpy()
    (found,) = run(proto, {"x": x.numpy()})
    assert np.allclose(found, expected, atol=1e-5)
    assert not np.allclose(found, run(model, {"x": x.numpy()})[0], atol=1e-2)


def test_weights_in_constant_nodes_and_external_data_are_written(tmp_path: Path) -> None:
    stored = with_weights(text_model("(float[4,40] x) => (float[4,30] y) { a = MatMul(x, w) y = Add(a, b) }"))
    value, bias = normal(40, 30), normal(30)
    stored.graph.node.insert(0, helper.make_node("Constant", [], ["b"], value=numpy_helper.from_array(bias)))
    stored.graph.initializer.append(numpy_helper.from_array(value, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(stored, path, save_as_external_data=True, location="weights", size_threshold=0)
    module = from_onnx(path)
    assert set(module.state_dict()) == {"w", "b"}
    with torch.no_grad():
        module.get_parameter("w").mul_(2)
        module.get_parameter("b").add_(1)
    x = normal(4, 40)
    (found,) = run(module.to_onnx(), {"x": x})
    assert np.allclose(found, 2 * x @ value + bias + 1, atol=1e-4)


def test_a_cast_to_the_models_own_type_follows_the_module() -> None:
    model = text_model("(int64[2,3] x) => (float[2,3] y) { f = Cast<to=1>(x) y = Mul(f, w) }")
    module = from_onnx(with_weights(model, w=normal(2, 3))).double()
    assert module(torch.ones(2, 3, dtype=torch.int64)).dtype == torch.float64


def test_constants_follow_the_batch() -> None:
    model = with_weights(
        text_model(
            "(float[batch,6] x) => (float[b,6] y) {"
            "shape = Shape(x) zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>()"
            "size = Slice(shape, zero, one) three = Constant<value_ints=[3]>()"
            "minus = Constant<value_ints=[-1]>()"
            "target = Concat<axis=0>(three, size, minus) parts = Reshape(x, target) a = Mul(parts, w)"
            "back = Concat<axis=0>(size, minus) y = Reshape(a, back) }"
        ),
        w=normal(1, 1, 2),
    )
    module = from_onnx(model).eval()
    for batch in (1, 4, 9):
        x = normal(batch, 6)
        (expected,) = run(module.to_onnx(), {"x": x})
        assert np.array_equal(module(torch.from_numpy(x)).detach().numpy(), expected)
    assert from_onnx(model, input_shapes={"x": (4, 6)}).batched_inputs == ("x",)


def test_sizes_as_data_follow_the_batch() -> None:
    module = from_onnx(
        text_model("(int64[batch,2] x) => (int64[b,2] y, int64[2] shape) { shape = Shape(x) y = Add(x, shape) }")
    )
    for batch in (1, 4):
        y, shape = module(torch.zeros(batch, 2, dtype=torch.int64))
        assert shape.tolist() == [batch, 2]
        assert y.tolist() == [[batch, 2]] * batch


def test_other_dependences_fix_the_batch() -> None:
    model = text_model(
        "(float[batch,2] x) => (float[b,2] y){ shape = Shape(x) sizes = Cast<to=1>(shape) y = Div(x, sizes) }"
    )
    module = from_onnx(model, input_shapes={"x": (4, 2)})
    assert module.batched_inputs == ()
    assert torch.equal(module(torch.ones(4, 2)), torch.tensor([[0.25, 0.5]] * 4))
    with pytest.raises(ShapeError, match=r"the shape \[3, 2\], and the model was read for \[4, 2\]"):
        module(torch.ones(3, 2))
