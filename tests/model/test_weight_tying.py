from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.read import read_model
from tests.model.model_helpers import model_of, normal

TWO_BIASES = """(float[2,3] x) => (float[2,3] y) {
    [one] h = Gemm(x, v, b) [two] y = Gemm(h, w, b)
}"""


def read(body: str, untie: bool = False, **weights: Array) -> TrainableModel:
    return read_model(model_of(body, **weights), loss="mse", untie=untie)


def biases(untie: bool) -> TrainableModel:
    return read(TWO_BIASES, untie, v=normal(3, 3, seed=1), w=normal(3, 3, seed=2), b=np.zeros(3))


def test_a_merged_weight_trains_as_one_with_a_note():
    model = biases(untie=False)
    assert model.parameters == ("v", "w", "b")
    assert any("'b' is used by 2 nodes" in note for note in model.notes)


def test_untie_separates_the_uses():
    model = biases(untie=True)
    assert model.parameters == ("v", "w", "b", "b_2")
    assert [node.inputs[2] for node in model.nodes if node.op == "Gemm"] == ["b", "b_2"]
    assert any("'b' was shared by 2 nodes" in note for note in model.notes)
    body = "(int64[5] x) => (float[5,7] y) { h = Gather(e, x) y = Gemm<transB=1>(h, e) }"
    assert read(body, untie=True, e=normal(7, 4)).parameters == ("e",), "uses that differ"


COMMUTED = """(float[2,3] x) => (float[2,3] y) {
    h = MatMul(x, w) [one] a = Add(b, h) [two] y = Add(a, b)
}"""
AFTER_IDENTITIES = """(float[2,3] x) => (float[2,3] y) {
    c = Identity(b) d = Identity(c) [one] h = Gemm(x, v, b) [two] k = Gemm(h, w, d) [three] y = Gemm(k, u, c)
}"""
LOOP = """Loop<body = step (int64 i, bool before, float[2,3] g) => (bool before, float[2,3] n) {
    p = MatMul(g, w) n = Tanh(p) }>"""
LOOPS = f"(float[2,3] x) => (float[2,3] y) <int64 m = {{2}}> {{ h = {LOOP}(m, , x) y = {LOOP}(m, , h) }}"


def test_untie_treats_commutative_operands_as_one_use():
    model = read(COMMUTED, untie=True, w=normal(3, 3), b=np.zeros(3))
    assert model.parameters == ("w", "b", "b_2")
    assert [node.inputs for node in model.nodes if node.op == "Add"][:2] == [("b", "h"), ("a", "b_2")]


def test_untie_follows_identities():
    weights = {name: normal(3, 3, seed=seed) for seed, name in enumerate("uvw")}
    model = read(AFTER_IDENTITIES, untie=True, b=np.zeros(3), **weights)
    assert set(model.parameters) == {"u", "v", "w", "b", "b_2", "b_3"}


def test_untie_separates_loops_but_not_their_steps():
    model = read(LOOPS, untie=True, w=normal(3, 3))
    assert model.parameters == ("w", "w_2")
    assert [node.inputs[1] for node in model.nodes if node.op == "MatMul"] == ["w", "w", "w_2", "w_2"]
    assert read(LOOPS, w=normal(3, 3)).parameters == ("w",)


FUNCTION = """<ir_version: 8, opset_import: ["": 18, "own": 1]>
    net (float[2,3] x) => (float[2,3] y) { a = own.scaled(x)  b = Relu(a)  y = own.scaled(b) }
    <domain: "own", opset_import: ["": %d]>
    scaled (a) => (b) { w = Constant<value = float[3] {1.5, -2.5, 3.5}>()  b = Mul(a, w) }"""


@pytest.mark.parametrize("opset", [18, 16])
def test_a_constant_of_a_function_is_one_parameter_for_all_calls(opset: int):
    source = onnx.parser.parse_model(FUNCTION % opset)
    model = read_model(source, loss="mse")
    (name,) = model.parameters
    assert any(f"'{name}' is used by 2 nodes" in note for note in model.notes)
    assert len(read_model(source, loss="mse", untie=True).parameters) == 2


_TABLE = normal(7, 4)
_IN_PART = _TABLE.T + np.eye(4, 7, 1)
_TRANSPOSED = "(int64[5] x) => (float[5,7] y) { h = Gather(a, x) y = MatMul(h, b) }"
_COPIED = "(int64[5] x) => (float[5,7] y) { h = Gather(a, x) y = Gemm<transB=1>(h, b) }"
_LAYERS = "(float[2,4] x) => (float[2,4] y) { h = MatMul(x, a) y = MatMul(h, b) }"


@pytest.mark.parametrize(
    "body, a, b, reported",
    [
        (_TRANSPOSED, _TABLE, np.ascontiguousarray(_TABLE.T), "'a' and 'b' have equal values, one transposed"),
        (_COPIED, _TABLE, _TABLE.copy(), "'a' and 'b' have equal values;"),
        (_TRANSPOSED, _TABLE, _IN_PART, None),
        (_LAYERS, normal(4, 4), normal(4, 4), None),
        (_LAYERS, np.ones((4, 4)), np.ones((4, 4)), None),
    ],
    ids=["transposed copy", "copied table", "equal in part", "equal initial values", "constant"],
)
def test_copies_of_tables_are_reported(body: str, a: Array, b: Array, reported: str | None):
    found = [note for note in read(body, a=a, b=b).notes if "have equal values" in note]
    assert bool(found) == bool(reported)
    assert all(reported and reported in note for note in found)


def test_copies_in_external_data_are_reported(tmp_path: Path):
    table = normal(70, 40)
    source = model_of(_TRANSPOSED.replace("7", "70"), a=table, b=np.ascontiguousarray(table.T))
    path = tmp_path / "model.onnx"
    onnx.save(source, path, save_as_external_data=True, size_threshold=0)
    assert any("one transposed" in note for note in read_model(path, loss="mse").notes)
