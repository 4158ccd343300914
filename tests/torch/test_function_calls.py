"""Arguments of calls that follow the batch or the module's type."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnxgc.errors import ShapeError  # noqa: E402
from onnxgc.torch import from_onnx  # noqa: E402
from tests.model.model_helpers import normal, run, text_model, with_weights  # noqa: E402


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
