"""Models of any opset are read at opset 18 with the same results, or keep their opset and a note says so."""

import re

import onnx
import pytest

from onnxgc.errors import ModelFileError, UnsupportedOperatorError
from onnxgc.model.core.ir import Array
from tests.model.model_helpers import assert_same_output, model_of, normal, read

IMAGE = "(float[2,4,6,6] x) => (float[a,b] y)"
OLD_AXES = """z = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    r = Relu(z)  u = Unsqueeze<axes=[1]>(r)  q = Squeeze<axes=[1]>(u)
    m = ReduceSum<axes=[2,3], keepdims=0>(q)  y = Gemm<transB=1>(m, v, b)"""
NEW_AXES = """z = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    r = Relu(z)  u = Unsqueeze(r, one)  q = Squeeze(u, one)
    m = ReduceSum<keepdims=0>(q, last)  y = Gemm<transB=1>(m, v, b)"""
WEIGHTS = {"w": normal(5, 4, 3, 3), "v": normal(3, 5), "b": normal(3)}


def same_output(source: onnx.ModelProto, x: Array, **options: str) -> None:
    model = read(source, **options)
    assert (model.opset, model.ir_version) == (18, 9)
    assert_same_output(source, model, {"x": x}, atol=1e-5)


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_attributes_of_old_opsets_become_inputs(opset: int):
    ir_version = 3 if opset < 9 else 5
    body = f"{IMAGE} {{ {OLD_AXES} }}"
    source = model_of(body, opset=opset, ir_version=ir_version, **WEIGHTS)
    if ir_version == 3:
        source.graph.input.extend(
            onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in source.graph.initializer
        )
    same_output(source, normal(2, 4, 6, 6))


@pytest.mark.parametrize("opset", [13, 17, 19, 22])
def test_newer_opsets(opset: int):
    body = f"{IMAGE} <int64[1] one = {{1}}, int64[2] last = {{2,3}}> {{ {NEW_AXES} }}"
    same_output(model_of(body, opset=opset, **WEIGHTS), normal(2, 4, 6, 6))


def test_names_of_tensors_and_nodes_are_kept():
    body = """(float[2,4,6,6] x) => (float[2,5] y) {
        [conv] z = Conv(x, w)  [pool] y = ReduceSum<axes=[2,3],keepdims=0>(z) }"""
    model = read(model_of(body, opset=9, w=WEIGHTS["w"]))
    assert [(node.name, node.outputs[0]) for node in model.nodes[:2]] == [("conv", "z"), ("pool", "y")]


def test_old_resize_and_clip():
    body = """(float[2,4,6,6] x) => (float[2,4,12,12] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> {
        z = Mul(x, w)  c = Clip<min=0.0, max=1.0>(z)  y = Upsample<mode="nearest">(c, s) }"""
    same_output(model_of(body, opset=9, w=(6,)), normal(2, 4, 6, 6))


@pytest.mark.parametrize(
    "opset, nodes, expanded",
    [
        (20, 'y = Gelu<approximate="tanh">(z)', "Gelu"),
        (21, "y = GroupNormalization<num_groups=2>(z, g, h)", "GroupNormalization"),
        (23, "y = RMSNormalization(z, k)", "RMSNormalization"),
        (23, "y = Attention(z, z, z)", "Attention"),
        (24, "y = Swish(z)", "Swish"),
        (22, "y = Celu<alpha=0.5>(z)", "Celu"),
        (18, "y = Mish(z)", "Mish"),
        (18, "y = MeanVarianceNormalization(z)", "MeanVarianceNormalization"),
    ],
)
def test_functions_are_expanded_at_the_target_opset(opset: int, nodes: str, expanded: str):
    body = f"(float[2,4,6,6] x) => (float[2,4,6,6] y) {{ z = Mul(x, k)  {nodes} }}"
    values = {"g": normal(4), "h": normal(4), "k": normal(6)}
    used = {name: value for name, value in values.items() if re.search(rf"[ ,]{name}[,)]", body)}
    source = model_of(body, opset=opset, ir_version=10, **used)
    same_output(source, normal(2, 4, 6, 6))
    model = read(source)
    assert set(model.parameters) == used.keys()
    assert not any(node.op in (expanded, "CastLike", "Shape", "Identity") for node in model.nodes)
    if opset > 18:
        assert any(f"opset {opset} to 18" in note for note in model.notes)


def test_a_model_keeps_its_opset_and_the_note_lists_every_operator_without_an_equivalent():
    body = """(float[2,4] x) => (float[2,4] y) <int64[4] p = {0, 1, 0, 1}> {
        z = Mul(x, w)  q = Cast<to=17>(z)  r = Cast<to=1>(q)  [wrap] y = Pad<mode="wrap">(r, p) }"""
    model = read(model_of(body, opset=21, ir_version=10, w=(4,)))
    assert model.opset == 21
    (note,) = [note for note in model.notes if "stays at opset 21" in note]
    assert "Cast of float8e4m3fn needs a newer opset" in note
    assert "Pad with mode 'wrap' needs a newer opset at 'wrap'" in note


@pytest.mark.parametrize("call", ["Hardmax", "Hardmax<axis=2>", "Hardmax<axis=3>"])
def test_hardmax_over_several_dimensions_keeps_its_meaning(call: str):
    body = f"(float[2,4,6,6] x) => (float[2,4,6,6] y) {{ z = Mul(x, s)  h = {call}(z)  y = Mul(h, z) }}"
    same_output(model_of(body, opset=11, s=(6,)), normal(2, 4, 6, 6))


@pytest.mark.parametrize(
    "body, opset, kind, message",
    [
        ("(float[2,4] x) => (float[2,4] y) { y = Mul(x, w) }", 6, ModelFileError, "opset 6"),
        (
            "(float[2,4,3] x) => (float[2,4,3] y) { [bn] y = BatchNormalization<spatial=0>(x, w, w, w, w) }",
            7,
            UnsupportedOperatorError,
            "'bn'",
        ),
        (
            """(float[1,5,4] x, float[1,4] h) => (float[1,5,4] y) {
            [scan] s, y = Scan<num_scan_inputs=1, body = b (float[4] h, float[4] p) => (float[4] n, float[4] o) {
                n = Mul(h, p)  o = Mul(n, w) }>("", h, x) }""",
            8,
            ModelFileError,
            "Scan 'scan' has the form of opset 8",
        ),
    ],
)
def test_older_forms_are_refused(body: str, opset: int, kind: type[Exception], message: str):
    source = model_of(body, opset=opset, ir_version=4, w=(4,))
    with pytest.raises(kind, match=message):
        read(source)
