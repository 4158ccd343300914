import itertools
import math
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.api import optimize
from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.ir import Array
from tests.model.model_helpers import model_of, normal, read, run, run_read

SIDES = ("SAME_UPPER", "SAME_LOWER")


def pooled(operator: str, kernel: int, stride: int, side: str, size: int) -> tuple[onnx.ModelProto, Array]:
    body = f"""(float[1,2,{size}] x) => (float[a,b,c] y) {{
        z = Mul(x, w)
        y = {operator}<kernel_shape=[{kernel}], strides=[{stride}], auto_pad="{side}">(z) }}"""
    source = model_of(body, w=np.ones(size))
    model = read(source)
    assert not any("auto_pad" in node.attributes for node in model.nodes)
    (found,) = run_read(model, {"x": normal(1, 2, size)}, "y")
    return source, found


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("operator", ["AveragePool", "LpPool", "MaxPool"])
def test_auto_pad_matches_onnx_runtime(operator: str, side: str):
    for kernel, stride, size in itertools.product((1, 2, 3), (1, 2, 3, 5), (6, 7, 9)):
        source, found = pooled(operator, kernel, stride, side, size)
        is_padded = (math.ceil(size / stride) - 1) * stride + kernel >= size
        if is_padded or operator == "LpPool":
            (expected,) = run(source, {"x": normal(1, 2, size)})
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        else:
            with pytest.raises(Exception, match="padding values must be non-negative"):
                run(source, {"x": normal(1, 2, size)})


@pytest.mark.parametrize("operator, reduce", [("MaxPool", np.max), ("AveragePool", np.mean)])
def test_windows_without_padding_begin_at_the_first_element(operator: str, reduce: Any):
    x = normal(1, 2, 9)
    expected = np.stack([reduce(x[..., start : start + 2], axis=-1) for start in (0, 6)], -1)
    for side in SIDES:
        np.testing.assert_allclose(pooled(operator, 2, 6, side, 9)[1], expected, rtol=1e-6)


def test_auto_pad_with_dilations_is_an_error():
    body = """(float[1,1,9] x) => (float[1,1,9] y) {
        z = Mul(x, w)  [pool] y = MaxPool<kernel_shape=[2], dilations=[2], auto_pad="SAME_UPPER">(z) }"""
    with pytest.raises(UnsupportedOperatorError, match="MaxPool 'pool' has auto_pad and dilations"):
        read(model_of(body, w=(9,)))


def test_a_model_that_onnx_runtime_rejects_trains():
    body = """(float[1,1,9] x) => (float[1,1,2] y) {
        z = Mul(x, w)  y = MaxPool<kernel_shape=[2], strides=[6], auto_pad="SAME_UPPER">(z) }"""
    result = optimize(model_of(body, w=(9,)), loss="mse")
    assert any("is not possible" in note for note in result.report["notes"])
    graph = result.training_graph
    (gradient,) = run(
        graph.model, {"x": np.ones((1, 1, 9), np.float32), "target": np.zeros((1, 1, 2), np.float32)},
        graph.gradient_of["w"],
    )  # fmt: skip
    assert np.flatnonzero(gradient).size == 2
