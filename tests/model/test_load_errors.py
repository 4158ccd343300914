"""Every invalid file, option or model raises an error of one clear line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgc.errors import LossError, ModelFileError, NoParametersError, OnnxgcError, ShapeError
from onnxgc.model.files.load import model_files
from onnxgc.model.read import explain_weights, read_model
from tests.model.model_helpers import light_path, normal, text_model, with_weights

LINEAR = "(float[4,3] x) => (float[4,2] y) { y = MatMul(x, w) }"


def linear() -> onnx.ModelProto:
    return with_weights(text_model(LINEAR), w=normal(3, 2))


def message(kind: type[OnnxgcError], source: object, **options: object) -> str:
    with pytest.raises(kind) as caught:
        read_model(source, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_file(tmp_path: Path) -> None:
    assert "there is no file" in message(ModelFileError, tmp_path / "none.onnx")


def test_directory(tmp_path: Path) -> None:
    assert "is a directory" in message(ModelFileError, tmp_path)


def test_zero_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"")
    assert "0 bytes" in message(ModelFileError, tmp_path / "a.onnx")


@pytest.mark.parametrize(
    "content", [b"hello, world\n", b"# A readme\n\nSome text.\n", b"\x89PNG\r\n\x1a\n" + bytes(99)]
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    assert "is not an ONNX" in message(ModelFileError, tmp_path / "a.onnx")


@pytest.mark.parametrize("share", [0.03, 0.3, 0.5, 0.9, 0.999])
def test_truncated(tmp_path: Path, share: float) -> None:
    content = light_path("light_squeezenet").read_bytes()
    (tmp_path / "a.onnx").write_bytes(content[: int(len(content) * share)])
    assert "truncated" in message(ModelFileError, tmp_path / "a.onnx")


def test_unreadable_text_form(tmp_path: Path) -> None:
    (tmp_path / "a.textproto").write_text("graph {")
    assert "in text form" in message(ModelFileError, tmp_path / "a.textproto")


def test_readable_text_form(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.textproto")
    assert read_model(tmp_path / "a.textproto").parameters == ("w",)


def test_empty_graph() -> None:
    assert "empty graph" in message(ModelFileError, text_model("(float[1] x) => (float[1] x) {}"))


def test_no_outputs() -> None:
    model = linear()
    del model.graph.output[:]
    assert "no outputs" in message(ModelFileError, model)


def test_unknown_operator() -> None:
    text = message(ModelFileError, text_model("(float[1] x) => (float[1] y) { y = Frobnicate(x) }"))
    assert "not a valid ONNX model" in text
    assert "Frobnicate" in text


def test_tensor_without_source() -> None:
    text = message(ModelFileError, text_model("(float[1] x) => (float[1] y) { y = Add(x, nothing) }"))
    assert "nothing" in text


def test_sparse_initializer() -> None:
    model = text_model(LINEAR)
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 2]))
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [3, 2]))
    text = message(ModelFileError, model)
    assert "'w'" in text
    assert "sparse" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(b"x")
    path.chmod(0)
    assert "cannot be read" in message(ModelFileError, path)


def test_unknown_input_shape() -> None:
    text = message(ShapeError, linear(), input_shapes={"image": (1, 3)})
    assert "'image'" in text
    assert "'x'" in text


def test_wrong_rank() -> None:
    assert "3 dimensions" in message(ShapeError, linear(), input_shapes={"x": (1, 1, 3)})


def test_given_size_of_zero() -> None:
    assert "at least 1" in message(ShapeError, linear(), input_shapes={"x": (0, 3)})


def test_impossible_matrix_product() -> None:
    text = message(ShapeError, linear(), input_shapes={"x": (4, 5)})
    assert "MatMul" in text
    assert "[4, 5]" in text


@pytest.mark.parametrize(
    "shape, part", [((1, 4, 8, 8), "expects 3 channels"), ((1, 3, 2, 8), "too small"), ((1, 3, 9, 9), "")]
)
def test_impossible_convolution(shape: tuple[int, ...], part: str) -> None:
    body = "(float[1,3,8,8] x) => (float[1,4,6,6] y) { [conv1] y = Conv(x, w) }"
    model = with_weights(text_model(body), w=normal(4, 3, 3, 3))
    if not part:
        assert read_model(model, input_shapes={"x": shape}).types["y"].shape == (1, 4, 7, 7)
        return
    text = message(ShapeError, model, input_shapes={"x": shape})
    assert "'conv1' (Conv)" in text
    assert part in text


@pytest.mark.parametrize(
    ("node", "shape", "reason"),
    [
        ("y = LayerNormalization(z, s)", (2, 4, 8), "'s' of [4] does not fit 'z' of [2, 4, 8]"),
        ("y = InstanceNormalization(z, s, s)", (2, 5, 4), "its weight 's' expects 4 channels, but 'z' has 5"),
        ("y = Gather<axis=1>(z, i)", (2, 3, 4), "index 3 is out of range for an axis of 3"),
        ("y = Gather<axis=1>(z, j)", (2, 3, 4), "index -4 is out of range for an axis of 3"),
    ],
)
def test_constants_that_fit_the_file_but_not_the_given_shapes(node: str, shape: tuple[int, ...], reason: str) -> None:
    indices = "int64 i = {3}, int64[1] j = {-4}"
    source = text_model(f"(float[2,4,4] x) => (float[] r) <{indices}> {{ z = Mul(x, k) {node} r = Relu(y) }}")
    source.graph.output[0].type.tensor_type.ClearField("shape")
    source = with_weights(source, k=np.full((1, 1, 1), 0.5), s=np.full(4, 0.5))
    assert read_model(source, loss="mse", trainable=["k"]).types["r"].shape
    assert reason in message(ShapeError, source, input_shapes={"x": shape}, loss="mse")


def test_impossible_reshape() -> None:
    body = """(float[2,3] x) => (float[2,4] y) <int64[2] s = {2, 4}> { z = MatMul(x, w)
        [flat] y = Reshape(z, s) }"""
    text = message(ShapeError, with_weights(text_model(body), w=normal(3, 3)))
    assert "'flat' (Reshape)" in text
    assert "[2, 3] to [2, 4]" in text


def test_shape_known_only_at_run_time() -> None:
    body = "(float[2,3] x) => (float[a,2] y) { z = MatMul(x, w) i = NonZero(z) [pick] y = GatherND(z, i) }"
    text = message(ShapeError, with_weights(text_model(body), w=normal(3, 3)))
    assert "NonZero" in text
    assert "run time" in text


def test_run_time_shape_outside_the_loss_is_allowed() -> None:
    body = "(float[2,3] x) => (float[2,3] z, int64[2,k] i) { z = MatMul(x, w) i = NonZero(z) }"
    model = read_model(with_weights(text_model(body), w=normal(3, 3)))
    assert [node.op for node in model.nodes][:1] == ["MatMul"]
    assert any("output 'i' does not reach the loss" in note for note in model.notes)


def test_input_that_is_not_a_tensor() -> None:
    body = "(seq(float[2]) x) => (float[2] z) <int64 i = {0}> { y = SequenceAt(x, i) z = Mul(y, w) }"
    assert "not a tensor" in message(ShapeError, with_weights(text_model(body), w=normal(2)))


def test_input_without_shape() -> None:
    model = linear()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert "pass --input-shapes x:" in message(ShapeError, model)
    assert read_model(model, input_shapes={"x": (7, 3)}).types["y"].shape == (7, 2)


def test_operator_outside_of_onnx() -> None:
    body = "(float[2,3] x) => (float[2,3] y) { z = MatMul(x, w) [odd] y = acme.Warp(z) }"
    model = with_weights(text_model(body, domains=', "acme": 1'), w=normal(3, 3))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    text = message(ShapeError, model)
    assert "acme::Warp" in text
    assert "'odd'" in text


def test_unknown_loss() -> None:
    text = message(LossError, linear(), loss="cross-entropie")
    assert "did you mean 'cross-entropy'?" in text
    assert "'y'" in text


def test_named_output_that_is_not_a_scalar() -> None:
    assert "[4, 2]" in message(LossError, linear(), loss="y")


def test_named_output_that_is_not_a_float() -> None:
    body = "(float[4,3] x) => (int64[1] y) { z = MatMul(x, w) y = ArgMax<axis=0,keepdims=0>(z) }"
    assert "not floating-point" in message(LossError, with_weights(text_model(body), w=normal(3, 1)), loss="y")


def test_no_floating_output() -> None:
    body = "(float[4,3] x) => (int64[4] y) { z = MatMul(x, w) y = ArgMax<axis=1,keepdims=0>(z) }"
    assert "'y'" in message(LossError, with_weights(text_model(body), w=normal(3, 2)))


def test_cross_entropy_of_a_vector() -> None:
    body = "(float[3] x) => (float[2] y) { y = MatMul(x, w) }"
    assert "[2]" in message(LossError, with_weights(text_model(body), w=normal(3, 2)), loss="cross-entropy")


@pytest.mark.parametrize("option", ["trainable", "freeze"])
def test_glob_without_match(option: str) -> None:
    text = message(NoParametersError, linear(), **{option: ["v.*"]})
    assert f"--{option} 'v.*'" in text
    assert "'w'" in text


def test_no_parameters() -> None:
    text = message(NoParametersError, text_model("(float[4,3] x) => (float[4,3] y) { y = Relu(x) }"))
    assert "--trainable" in text


def test_all_parameters_frozen() -> None:
    assert "all 1 are frozen" in message(NoParametersError, linear(), freeze=["*"])


def test_explaining_needs_no_shapes() -> None:
    model = linear()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert [(d.name, d.role) for d in explain_weights(model)] == [("w", "parameter")]


def test_text_form_of_onnx_is_read_without_a_warning(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnxtxt")
    assert read_model(tmp_path / "a.onnxtxt").parameters == ("w",)
    assert model_files(tmp_path / "a.onnxtxt") == (str(tmp_path / "a.onnxtxt"),)


def test_errors_of_a_text_form_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.onnxtxt").write_text("<ir_version: 8> net (float[2] x) =>")
    text = message(ModelFileError, tmp_path / "a.onnxtxt")
    assert "in text form: [ParseError" in text
    assert "b'" not in text


@pytest.mark.parametrize("step", [0, -1])
def test_parts_of_no_elements(step: int) -> None:
    body = f"""(float[2,4] x) => (float[2,4] y) <int64 size = {{{step}}}, int64 first = {{0}}> {{
        z = Mul(x, w)  [cut] q = SplitToSequence<axis=1>(z, size)  y = SequenceAt(q, first) }}"""
    text = message(ShapeError, with_weights(text_model(body), w=normal(4)))
    assert f"'cut' splits into parts of {step} elements" in text


@pytest.mark.parametrize("call", ["Conv(x, w)", "MaxPool<kernel_shape=[3,3]>(x)"])
def test_window_over_an_empty_batch(call: str) -> None:
    body = f"(float[0,3,8,8] x) => (float[0,3,6,6] y) {{ [window] h = {call} v = Mul(h, s) y = Relu(v) }}"
    text = message(ShapeError, with_weights(text_model(body), w=normal(3, 3, 3, 3), s=normal(6)))
    assert "'window'" in text
    assert "'x' of [0, 3, 8, 8] has no elements" in text


def test_functions_of_several_older_opsets_that_call_each_other() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18, "own": 1]>
        net (float[2,3] x) => (float[2,3] y) { z = Mul(x, w)  y = own.outer(z) }
        <domain: "own", opset_import: ["": 11, "own": 1]>
        outer (a) => (b) { c = own.inner(a)  b = own.inner(c) }
        <domain: "own", opset_import: ["": 9]>
        inner (a) => (b) { b = Softmax(a) }"""
    )
    text = message(ModelFileError, with_weights(model, w=normal(3)))
    assert "cannot be inlined" in text
    assert "with functions of the model's opset" in text
    assert "Assertion" not in text
