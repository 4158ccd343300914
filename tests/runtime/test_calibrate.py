import json
from dataclasses import replace
from pathlib import Path

import pytest

from onnxgc.errors import DurationError, OutputFileError
from onnxgc.model.read import read_model
from onnxgc.runtime import calibrate as module
from onnxgc.runtime.calibrate import calibrate, calibration_in, read_calibration, write_calibration
from onnxgc.tracing.calibrated_durations import Calibration
from onnxgc.tracing.durations import durations_ns, forward_works
from onnxgc.tracing.step_graph import TrainingStep, trace
from tests.model.model_helpers import model_of
from tests.test_models import MODELS

CPU = ("CPUExecutionProvider",)


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    """A network whose file holds no weights worth training from; MaxPool's indices are read by backward."""
    model = read_model(MODELS / "resnet18.onnx", input_shapes={"x": (2, 3, 64, 64)})
    return trace(model, seed="loss_scale")


@pytest.fixture(scope="module")
def calibration(step: TrainingStep) -> Calibration:
    return calibrate(step, providers=CPU, threads=1, runs=2)


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was run though a file is there")

    monkeypatch.setattr(module, "calibrate", fail)


def test_every_forward_operator_is_measured(step: TrainingStep, calibration: Calibration):
    works = [work for work in forward_works(step) if not work.is_free]
    assert [found.work for found in calibration.operators] == works
    assert sum(found.median_ns for found in calibration.operators) > 0
    assert (calibration.provider, calibration.threads, calibration.runs) == (CPU[0], 1, 2)
    assert calibration.device
    assert calibration.onnxruntime


def test_a_calibration_covers_the_whole_step(step: TrainingStep, calibration: Calibration):
    found = durations_ns(step, calibration)
    measured = {operator.work.name: operator.median_ns for operator in calibration.operators}
    assert measured.items() <= found.items()
    forward = sum(found[operator.name] for operator in step.graph.forward)
    # Two products in backward for each in forward, and what surrounds them.
    assert 1.2 * forward < sum(found.values()) - forward < 8 * forward


def test_a_written_calibration_is_read_back(calibration: Calibration, tmp_path: Path):
    write_calibration(calibration, tmp_path / "times.json")
    assert read_calibration(tmp_path / "times.json") == calibration


def test_a_missing_calibration_is_created(step: TrainingStep, tmp_path: Path):
    path = tmp_path / "times.json"
    made, note = calibration_in(path, step, providers=CPU, threads=1, runs=1)
    assert note == ""
    assert read_calibration(path) == made


@pytest.mark.usefixtures("never_measured")
def test_an_existing_calibration_is_read(step: TrainingStep, calibration: Calibration, tmp_path: Path):
    write_calibration(calibration, tmp_path / "times.json")
    assert calibration_in(tmp_path / "times.json", step) == (calibration, "")


@pytest.mark.usefixtures("never_measured")
def test_a_calibration_of_another_model_is_used_by_its_rates(calibration: Calibration, tmp_path: Path):
    body = "(float[64, 64] x) => (float[64, 64] y) { h = MatMul(x, w) y = Erf(h) }"
    other = trace(read_model(model_of(body, w=(64, 64))), seed="loss_scale")
    write_calibration(calibration, tmp_path / "times.json")
    found, note = calibration_in(tmp_path / "times.json", other)
    assert "measured on another model" in note
    assert "with 0 of these 2 operators" in note
    assert all(found.duration_ns(work) > 0 for work in forward_works(other) if not work.is_free)


@pytest.mark.usefixtures("never_measured")
def test_a_calibration_of_another_batch_is_scaled(calibration: Calibration, tmp_path: Path):
    model = read_model(MODELS / "resnet18.onnx", input_shapes={"x": (4, 3, 64, 64)})
    larger = trace(model, seed="loss_scale")
    write_calibration(calibration, tmp_path / "times.json")
    found, note = calibration_in(tmp_path / "times.json", larger)
    assert "at other shapes" in note
    longer = [
        found.duration_ns(work) / measured.median_ns
        for work in forward_works(larger)
        if work.kind == "Conv" and (measured := found.measured(work)) is not None
    ]
    assert len(longer) == 20
    assert all(1.5 < ratio <= 2 for ratio in longer)


@pytest.mark.usefixtures("never_measured")
def test_nothing_runs_if_the_file_cannot_be_written(step: TrainingStep, tmp_path: Path):
    with pytest.raises(OutputFileError, match="does not exist"):
        calibration_in(tmp_path / "nowhere" / "times.json", step)


@pytest.mark.parametrize(
    "text, hint",
    [
        ("no JSON", "is not a calibration"),
        ("[]", "is not a calibration"),
        ("{}", "'schema' is missing"),
        ('{"schema": 99}', "has schema 99"),
        ('{"schema": 1, "threads": 1}', "'operators' is missing"),
    ],
)
def test_files_that_are_not_calibrations_are_rejected_in_one_line(text: str, hint: str, tmp_path: Path):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(DurationError, match=hint) as caught:
        read_calibration(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_times_without_bytes_are_rejected(calibration: Calibration, tmp_path: Path):
    """They would have no proportion to anything."""
    path = tmp_path / "times.json"
    first = calibration.operators[0]
    write_calibration(replace(calibration, operators=(replace(first, work=replace(first.work, moved_bytes=0)),)), path)
    assert json.loads(path.read_text())["operators"][0]["bytes"] == 0
    with pytest.raises(DurationError, match="is not a calibration"):
        read_calibration(path)
