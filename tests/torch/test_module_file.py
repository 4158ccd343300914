"""Files with a module's weights, for weights in unusual places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from onnx import helper, numpy_helper  # noqa: E402

from onnxgc.torch import from_onnx  # noqa: E402
from tests.model.model_helpers import normal, run, text_model, with_weights  # noqa: E402


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
