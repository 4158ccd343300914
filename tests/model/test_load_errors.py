import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgc.errors import LossError, ModelFileError, NoParametersError, OnnxgcError, ShapeError
from onnxgc.model.files.load import model_files
from onnxgc.model.read import explain_weights, read_model
from tests.model.model_helpers import light_path, model_of, normal, read, text_model, with_weights

LINEAR = "(float[4,3] x) => (float[4,2] y) { y = MatMul(x, w) }"


def linear() -> onnx.ModelProto:
    return model_of(LINEAR, w=(3, 2))


def message(kind: type[OnnxgcError], source: object, **options: object) -> str:
    with pytest.raises(kind) as caught:
        read_model(source, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("a.onnx", b"", "0 bytes"),
        *(("a.onnx", text, "is not an ONNX") for text in (b"# A readme\n\nText.\n", b"\x89PNG\r\n\x1a\n" + bytes(99))),
        ("a.textproto", b"graph {", "in text form"),
        ("a.onnxtxt", b"<ir_version: 8> net (float[2] x) =>", "in text form: [ParseError"),
    ],
)
def test_other_files(name: str, content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    text = message(ModelFileError, tmp_path / name)
    assert part in text
    assert "b'" not in text


def test_missing_files_and_folders(tmp_path: Path) -> None:
    assert "there is no file" in message(ModelFileError, tmp_path / "none.onnx")
    assert "is a directory" in message(ModelFileError, tmp_path)


@pytest.mark.parametrize("share", [0.03, 0.5, 0.999])
def test_truncated(tmp_path: Path, share: float) -> None:
    content = light_path("light_squeezenet").read_bytes()
    (tmp_path / "a.onnx").write_bytes(content[: int(len(content) * share)])
    assert "truncated" in message(ModelFileError, tmp_path / "a.onnx")


@pytest.mark.parametrize("name", ["a.textproto", "a.onnxtxt"])
def test_text_forms_are_read(name: str, tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / name)
    assert read_model(tmp_path / name).parameters == ("w",)
    assert model_files(tmp_path / name) == (str(tmp_path / name),)


def _without(field: str) -> onnx.ModelProto:
    model = linear()
    if field == "outputs":
        del model.graph.output[:]
    else:
        model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


def _sparse() -> onnx.ModelProto:
    model = text_model(LINEAR)
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 2]))
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [3, 2]))
    return model


def _foreign() -> onnx.ModelProto:
    body = "(float[2,3] x) => (float[2,3] y) { z = MatMul(x, w) [odd] y = acme.Warp(z) }"
    model = model_of(body, domains=', "acme": 1', w=(3, 3))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    return model


def _product(body: str, *shape: int) -> onnx.ModelProto:
    """Nodes that read z = x w."""
    return model_of(body.replace("{", "{ z = MatMul(x, w) ", 1), w=shape)


