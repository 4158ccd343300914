from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgc.api import optimize, verify
from onnxgc.api.verification import Verification
from onnxgc.emission.plan_files import write_plan
from onnxgc.errors import PlanError, RuntimeFailedError
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings
from tests.model.model_helpers import model_of, normal, text_model
from tests.training.networks import digits_network


def saved(folder: Path, text: str, **weights: np.ndarray) -> Path:
    path = folder / "model.onnx"
    onnx.save(model_of(text, opset=17, **weights), path)
    return path


def verified(path: Path, **options: Any) -> Verification:
    """The checks of a training file of the model."""
    training = path.with_name("training.onnx")
    optimize(path, training, **options)
    return verify(path, training)


SLICED = """(float[2,3,16,16] x) => (float[2,5] y) {
    a = Conv <pads = [1,1,1,1]> (x, k)
    b = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1> (a)
    two = Constant <value = int64[1] {2}> ()
    most = Constant <value = int64[1] {9223372036854775807}> ()
    zero = Constant <value = int64[1] {0}> ()
    less = Constant <value = int64[1] {-2}> ()
    rows = Constant <value = int64[1] {2}> ()
    columns = Constant <value = int64[1] {3}> ()
    c = Slice(b, two, most, rows)
    d = Slice(c, zero, less, columns)
    e = GlobalAveragePool(d)
    f = Flatten(e)
    y = Gemm(f, w)
}"""


def test_a_slice_after_a_pool_has_its_gradient_in_a_default_session(tmp_path: Path):
    """The runtime fuses a constant Pad into the pool that reads it, and rejects pads that wide."""
    path = saved(tmp_path, SLICED, k=normal(4, 3, 3, 3), w=normal(4, 5))
    found = verified(path, loss="mse")
    assert found.holds, [check for check in found.checks if not check.holds]


def test_a_scale_before_a_normalisation_has_no_effect(tmp_path: Path):
    """Its gradient vanishes; a move that changed its sign would have an effect."""
    text = """(float[4,3,24,24] x) => (float[4,5] y) {
        a = Conv <pads = [1,1,1,1]> (x, k)
        b = BatchNormalization (a, s, t, m, v)
        c = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (b)
        d = BatchNormalization <epsilon = 0.000000000001> (c, s2, t2, m2, v2)
        e = Flatten(d)
        y = Gemm(e, w)
    }"""
    ones = {name: np.ones(16) for name in ("s", "v", "s2", "v2")}
    zeros = {name: np.zeros(16) for name in ("t", "m", "t2", "m2")}
    path = saved(tmp_path, text, k=normal(16, 3, 3, 3), w=10 * normal(16 * 576, 5), **ones, **zeros)
    found = verified(path, loss="cross-entropy")
    assert found.holds, [check for check in found.checks if not check.holds]
    sizes = next(check for check in found.checks if check.name == "gradient sizes")
    assert "'s'" in sizes.detail
    assert "without effect" in sizes.detail


def test_a_file_that_a_default_session_rejects_fails_that_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path, "(float[2,3] x) => (float[2,3] y) {y = MatMul(x, w)}", w=normal(3, 3))

    def rejecting(*arguments: object, settings: SessionSettings, **options: object) -> Measurement:
        if not settings.file_order:
            raise RuntimeFailedError("the runtime does not load it")
        return measure(*arguments, settings=settings, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("onnxgc.api.verification.measure", rejecting)
    found = verified(path, loss="mse")
    assert [check.name for check in found.checks if not check.holds] == ["default session"]
    assert found.planned_by_default is None
    assert found.as_json()["planned_by_default"] is None


def test_gradients_that_are_nan_in_both_files_do_not_differ(tmp_path: Path):
    """They fail the check of sizes instead."""
    text = "(float[2,3] x) => (float[2,3] y) { a = MatMul(x, w)  b = Sub(a, a)  c = Div(b, b)  y = Mul(c, v) }"
    path = saved(tmp_path, text, w=normal(3, 3), v=normal(3))
    found = verified(path, loss="mse")
    failed = {check.name for check in found.checks if not check.holds}
    assert "gradients" not in failed
    assert "gradient sizes" in failed
    loss = next(check for check in found.checks if check.name == "loss")
    assert (loss.holds, loss.detail.split(",")[0]) == (False, "nan: the baseline has nan already")


def test_an_error_does_not_name_temporary_files(tmp_path: Path):
    model = text_model("(bfloat16[2,3] x) => (bfloat16[2,4] y) { z = MatMul(x, w) y = Tanh(z) }")
    weight = normal(3, 4).astype(ml_dtypes.bfloat16)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    training = tmp_path / "training.onnx"
    optimize(model, training, loss="mse")
    with pytest.raises(RuntimeFailedError, match=r"^the baseline does not run") as caught:
        verify(model, training)
    assert "regular.onnx" not in str(caught.value)
    assert "MatMul" in str(caught.value)


def test_a_file_with_an_optimizer_is_run_in_place(tmp_path: Path):
    """With Dropout, whose masks both files draw by the step's number."""
    onnx.save(digits_network(batch=8), tmp_path / "model.onnx")
    optimize(tmp_path / "model.onnx", tmp_path / "training.onnx", optimizer="adamw")
    found = verify(tmp_path / "model.onnx", tmp_path / "training.onnx", runs=2)
    assert found.holds, [check for check in found.checks if not check.holds]
    details = {check.name: check.detail for check in found.checks}
    assert details["gradients"] == "8 new parameters, all states and all statistics are bit-identical"
    assert "head.bias" in details["gradient sizes"]


def test_a_plan_file_is_verified_by_its_training_file(tmp_path: Path):
    onnx.save(digits_network(), tmp_path / "model.onnx")
    shapes = {"image": (4, 1, 8, 8)}
    made = optimize(tmp_path / "model.onnx", input_shapes=shapes, check=False)
    write_plan(made.plan, tmp_path / "plan.json", solver="peak")
    found = verify(tmp_path / "model.onnx", tmp_path / "plan.json", input_shapes=shapes)
    assert found.holds, [check for check in found.checks if not check.holds]
    (tmp_path / "other.json").write_text('{"kind": "onnxgc.plan", "schema": 9}', encoding="utf-8")
    with pytest.raises(PlanError, match="has schema 9"):
        verify(tmp_path / "model.onnx", tmp_path / "other.json")
    optimize(tmp_path / "model.onnx", tmp_path / "training.onnx", input_shapes=shapes, check=False)
    with pytest.raises(PlanError, match="with a plan file only"):
        verify(tmp_path / "model.onnx", tmp_path / "training.onnx", input_shapes=shapes)
