"""Weights stored once for several uses, or several times for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from onnxgc.model.ir import Array, TrainableModel
from onnxgc.model.read import read_model
from tests.model.model_helpers import normal, text_model, with_weights

TWO_BIASES = """(float[2,3] x) => (float[2,3] y) {
    [one] h = Gemm(x, v, b) [two] y = Gemm(h, w, b)
}"""
TIED = """(int64[5] x) => (float[5,7] y) {
    [embed] h = Gather(e, x) [project] y = Gemm<transB=1>(h, e)
}"""


def read(body: str, untie: bool = False, **weights: Array) -> TrainableModel:
    return read_model(with_weights(text_model(body), **weights), loss="mse", untie=untie)


def biases(untie: bool) -> TrainableModel:
    return read(TWO_BIASES, untie, v=normal(3, 3, seed=1), w=normal(3, 3, seed=2), b=np.zeros(3))


def test_a_merged_weight_is_told_and_trained_as_one() -> None:
    model = biases(untie=False)
    assert model.parameters == ("v", "w", "b")
    assert any("'b' is used by 2 nodes" in note for note in model.notes)


def test_untie_gives_each_node_its_own() -> None:
    model = biases(untie=True)
    assert model.parameters == ("v", "w", "b", "b_2")
    assert [node.inputs[2] for node in model.nodes if node.op == "Gemm"] == ["b", "b_2"]
    assert any("'b' was stored once for 2 nodes" in note for note in model.notes)


def test_untie_leaves_weights_whose_uses_differ() -> None:
    model = read(TIED, untie=True, e=normal(7, 4))
    assert model.parameters == ("e",)


APART = """(int64[5] x) => (float[5,7] y) {
    [embed] h = Gather(e, x) [project] y = MatMul(h, t)
}"""


def test_a_transposed_twin_is_told() -> None:
    table = normal(7, 4)
    notes = read(APART, e=table, t=np.ascontiguousarray(table.T)).notes
    assert any("'e' and 't' hold the same values, one transposed" in note for note in notes)


def test_a_table_that_is_stored_twice_is_told() -> None:
    body = "(int64[5] x) => (float[5,7] y) { h = Gather(e, x) y = Gemm<transB=1>(h, w) }"
    table = normal(7, 4)
    notes = read(body, e=table, w=table.copy()).notes
    assert any("'e' and 'w' hold the same values;" in note for note in notes)


def test_layers_that_start_alike_are_no_twins() -> None:
    w = normal(4, 4)
    body = "(float[2,4] x) => (float[2,4] y) { h = MatMul(x, v) y = MatMul(h, w) }"
    assert not any("hold the same values" in note for note in read(body, v=w, w=w.copy()).notes)


def test_weights_that_only_begin_alike_are_no_twins() -> None:
    first = normal(7, 4)
    second = first.T.copy()
    second[0, 1] += 1
    assert not any("hold the same values" in note for note in read(APART, e=first, t=second).notes)


def test_constant_filled_weights_are_no_twins() -> None:
    body = "(float[2,4] x) => (float[2,4] y) { h = MatMul(x, v) y = MatMul(h, w) }"
    notes = read(body, v=np.ones((4, 4)), w=np.ones((4, 4))).notes
    assert not any("hold the same values" in note for note in notes)


def test_twins_in_other_files_are_told(tmp_path: Path) -> None:
    table = normal(70, 40)
    source = with_weights(
        text_model("(int64[5] x) => (float[5,70] y) { h = Gather(e, x) y = MatMul(h, t) }"),
        e=table,
        t=np.ascontiguousarray(table.T),
    )
    path = tmp_path / "model.onnx"
    onnx.save(source, path, save_as_external_data=True, size_threshold=0)
    assert any("one transposed" in note for note in read_model(path, loss="mse").notes)
