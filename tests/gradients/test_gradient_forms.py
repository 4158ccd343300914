"""The forms of gradients in each setting, and LRN in a setting that ONNX Runtime cannot run forward."""

from collections import Counter

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from onnxgc.gradients.registry import differentiate
from onnxgc.model.read import read_model
from tests.gradients.gradient_case import backward_operators, case, emitted, errors, normal
from tests.gradients.gradient_cases import CASES
from tests.model.model_helpers import run, with_weights
from tests.torch_operators import OPERATORS

_CASES = {str(entry): entry for entry in CASES}


@pytest.mark.parametrize(
    "name, operators",
    [
        ("3x3", {"Gemm": 9, "Transpose": 2}),
        ("two groups", {"MatMul": 9, "Transpose": 2}),
        ("depthwise", {"Mul": 9, "ReduceSum": 9}),
        ("depthwise, stride 2 of odd size", {"Mul": 9, "ReduceSum": 9}),
        ("depthwise in parts of the batch", {"Mul": 36, "ReduceSum": 36, "Add": 3}),
        ("depthwise, multiplier 3", {"MatMul": 9, "Transpose": 2}),
        ("1x1 by Gemm", {"Gemm": 1, "Transpose": 2}),
        ("1x1 by Gemm, stride 2 of odd size", {"Gemm": 1, "Transpose": 2, "Slice": 1}),
        ("1x1 by product, fewer inputs", {"MatMul": 1, "Transpose": 1, "ReduceSum": 1}),
        ("1x1 by product, more inputs", {"MatMul": 1, "Transpose": 2, "ReduceSum": 1}),
        ("1x1 with pads", {"Gemm": 1, "Transpose": 2, "Pad": 1, "Slice": 1}),
        ("stem 7x7 stride 2 pad 3", {"Conv": 1, "Transpose": 3}),
        ("stem that leaves rows unused", {"Conv": 1, "Transpose": 3, "Slice": 1}),
    ],
)
def test_form_of_the_weight_gradient(name: str, operators: dict[str, int]):
    step, graph = emitted(_CASES[f"Conv: {name}"])
    (chunk,) = [c for c in step.differentiated.chunks if c.gradients == (graph.gradient_of["w"],)]
    found = Counter(node.op for node in chunk.nodes)
    assert {op: found[op] for op in operators} == operators
    products = {"Conv", "Gemm", "MatMul", "Mul"}
    assert products & set(found) == products & set(operators)


@pytest.mark.parametrize(
    "name, operators",
    [
        ("3x3", ["ConvTranspose"]),
        ("depthwise", ["ConvTranspose"]),
        ("1x1 by Gemm", ["Transpose", "Conv"]),
        ("3D of kernel 1", ["ConvTranspose"]),
        ("1x1 by Gemm, stride 2 of odd size", ["ConvTranspose"]),
        ("1x1 with pads", ["ConvTranspose"]),
        ("groups of 1x1", ["ConvTranspose"]),
    ],
)
def test_form_of_the_input_gradient(name: str, operators: list[str]):
    step, graph = emitted(_CASES[f"Conv: {name}"])
    (source,) = [node.name for node in step.model.nodes if node.op == "Conv"]
    gradient = graph.gradient_of["x_weight"]
    (chunk,) = [c for c in step.differentiated.chunks if c.gradients == (gradient,) and c.source == source]
    assert [node.op for node in chunk.nodes] == operators


@pytest.mark.parametrize(
    "name, operators",
    [
        ("Slice: everything", []),
        ("Slice: one axis in the middle", ["Pad"]),
        ("Slice: step -1, whole axis", ["Slice"]),
        ("Slice: step -1, part", ["Slice", "Pad"]),
        ("Slice: step 2, even length", ["Reshape", "Pad", "Reshape"]),
        ("Slice: step 2, odd length", ["Reshape", "Pad", "Reshape", "Slice"]),
        ("Slice: step longer than the axis", ["Pad"]),
        ("Pad: zeros around", ["Slice"]),
        ("Pad: negative", ["Pad"]),
        ("Pad: negative and positive", ["Slice", "Pad"]),
    ],
)
def test_form_of_the_gradient_of_slice_and_pad(name: str, operators: list[str]):
    assert backward_operators(_CASES[name], ("Identity",)) == operators
    step, _ = emitted(_CASES[name])
    (source,) = [node.name for node in step.model.nodes if node.op == _CASES[name].rule]
    chunks = [chunk for chunk in step.differentiated.chunks if chunk.source == source]
    assert {name for chunk in chunks for name in step.differentiated.reads(chunk)} == set()


