"""One run of the forward model before it is planned."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgc.api import optimize, trial
from onnxgc.errors import ModelFileError
from onnxgc.model.read import read_model
from onnxgc.runtime.ort import SessionSettings, make_session
from tests.model.model_helpers import normal, text_model, with_weights

GOOD = "(float[2,3] x) => (float[2,4] y) { y = MatMul(x, w) }"
# ONNX's checker sees nothing wrong: the index is out of range only when it runs.
BROKEN = """(float[2,3] x) => (float[2,1] y) <int64[2,1] far = {7, 7}> {
    h = MatMul(x, w) y = GatherElements<axis=1>(h, far) }"""


def model(body: str) -> onnx.ModelProto:
    return with_weights(text_model(body), w=normal(3, 4))


def test_a_model_that_runs_leaves_no_note() -> None:
    assert (
        optimize(model(GOOD), loss="mse").report["notes"]
        == optimize(model(GOOD), loss="mse", check=False).report["notes"]
    )


def test_a_model_that_does_not_run_is_refused_with_the_runtime_s_reason() -> None:
    with pytest.raises(ModelFileError, match=r"does not run on ONNX Runtime.*Out of range.*--no-check"):
        optimize(model(BROKEN), loss="mse")


def test_a_model_that_does_not_load_is_refused() -> None:
    source = text_model(
        "(float[2,3] x) => (float[2,4] y) { h = MatMul(x, w) y = acme.Layer(h) }", domains=', "acme": 1'
    )
    source.graph.value_info.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (2, 4)))
    with pytest.raises(ModelFileError, match=r"does not run on ONNX Runtime.*acme"):
        trial.trial_run(with_weights(source, w=normal(3, 4)), optimize(model(GOOD), loss="mse").planned.model)


def test_a_model_that_stock_optimisation_breaks_is_tried_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime does not always load what it saved itself."""

    def with_broken_optimiser(
        source: onnx.ModelProto, *, settings: SessionSettings, is_silent: bool
    ) -> object:
        if not settings.file_order:
            raise RuntimeError("type inference failed")
        return make_session(source, settings=settings, is_silent=is_silent)

    monkeypatch.setattr(trial, "make_session", with_broken_optimiser)
    assert trial.trial_run(model(GOOD), read_model(model(GOOD), loss="mse")) == ""
    with pytest.raises(ModelFileError, match="does not run on ONNX Runtime"):
        trial.trial_run(model(BROKEN), read_model(model(BROKEN), loss="mse"))


def test_a_model_of_many_operations_is_loaded_but_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_FLOPS", 1)
    notes = optimize(model(BROKEN), loss="mse").report["notes"]
    assert any("not run before planning" in note for note in notes)


def test_weights_in_other_files_are_found_beside_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(GOOD), path, save_as_external_data=True, size_threshold=0)
    notes = optimize(path, loss="mse").report["notes"]
    assert not any("not tried" in note for note in notes)
    inner = onnx.load(path, load_external_data=False)
    note = trial.trial_run(inner, read_model(inner, loss="mse"))
    assert "keeps its weights in other files" in note


def test_text_files_are_tried_too(tmp_path: Path) -> None:
    path = tmp_path / "model.textproto"
    onnx.save(model(GOOD), path)
    assert optimize(path, loss="mse").report["status"]


def test_without_onnx_runtime_the_model_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    notes = optimize(model(BROKEN), loss="mse").report["notes"]
    assert any("ONNX Runtime is not installed" in note for note in notes)


def test_inputs_take_the_given_shape_where_the_file_leaves_it_open() -> None:
    source = model("(float[N,3] x) => (float[N,4] y) { y = MatMul(x, w) }")
    result = optimize(source, loss="mse", input_shapes={"x": (5, 3)})
    assert result.planned.model.types["x"].shape == (5, 3)


def test_a_type_without_a_kernel_on_the_cpu_is_told_and_not_refused() -> None:
    source = text_model("(bfloat16[2,3] x) => (bfloat16[2,3] y) { y = Mul(x, w) }")
    value = onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, (2, 3), np.ones(6))
    source.graph.initializer.append(value)
    notes = optimize(source, loss="mse").report["notes"]
    assert any("could not be tried on the CPU" in note for note in notes)


def test_an_input_that_is_declared_empty_is_fed_empty() -> None:
    source = model("(float[0,3] x) => (float[0,4] y) { y = MatMul(x, w) }")
    assert trial.trial_run(source, read_model(source, loss="mse")) == ""


def test_the_runtime_itself_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelFileError):
        optimize(model(BROKEN), loss="mse")
    assert capfd.readouterr() == ("", "")
