"""The module of a node is what the file states, in metadata or in a name that is a path."""

import onnx
import pytest

import onnxgc
from onnxgc.api.html_pages import page_of
from onnxgc.model.files.module_paths import module_of
from tests.model.model_helpers import normal, text_model, with_weights

SCOPES = "pkg.torch.onnx.name_scopes"


@pytest.mark.parametrize(
    "name, value, path",
    [
        ("/layer1/layer1.0/conv1/Conv_3", None, "layer1.0.conv1"),
        ("/a/MatMul/MatMulAddFusion", None, ""),
        ("StatefulPartitionedCall_1/model/dense/Conv2D__6", None, "model/dense"),
        ("model/dense/MatMul;other/dense/BiasAdd", None, "model/dense"),
        ("node_conv2d_3", None, ""),
        ("a/b/Conv", "['', 'op']", ""),
        ("", str(["", "it's", "parts.a,b[0]", "op"]), "parts.a,b[0]"),
        ("", str(["", "one\n\x1b[31mtwo", "op"]), "one??[31mtwo"),
        ("", "[" * 500, ""),
        ("", ": Net/blocks.0: Block/add: aten.add.Tensor", "blocks.0"),
    ],
)
def test_a_module_is_stated(name: str, value: str | None, path: str):
    node = onnx.NodeProto(op_type="Conv", name=name)
    if value is not None:
        node.metadata_props.add(key="namespace" if value.startswith(":") else SCOPES, value=value)
    assert module_of(node) == path


def test_modules_stay_text():
    """The operator `c` is not the one that outputs the tensor `c`; `d` has no module."""
    body = "(float[64,8] x) => (float[64,8] d) { a = MatMul(x, w) b = Tanh(a) c = Gelu(b) d = Tanh(c) }"
    model = text_model(body, opset=20)
    for node, path in zip(model.graph.node, ("<b>", "two", "x" * 3000), strict=False):
        node.metadata_props.add(key=SCOPES, value=str(["", path, "op"]))
    model.graph.node[1].name = "c"
    model = with_weights(model, w=normal(8, 8))
    result = onnxgc.optimize(model, loss="mse", check=False, solver="store-all")
    found = result.planned.modules_of("abcd")
    assert [found.get(name) for name in "abcd"] == ["<b>", "two", None, None]
    assert "&lt;b&gt;" in page_of(result)
