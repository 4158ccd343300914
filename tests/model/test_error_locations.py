import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxgc
from onnxgc.errors import OnnxgcError

SUM = "y = ReduceSum <keepdims = 0> (q)"
CASES = {
    "NonZero": ("i = NonZero (a) q = Cast <to = 1> (i)", ("the values of 'a'", "a mask (Where")),
    "Compress": (
        "z = Cast <to = 9> (a) f = Reshape (z, flat) q = Compress (a, f)",
        ("known only at run time", "a mask (Where"),
    ),
    "Range": (
        "s = ReduceSum <keepdims = 0> (a) q = Range (zero, s, one)",
        ("the values of 's'", "a mask over the longest one"),
    ),
    "Unique": ("q = Unique (a)", ("the values of 'a'", "a fixed number of classes")),
    "NonMaxSuppression": (
        "b = Reshape (a, boxes) n = Reshape (a, scores) i = NonMaxSuppression (b, n) q = Cast <to = 1> (i)",
        ("known only at run time", "the inputs of NonMaxSuppression as outputs"),
    ),
    "Magic": ("q = my.domain.Magic (a)", ("an operator outside of ONNX", "export the model with standard")),
    "DynamicQuantizeLinear": (
        "i, s, z = DynamicQuantizeLinear (a) q = DequantizeLinear (i, s, z)",
        ("integers have no gradient", "train the floating-point model"),
    ),
    "Cast": ("i = Cast <to = 7> (a) q = Cast <to = 1> (i)", ("the gradient stops at", "compute the loss from its")),
    "MatMul": ("q = MatMul (a, wide)", ("does not fit its inputs", "check the input shapes")),
    "If": (
        "s = ReduceSum <keepdims = 0> (a) c = Cast <to = 9> (s) "
        "q = If (c) <then_branch = t () => (float[4, 8] u) { u = Neg (a) }, "
        "else_branch = e () => (float[2, 8] v) { v = Slice (a, start, end) }>",
        ("the values of 'x' decide which branch runs", "without this control flow"),
    ),
    "Det": ("r = Reshape (a, square) e = Det (r) q = Unsqueeze (e, start)", ("no gradient rule for", "freeze")),
}


def model_of(nodes: str) -> onnx.ModelProto:
    """A product with a weight, then the nodes, each with a separate module in PyTorch's metadata."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17, "my.domain" : 1]> '
        f"g (float[4, 8] x) => (float y) {{ a = MatMul (x, w) {nodes} {SUM} }}"
    )
    weights = {
        "w": np.ones((8, 8), np.float32),
        "wide": np.ones((9, 8), np.float32),
        "zero": np.float32(0),
        "one": np.float32(1),
        "flat": np.array([-1]),
        "start": np.array([0]),
        "end": np.array([2]),
        "boxes": np.array([1, 8, 4]),
        "scores": np.array([1, 4, 8]),
        "square": np.array([2, 4, 4]),
    }
    read = {name for node in model.graph.node for name in node.input} | {"start", "end"}
    for name, value in weights.items():
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for position, node in enumerate(model.graph.node):
        node.name = f"node_{position}"
        scopes = ["", "blocks", f"blocks.{position}", node.op_type.lower()]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
    return model


@pytest.mark.parametrize("operator", CASES)
def test_an_error_has_operator_location_reason_and_remedy(operator: str):
    nodes, words = CASES[operator]
    model = model_of(nodes)
    operators = [node.op_type for node in model.graph.node]
    position = len(operators) - 1 - operators[::-1].index(operator)
    if operator == "Cast":
        position -= 1
    with pytest.raises(OnnxgcError) as caught:
        onnxgc.optimize(model, check=False, loss="y")
    text = str(caught.value)
    for wanted in (operator, f"'node_{position}' in module 'blocks.{position}'", *words):
        assert wanted in text, text
    assert "\n" not in text