_CLASSES = "{ y = ArgMax<axis=1,keepdims=0>(z) }"
INVALID: list[tuple[type[OnnxgcError], onnx.ModelProto, dict[str, Any], tuple[str, ...]]] = [
    (ModelFileError, text_model("(float[1] x) => (float[1] x) {}"), {}, ("empty graph",)),
    (ModelFileError, _without("outputs"), {}, ("no outputs",)),
    (
        ModelFileError,
        text_model("(float[1] x) => (float[1] y) { y = Frobnicate(x) }"),
        {},
        ("not a valid ONNX model", "Frobnicate"),
    ),
    (ModelFileError, text_model("(float[1] x) => (float[1] y) { y = Add(x, nothing) }"), {}, ("nothing",)),
    (ModelFileError, _sparse(), {}, ("'w'", "sparse")),
    (ShapeError, linear(), {"input_shapes": {"image": (1, 3)}}, ("'image'", "'x'")),
    (ShapeError, linear(), {"input_shapes": {"x": (1, 1, 3)}}, ("3 dimensions",)),
    (ShapeError, linear(), {"input_shapes": {"x": (0, 3)}}, ("at least 1",)),
    (ShapeError, linear(), {"input_shapes": {"x": (4, 5)}}, ("MatMul", "[4, 5]")),
    (ShapeError, _without("shape"), {}, ("pass --input-shapes x:",)),
    (
        ShapeError,
        text_model("(float[2,3] x) => (float[2,4] y) <int64[2] s = {2, 4}> { [flat] y = Reshape(x, s) }"),
        {},
        ("'flat' (Reshape)", "[2, 3] to [2, 4]"),
    ),
    (
        ShapeError,
        _product("(float[2,3] x) => (float[a,2] y) { i = NonZero(z) [pick] y = GatherND(z, i) }", 3, 3),
        {},
        ("NonZero", "run time"),
    ),
    (
        ShapeError,
        text_model("(seq(float[2]) x) => (float[2] z) <int64 i = {0}> { y = SequenceAt(x, i) z = Exp(y) }"),
        {},
        ("not a tensor",),
    ),
    (ShapeError, _foreign(), {}, ("acme::Warp", "'odd'")),
    (LossError, linear(), {"loss": "cross-entropie"}, ("did you mean 'cross-entropy'?", "'y'")),
    (LossError, linear(), {"loss": "y"}, ("[4, 2]",)),
    (LossError, _product(f"(float[1,3] x) => (int64[1] y) {_CLASSES}", 3, 2), {"loss": "y"}, ("not floating-point",)),
    (LossError, _product(f"(float[4,3] x) => (int64[4] y) {_CLASSES}", 3, 2), {}, ("'y'",)),
    (LossError, _product("(float[3] x) => (float[2] y) { y = Relu(z) }", 3, 2), {"loss": "cross-entropy"}, ("[2]",)),
    (NoParametersError, text_model("(float[4,3] x) => (float[4,3] y) { y = Relu(x) }"), {}, ("--trainable",)),
    (NoParametersError, linear(), {"freeze": ["*"]}, ("all 1 are frozen",)),
    (NoParametersError, linear(), {"trainable": ["v.*"]}, ("--trainable 'v.*'", "'w'")),
    (NoParametersError, linear(), {"freeze": ["v.*"]}, ("--freeze 'v.*'", "'w'")),
    *(
        (
            ShapeError,
            text_model(f"""(float[2,4] x) => (float[2,4] y) <int64 size = {{{step}}}, int64 first = {{0}}> {{
                [cut] q = SplitToSequence<axis=1>(x, size)  y = SequenceAt(q, first) }}"""),
            {},
            (f"'cut' splits into parts of {step} elements",),
        )
        for step in (0, -1)
    ),
    *(
        (
            ShapeError,
            model_of(
                f"(float[0,3,8,8] x) => (float[0,3,6,6] y) {{ [window] h = {call} y = Mul(h, s) }}",
                w=(3, 3, 3, 3),
                s=(6,),
            ),
            {},
            ("'window'", "'x' of [0, 3, 8, 8] has no elements"),
        )
        for call in ("Conv(x, w)", "MaxPool<kernel_shape=[3,3]>(x)")
    ),
]


@pytest.mark.parametrize("kind, model, options, parts", INVALID)
def test_invalid_models_and_options(
    kind: type[OnnxgcError], model: onnx.ModelProto, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    text = message(kind, model, **options)
    assert [part for part in parts if part not in text] == []


def test_without_a_shape_weights_are_explained_and_a_given_shape_is_taken() -> None:
    model = _without("shape")
    assert [(d.name, d.role) for d in explain_weights(model)] == [("w", "parameter")]
    assert read_model(model, input_shapes={"x": (7, 3)}).types["y"].shape == (7, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(b"x")
    path.chmod(0)
    assert "cannot be read" in message(ModelFileError, path)


@pytest.mark.parametrize(
    "shape, part", [((1, 4, 8, 8), "expects 3 channels"), ((1, 3, 2, 8), "too small"), ((1, 3, 9, 9), "")]
)
def test_impossible_convolution(shape: tuple[int, ...], part: str) -> None:
    body = "(float[1,3,8,8] x) => (float[1,4,6,6] y) { [conv1] y = Conv(x, w) }"
    model = model_of(body, w=(4, 3, 3, 3))
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
    assert read(source, trainable=["k"]).types["r"].shape
    assert reason in message(ShapeError, source, input_shapes={"x": shape}, loss="mse")


def test_run_time_shape_outside_the_loss_is_allowed() -> None:
    body = "(float[2,3] x) => (float[2,3] z, int64[2,k] i) { z = MatMul(x, w) i = NonZero(z) }"
    model = read_model(model_of(body, w=(3, 3)))
    assert [node.op for node in model.nodes][:1] == ["MatMul"]
    assert any("output 'i' does not reach the loss" in note for note in model.notes)


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
