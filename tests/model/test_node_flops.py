from typing import Any

import onnx
import pytest

from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.operators.registry import node_flops
from onnxgc.model.read import read_model
from tests.model.model_helpers import image_input, light_path

CASES: list[tuple[str, dict[str, Any], list[tuple[int, ...]], tuple[int, ...], int]] = [
    ("Conv", {}, [(2, 3, 8, 8), (4, 3, 3, 3)], (2, 4, 6, 6), 2 * (2 * 4 * 36) * 27),
    ("Conv", {"group": 3}, [(2, 3, 8, 8), (3, 1, 3, 3), (3,)], (2, 3, 6, 6), (2 * 3 * 36) * (2 * 9 + 1)),
    ("ConvTranspose", {}, [(2, 4, 6, 6), (4, 3, 3, 3)], (2, 3, 8, 8), 2 * (2 * 4 * 36) * 27),
    ("Gemm", {}, [(5, 7), (7, 3), (3,)], (5, 3), 15 * (2 * 7 + 1)),
    ("Gemm", {"transA": 1}, [(7, 5), (7, 3)], (5, 3), 15 * 2 * 7),
    ("MatMul", {}, [(2, 5, 7), (7, 3)], (2, 5, 3), 2 * 30 * 7),
    ("MatMul", {}, [(7,), (7,)], (), 14),
    ("Einsum", {"equation": "...ij,...jk->...ik"}, [(2, 1, 3, 4), (5, 4, 6)], (2, 5, 3, 6), 2 * 2 * 5 * 3 * 4 * 6),
    ("Einsum", {"equation": "...ij, jk"}, [(2, 7, 3, 4), (4, 5)], (2, 7, 3, 5), 2 * 2 * 7 * 3 * 4 * 5),
    ("Einsum", {"equation": "bij,bjk->bik"}, [(2, 3, 4), (1, 4, 5)], (2, 3, 5), 2 * 2 * 3 * 4 * 5),
    ("MaxPool", {"kernel_shape": [2, 2]}, [(1, 2, 4, 4)], (1, 2, 2, 2), 8 * 4),
    ("GlobalAveragePool", {}, [(1, 2, 4, 4)], (1, 2, 1, 1), 32),
    ("ReduceSum", {}, [(3, 4, 5)], (), 60),
    ("Add", {}, [(3, 1), (4,)], (3, 4), 12),
    ("Softmax", {}, [(3, 4)], (3, 4), 84),
    ("Reshape", {}, [(3, 4), (1,)], (12,), 0),
    ("Gather", {}, [(9, 4), (2,)], (2, 4), 0),
    ("LSTM", {}, [(5, 2, 3), (1, 16, 3), (1, 16, 4)], (5, 1, 2, 4), 2 * 5 * 2 * 16 * 7),
]


@pytest.mark.parametrize("op, attributes, inputs, output, expected", CASES)
def test_flops(
    op: str, attributes: dict[str, Any], inputs: list[tuple[int, ...]], output: tuple[int, ...], expected: int
):
    names = tuple(f"in{index}" for index in range(len(inputs)))
    types = {name: TensorType(onnx.TensorProto.FLOAT, shape) for name, shape in zip(names, inputs, strict=True)}
    types["out"] = TensorType(onnx.TensorProto.FLOAT, output)
    assert node_flops(Node(op, names, ("out",), attributes), types) == expected


def test_a_contrib_operator_costs_one_operation_per_element():
    types = {name: TensorType(onnx.TensorProto.FLOAT, (3, 4)) for name in ("x", "y")}
    assert node_flops(Node("Warp", ("x",), ("y",), domain="acme"), types) == 12


@pytest.mark.parametrize("name, giga", [("light_resnet50", 7.7), ("light_vgg19", 39.3), ("light_squeezenet", 0.7)])
def test_networks_have_their_published_cost(name: str, giga: float):
    """Published multiply-add counts at 224 x 224, doubled, within 10 %."""
    path = light_path(name)
    model = read_model(path, input_shapes={image_input(path): (1, 3, 224, 224)})
    total = sum(node_flops(node, model.types) for node in model.nodes)
    assert total == pytest.approx(giga * 1e9, rel=0.1)
