"""Models of any opset are read at opset 18 with the same results, or keep their opset and a note says so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgc.errors import ModelFileError, UnsupportedOperatorError
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from tests.model.model_helpers import normal, run, run_read, text_model, with_weights

IMAGE = "(float[2,4,6,6] x) => (float[a,b] y)"
OLD_AXES = """z = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    r = Relu(z)  u = Unsqueeze<axes=[1]>(r)  q = Squeeze<axes=[1]>(u)
    m = ReduceSum<axes=[2,3], keepdims=0>(q)  y = Gemm<transB=1>(m, v, b)"""
NEW_AXES = """z = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)
    r = Relu(z)  u = Unsqueeze(r, one)  q = Squeeze(u, one)
    m = ReduceSum<keepdims=0>(q, last)  y = Gemm<transB=1>(m, v, b)"""
WEIGHTS = {"w": normal(5, 4, 3, 3), "v": normal(3, 5), "b": normal(3)}


def same_output(source: onnx.ModelProto, x: Array, **options: str) -> None:
    """Asserts that reading keeps the output `y`."""
    model = read_model(source, loss="mse", **options)  # type: ignore[arg-type]
    assert (model.opset, model.ir_version) == (18, 9)
    (expected,) = run(source, {"x": x})
    (found,) = run_read(model, {"x": x, "target": np.zeros_like(expected)}, "y")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [7, 8, 9, 11])
def test_attributes_of_old_opsets_become_inputs(opset: int) -> None:
    ir_version = 3 if opset < 9 else 5
    body = f"{IMAGE} {{ {OLD_AXES} }}"
    source = with_weights(text_model(body, opset=opset, ir_version=ir_version), **WEIGHTS)
    if ir_version == 3:
        source.graph.input.extend(
            onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in source.graph.initializer
        )
    same_output(source, normal(2, 4, 6, 6))


@pytest.mark.parametrize("opset", [13, 15, 17, 18, 19, 20, 21, 22])
def test_newer_opsets(opset: int) -> None:
    body = f"{IMAGE} <int64[1] one = {{1}}, int64[2] last = {{2,3}}> {{ {NEW_AXES} }}"
    same_output(with_weights(text_model(body, opset=opset), **WEIGHTS), normal(2, 4, 6, 6))


def test_names_of_tensors_and_nodes_are_kept() -> None:
    body = """(float[2,4,6,6] x) => (float[2,5] y) {
        [conv] z = Conv(x, w)  [pool] y = ReduceSum<axes=[2,3],keepdims=0>(z) }"""
    model = read_model(with_weights(text_model(body, opset=9), w=WEIGHTS["w"]), loss="mse")
    assert [(node.name, node.outputs[0]) for node in model.nodes[:2]] == [("conv", "z"), ("pool", "y")]


def test_softmax_over_several_dimensions_keeps_its_meaning() -> None:
    body = "(float[2,4,6,6] x) => (float[2,4,6,6] y) { z = Mul(x, s)  t = Softmax<axis=1>(z)  y = Mul(t, s) }"
    same_output(with_weights(text_model(body, opset=11), s=normal(6)), normal(2, 4, 6, 6))


def test_old_resize_and_clip() -> None:
    body = """(float[2,4,6,6] x) => (float[2,4,12,12] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> {
        z = Mul(x, w)  c = Clip<min=0.0, max=1.0>(z)  y = Upsample<mode="nearest">(c, s) }"""
    same_output(with_weights(text_model(body, opset=9), w=normal(6)), normal(2, 4, 6, 6))


def test_old_dropout() -> None:
    body = "(float[2,4] x) => (float[2,4] y) { z = Mul(x, w)  d, m = Dropout<ratio=0.25>(z)  y = Relu(d) }"
    model = read_model(with_weights(text_model(body, opset=7, ir_version=4), w=normal(4)), loss="mse")
    (dropout,) = [node for node in model.nodes if node.op == "Dropout"]
    assert float(model.weights[dropout.inputs[1]].load()) == 0.25


@pytest.mark.parametrize(
    "opset, nodes, expanded",
    [
        (20, "y = Gelu(z)", "Gelu"),
        (20, 'y = Gelu<approximate="tanh">(z)', "Gelu"),
        (23, "y = RMSNormalization(z, k)", "RMSNormalization"),
        (23, "y = Attention(z, z, z)", "Attention"),
        (24, "y = Swish(z)", "Swish"),
    ],
)
def test_new_functions_are_expanded_at_the_target_opset(opset: int, nodes: str, expanded: str) -> None:
    body = f"(float[2,4,6,6] x) => (float[2,4,6,6] y) {{ z = Mul(x, k)  {nodes} }}"
    values = {"g": normal(4), "h": normal(4), "k": normal(6)}
    used = {name: value for name, value in values.items() if f"{name})" in body or f" {name}," in body}
    source = with_weights(text_model(body, opset=opset, ir_version=10), **used)
    same_output(source, normal(2, 4, 6, 6))
    model = read_model(source, loss="mse")
    assert set(model.parameters) == used.keys()
    assert not any(node.op in (expanded, "CastLike", "Shape", "Identity") for node in model.nodes)
    assert any(f"opset {opset} to 18; {expanded}" in note for note in model.notes)


def test_a_note_reports_a_model_that_keeps_its_opset() -> None:
    # A Cast to float8 exists from opset 19 on.
    body = "(float[2,4] x) => (float[2,4] y) { z = Mul(x, w)  q = Cast<to=17>(z)  y = Cast<to=1>(q) }"
    model = read_model(with_weights(text_model(body, opset=19, ir_version=9), w=normal(4)), loss="mse")
    assert model.opset == 19
    assert any("stays at opset 19" in note for note in model.notes)


def test_the_note_lists_every_operator_without_an_equivalent() -> None:
    body = """(float[2,4] x) => (float[2,4] y) <int64[4] p = {0, 1, 0, 1}> {
        z = Mul(x, w)  q = Cast<to=17>(z)  r = Cast<to=1>(q)  [wrap] y = Pad<mode="wrap">(r, p) }"""
    model = read_model(with_weights(text_model(body, opset=21, ir_version=10), w=normal(4)), loss="mse")
    (note,) = [note for note in model.notes if "stays at opset 21" in note]
    assert "Cast of float8e4m3fn needs a newer opset" in note
    assert "Pad with mode 'wrap' needs a newer opset at 'wrap'" in note


@pytest.mark.parametrize("opset", [21, 22])
@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 4, 3, 5), (2, 4, 2, 3, 2)])
def test_group_normalization_is_expanded(opset: int, shape: tuple[int, ...]) -> None:
    sizes = ",".join(map(str, shape))
    nodes = "z = Mul(x, k)  y = GroupNormalization<num_groups=2>(z, g, h)"
    body = f"(float[{sizes}] x) => (float[{sizes}] y) {{ {nodes} }}"
    weights = {"k": normal(shape[-1]), "g": normal(4), "h": normal(4, seed=1)}
    source = with_weights(text_model(body, opset=opset), **weights)
    same_output(source, normal(*shape))
    model = read_model(source, loss="mse")
    assert set(model.parameters) == {"k", "g", "h"}
    assert not any(node.op == "GroupNormalization" for node in model.nodes)


@pytest.mark.parametrize("opset", [18, 19, 20])
def test_group_normalization_with_a_scale_for_each_group_is_expanded(opset: int) -> None:
    """ONNX's checker refuses the deprecated version."""
    body = """(float[2,6,3,2] x) => (float[2,6,3,2] y) {
        z = Mul(x, k)  y = GroupNormalization<num_groups=3, epsilon=0.1>(z, g, h) }"""
    weights = {"k": normal(2), "g": normal(3), "h": normal(3, seed=1)}
    source = with_weights(text_model(body, opset=opset), **weights)
    same_output(source, normal(2, 6, 3, 2))
    assert set(read_model(source, loss="mse").parameters) == {"k", "g", "h"}


def test_scans_of_opset_8_are_refused() -> None:
    body = """(float[1,4,3] x) => (float[1,4,3] y) {
        [scan] s, y = Scan<num_scan_inputs=1, body = b (float[3] h, float[3] p) => (float[3] n, float[3] o) {
            n = Mul(h, p)  o = Mul(n, w) }>("", h, x) }"""
    source = with_weights(text_model(body, opset=8, ir_version=4), w=normal(3), h=normal(1, 3))
    with pytest.raises(ModelFileError, match="Scan 'scan' has the form of opset 8"):
        read_model(source, loss="mse")


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("nodes", ["y = Celu<alpha=0.5>(z)", "y = Mish(z)", "y = MeanVarianceNormalization(z)"])
def test_functions_without_a_cuda_kernel_are_expanded(nodes: str, opset: int) -> None:
    body = f"(float[2,4,6,6] x) => (float[2,4,6,6] y) {{ z = Mul(x, w)  {nodes} }}"
    source = with_weights(text_model(body, opset=opset), w=normal(6))
    same_output(source, normal(2, 4, 6, 6))
    assert not any(node.op in nodes for node in read_model(source, loss="mse").nodes if node.op != "Mul")


def test_a_loss_function_in_the_model_is_expanded() -> None:
    body = """(float[4,3] x, int64[4] t) => (float total) {
        y = MatMul(x, w)  total = SoftmaxCrossEntropyLoss<ignore_index=2>(y, t) }"""
    source = with_weights(text_model(body), w=normal(3, 5))
    model = read_model(source)
    assert (model.loss, model.inputs, model.targets) == ("total", ("x", "t"), ())
    assert not any(node.op.endswith("Loss") for node in model.nodes)
    feeds = {"x": normal(4, 3), "t": np.asarray([0, 2, 4, 1])}
    (expected,) = run(source, feeds)
    (found,) = run_read(model, feeds, "total")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_opsets_below_7_are_refused() -> None:
    source = with_weights(text_model("(float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", opset=6), w=normal(4, 4))
    with pytest.raises(ModelFileError, match="opset 6"):
        read_model(source)


def test_statistics_for_each_position_are_refused() -> None:
    body = "(float[2,3,4] x) => (float[2,3,4] y) { [bn] y = BatchNormalization<spatial=0>(x, g, g, g, g) }"
    source = with_weights(text_model(body, opset=7, ir_version=4), g=normal(3))
    with pytest.raises(UnsupportedOperatorError, match="'bn'"):
        read_model(source, loss="mse")


@pytest.mark.parametrize("call", ["Hardmax", "Hardmax<axis=0>", "Hardmax<axis=2>", "Hardmax<axis=3>"])
def test_hardmax_over_several_dimensions_keeps_its_meaning(call: str) -> None:
    body = f"(float[2,4,6,6] x) => (float[2,4,6,6] y) {{ z = Mul(x, s)  h = {call}(z)  y = Mul(h, z) }}"
    same_output(with_weights(text_model(body, opset=11), s=normal(6)), normal(2, 4, 6, 6))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", [(3, 4), (2, 3, 2)])
@pytest.mark.parametrize("align_corners", [0, 1])
def test_a_grid_of_known_size_becomes_a_product(batch: int, size: tuple[int, ...], align_corners: int) -> None:
    sizes = ",".join(map(str, (batch, 1, *size)))
    rank = len(size)
    points = ",".join(map(str, (batch, *size, rank)))
    body = f"""(float[{batch},{rank},{rank + 1}] x) => (float[{points}] y)
        <int64[{rank + 2}] size = {{{sizes}}}> {{
        z = Mul(x, w)  y = AffineGrid<align_corners={align_corners}>(z, size) }}"""
    source = with_weights(text_model(body, opset=20, ir_version=9), w=normal(rank + 1))
    same_output(source, normal(batch, rank, rank + 1))
