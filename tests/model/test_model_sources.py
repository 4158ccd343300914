from dataclasses import dataclass

import onnx
import pytest

import onnxgc
from onnxgc.errors import ModelFileError
from onnxgc.model.files.load import source_of

TEXT = """<ir_version: 8, opset_import: ["" : 18]> net (float[4, 3] x) => (float[4, 2] y)
    <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"""


@dataclass
class Program:
    model_proto: onnx.ModelProto


def test_a_program_is_read_as_its_model():
    model = onnx.parser.parse_model(TEXT)
    assert source_of(Program(model)) is model
    direct, from_program = (onnxgc.optimize(one, loss="mse", check=False) for one in (model, Program(model)))
    assert from_program.training_graph.model == direct.training_graph.model
    assert onnxgc.inspect(Program(model)).weights == onnxgc.inspect(model).weights


def test_a_model_of_onnx_ir():
    ir = pytest.importorskip("onnx_ir")
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    assert set(onnxgc.optimize(model, loss="mse", check=False).training_graph.gradient_of) == {"w"}


@pytest.mark.parametrize("other", [3, None, b"model", object()])
def test_other_types_are_refused(other: object):
    with pytest.raises(ModelFileError, match=r"not a (int|NoneType|bytes|object)$"):
        onnxgc.optimize(other)
