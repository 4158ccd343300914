"""Newer operators at opset 18 compute ONNX's own test data, or keep their opset and a note says so."""

import importlib
import re
import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Array
from onnxgc.model.files.load import load_proto
from onnxgc.model.files.proto_to_draft import draft_of
from onnxgc.model.opset.convert_opset import at_target_opset
from onnxgc.model.static_shapes.input_shapes import with_input_shapes
from onnxgc.model.static_shapes.shape_walk import infer_shapes
from tests.model.model_helpers import normal, run, text_model

_DATA = "onnx.backend.test.case.node"
# Operators that are new or changed after opset 18, each with the module of its test data in ONNX.
OPERATORS = {
    "AffineGrid": "affinegrid",
    "Attention": "attention",
    "AveragePool": "averagepool",
    "CastLike": "castlike",
    "CausalConvWithState": "causal_conv_with_state",
    "CenterCropPad": "center_crop_pad",
    "DFT": "dft",
    "Gelu": "gelu",
    "GridSample": "gridsample",
    "GroupNormalization": "groupnormalization",
    "LinearAttention": "linear_attention",
    "MaxPool": "maxpool",
    "NegativeLogLikelihoodLoss": "negativeloglikelihoodloss",
    "Pad": "pad",
    "Range": "rangeop",
    "ReduceMax": "reducemax",
    "Reshape": "reshape",
    "Resize": "resize",
    "RMSNormalization": "rmsnormalization",
    "RotaryEmbedding": "rotaryembedding",
    "SoftmaxCrossEntropyLoss": "softmax_cross_entropy_loss",
    "SpaceToDepth": "spacetodepth",
    "SwiGLU": "swiglu",
    "Swish": "swish",
    "TopK": "topk",
}
# Operators without an equivalent at opset 18, with a part of the note.
STAYS = {
    "AveragePool": "AveragePool has the attribute dilations",
    "CastLike": "Cast of (float8|float4|u?int[24])",
    "GridSample": "GridSample of other than two dimensions",
    "Pad": "Pad with mode 'wrap'",
    "ReduceMax": "ReduceMax of bool",
    "Resize": "'half_pixel_symmetric'",
    "SpaceToDepth": "SpaceToDepth has the attribute mode",
}
# Functions without a CUDA kernel, or without one at opset 18.
EXPANDED = (
    "AffineGrid", "Attention", "CausalConvWithState", "CenterCropPad", "Gelu", "GroupNormalization",
    "LinearAttention", "NegativeLogLikelihoodLoss", "RMSNormalization", "RotaryEmbedding",
    "SoftmaxCrossEntropyLoss", "SwiGLU", "Swish",
)  # fmt: skip
# ONNX Runtime differs from ONNX's data at the source opset too.
_RUNTIME_DIFFERS = {
    "test_dft",
    "test_dft_axis",
    "test_dft_rfft",
    "test_resize_downsample_scales_cubic_align_corners",
    "test_resize_downsample_scales_linear_align_corners",
}


@cache
def data(operator: str) -> tuple[Any, ...]:
    """ONNX's test cases of one operator in float32, at the opset of the data."""
    with warnings.catch_warnings():
        # Some test data divide by zero and overflow on purpose.
        warnings.simplefilter("ignore")
        importlib.import_module(f"{_DATA}.{OPERATORS[operator]}")
    found = importlib.import_module(_DATA)._NodeTestCases
    return tuple(
        entry
        for entry in found
        if [node.op_type for node in entry.model.graph.node] == [operator]
        and "float16" not in entry.name
        and "uint64" not in entry.name
        and not entry.name.endswith(("16", "_BFLOAT16_to_FLOAT"))
    )


def _array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def downgraded(model: onnx.ModelProto, feeds: dict[str, Array]) -> Draft:
    draft, _ = with_input_shapes(draft_of(*load_proto(model)), None)
    assert {name: kind.shape for name, kind in draft.types.items()} == {k: v.shape for k, v in feeds.items()}
    return infer_shapes(at_target_opset(infer_shapes(draft)))