@pytest.mark.parametrize(
    "name, operators",
    [
        ("Gather: scalar, constant", ["Pad"]),
        ("Gather: a range", ["Pad"]),
        ("Gather: all backwards by negative indices", ["Slice"]),
        ("Gather: a range in steps of two", ["Pad", "Slice"]),
        ("Gather: a permutation", ["Gather"]),
        ("Gather: repeated, computed", ["OneHot", "MatMul"]),
        ("Gather: repeated, constant", ["OneHot", "MatMul"]),
        ("Gather: vector", ["OneHot", "MatMul"]),
        ("Gather: many rows, most of them read", ["Cast", "Expand", "Expand", "ScatterElements"]),
        (
            "Gather: many rows, computed",
            ["Expand", "ScatterElements", "Gather", "Expand", "Expand", "ScatterElements", "Gather"],
        ),
        ("Gather: many rows, constant", ["Expand", "Expand", "ScatterElements", "Gather"]),
        ("Gather: many rows, each once", ["Gather", "Pad", "Gather"]),
        ("Gather: float64", ["Cast", "Expand", "Expand", "ScatterElements"]),
        ("GatherND: rows in order", ["Pad"]),
        ("GatherND: batch with equal indices", ["OneHot", "MatMul"]),
        ("Expand: to its own shape", []),
        ("Expand: an axis", ["ReduceSum"]),
        ("Tile: once", []),
        ("Tile: both axes", ["ReduceSum"]),
        ("Pad: reflect, in front only", ["Slice", "Slice", "Expand", "ScatterElements"]),
        ("Resize: nearest by default", ["AveragePool", "Mul"]),
        ("Resize: nearest, five axes", ["AveragePool", "Mul"]),
        ("Resize: nearest, fraction", ["MatMul", "MatMul"]),
        ("Resize: linear by scales", ["MatMul", "MatMul"]),
        ("Resize: linear in blocks", [*["Slice", "MatMul"] * 4, "Concat", "MatMul"]),
        ("DepthToSpace: by default", ["Transpose"]),
        ("Col2Im: plain", ["Conv"]),
    ],
)
def test_form_of_the_gradient(name: str, operators: list[str]):
    assert backward_operators(_CASES[name]) == operators


@pytest.mark.parametrize("size", [2, 6])
def test_lrn_over_an_even_number_of_channels(size: int):
    # ONNX Runtime rejects the forward operator, so the test runs only the gradient.
    settings = {"size": size, "alpha": 0.9, "beta": 0.6, "bias": 1.5}
    attributes = ", ".join(f"{name}={value}" for name, value in settings.items())
    model = read_model(
        case("LRN", "even size", f"y = LRN<{attributes}>(x)", x=(2, 5, 3, 4)).model(),
        loss="mse",
        trainable=["x_weight"],
    )
    step = differentiate(model)
    (source,) = [node.name for node in model.nodes if node.op == "LRN"]
    (chunk,) = [chunk for chunk in step.chunks if chunk.source == source]
    x, dy = (normal(2, 5, 3, 4).value("even", name) for name in ("x", "dy"))

    leaf = torch.from_numpy(x).double().requires_grad_()
    (expected,) = torch.autograd.grad(OPERATORS["LRN"]([leaf], settings), leaf, torch.from_numpy(dy).double())

    read = {name for node in chunk.nodes for name in node.inputs}
    (incoming,) = read & set(step.gradient_of.values()) - set(chunk.gradients)
    constants = {name: value for name, value in step.constants.items() if name in read}
    graph = helper.make_graph(
        [node.to_proto() for node in chunk.nodes],
        "backward",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in ("x", incoming)],
        [helper.make_tensor_value_info(chunk.gradients[0], TensorProto.FLOAT, None)],
    )
    backward = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    (found,) = run(with_weights(backward, **constants), {"x": x, incoming: dy})
    assert np.linalg.norm(found - expected.numpy()) <= 1e-5 * float(expected.norm())


def test_the_gradient_of_a_bias_over_many_rows_is_accurate():
    """A sequential sum over 65,536 rows has ten times the error."""
    rows = case("Add", "many rows", "z = Add(a, b) y = Mul(z, w)", a=(65536, 4), b=(4,), w=(4,))
    assert errors(rows)["b"] <= 3e-7