def as_model(draft: Draft) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node.to_proto() for node in draft.nodes],
        "downgraded",
        [helper.make_tensor_value_info(n, draft.types[n].dtype, draft.types[n].shape) for n in draft.inputs],
        [onnx.ValueInfoProto(name=name) for name in draft.outputs],
        [numpy_helper.from_array(weight.load(), name) for name, weight in draft.weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", draft.opset)], ir_version=9)


def with_constants(model: onnx.ModelProto, feeds: dict[str, Array]) -> onnx.ModelProto:
    """The model with settings as constants: integer vectors other than the first input."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for name in list(feeds)[1:]:
        value = feeds[name]
        if value.dtype.kind == "i" and value.ndim <= 1 and model.graph.node[0].op_type not in _INTEGER_DATA:
            changed.graph.initializer.append(numpy_helper.from_array(feeds.pop(name), name))
    if model.graph.node[0].op_type in ("AffineGrid", "Range", "Resize", "TopK"):
        for name in list(feeds)[1 if model.graph.node[0].op_type != "Range" else 0 :]:
            changed.graph.initializer.append(numpy_helper.from_array(feeds.pop(name), name))
    kept = [value for value in changed.graph.input if value.name in feeds]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    return changed


_INTEGER_DATA = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "RotaryEmbedding", "Attention")


def problem(entry: Any, operator: str, kept: set[int]) -> str:
    """The first difference of a downgraded case from ONNX's data; empty if there is none. Kept opsets are added."""
    inputs, outputs = entry.data_sets[0]
    feeds = {v.name: _array(x) for v, x in zip(entry.model.graph.input, inputs, strict=True)}
    source = with_constants(entry.model, feeds)
    draft = downgraded(source, feeds)
    if draft.opset != 18:
        kept.add(draft.opset)
        expected = STAYS.get(operator)
        return "" if expected and re.search(expected, draft.notes[-1]) else draft.notes[-1]
    if operator in EXPANDED and any(node.op == operator for node in draft.nodes):
        return "it is not expanded"
    if draft.problems:
        return next(iter(draft.problems.values()))
    results = run(as_model(draft), feeds, *draft.outputs)
    for name, found, given in zip(draft.outputs, results, outputs, strict=True):
        wanted = _array(given)
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"{name} is {found.dtype}{found.shape}, not {wanted.dtype}{wanted.shape}"
        tolerance = 1e-5 * max(1.0, float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0)))
        if not np.allclose(found, wanted, rtol=1e-3, atol=tolerance, equal_nan=True):
            return f"{name} differs by {np.nanmax(np.abs(found - wanted))}"
    return ""


@pytest.mark.parametrize("operator", OPERATORS)
def test_downgraded_operators_compute_the_test_data(operator: str):
    cases = [entry for entry in data(operator) if entry.name not in _RUNTIME_DIFFERS]
    assert cases
    kept: set[int] = set()
    wrong = {entry.name: text for entry in cases if (text := problem(entry, operator, kept))}
    assert wrong == {}
    assert kept or operator not in STAYS


def _downgraded_operator(nodes: str, opset: int, x: Array) -> Draft:
    """The draft of one downgraded operator; asserts that its output for x is unchanged."""
    sizes = ",".join(map(str, x.shape))
    source = text_model(f"(float[{sizes}] x) => (float[a,b] y) {{ {nodes} }}", opset=opset, ir_version=10)
    draft = downgraded(source, {"x": x})
    assert draft.opset == 18
    (expected,), (found,) = run(source, {"x": x}), run(as_model(draft), {"x": x}, "y")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    return draft


def test_the_default_axis_of_a_fourier_transform_becomes_nonnegative():
    draft = _downgraded_operator("y = DFT(x)", 20, normal(2, 3, 4, 5, 1))
    assert draft.nodes[0].attribute("axis") == 3


def test_saturation_of_older_types_is_dropped():
    body = "(float[2,3] x) => (float[2,3] y) { h = Cast<to=10, saturate=0>(x)  y = Cast<to=1, saturate=0>(h) }"
    draft = downgraded(text_model(body, opset=19, ir_version=9), {"x": normal(2, 3)})
    assert draft.opset == 18
    assert [dict(node.attributes) for node in draft.nodes] == [{"to": 10}, {"to": 1}]
