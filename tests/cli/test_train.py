import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.training.state import load_state
from tests.cli.command import run_command as call
from tests.training.networks import digits, digits_network


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_network(), "model.onnx")
    train, test = digits()
    arrays = {name: array[:320] for name, array in train.items()}
    np.savez("digits.npz", **arrays, image_test=test["image"][:96], labels_test=test["labels"][:96])


def test_a_run_is_saved_resumed_and_written_back():
    base = ("train", "model.onnx", "--data", "digits.npz", "--lr", "3e-3", "--threads", "1")
    shown = call(*base, "--epochs", "2", "--out", "whole.onnx", "--json", "whole.json").out
    assert "9,978 parameters in 8 tensors, adamw, batches of 32" in shown
    assert "wrote whole.onnx" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    figures = json.loads(Path("whole.json").read_text(encoding="utf-8"))
    assert [entry["updates"] for entry in figures["epochs"]] == [10, 20]
    assert 0 < figures["epochs"][-1]["validation_accuracy"] <= 1
    parts = (*base, "--out", "parts.onnx", "--state", "parts.safetensors", "--resume", "-q")
    call(*parts, "--epochs", "1")
    assert load_state("parts.safetensors").position.epoch == 1
    assert call(*parts, "--epochs", "2").out == ""
    whole, again = (onnx.load(f"{name}.onnx").SerializeToString() for name in ("whole", "parts"))
    assert whole == again


def test_all_settings_reach_the_run():
    options = ("--optimizer", "sgd", "--momentum", "0.9", "--nesterov", "--weight-decay", "1e-4")
    more = ("--clip-norm", "1", "--schedule", "cosine", "--warm-up", "2", "--accumulate", "2", "--batch", "16")
    plan = ("--budget", "95%", "--time-limit", "1", "--loss", "cross-entropy", "--freeze", "conv1.*")
    shown = call("train", "model.onnx", "--data", "digits.npz", *options, *more, *plan, "--json", "-")
    figures = json.loads(shown.out)
    assert "batches of 16, 2 to an update" in shown.err
    assert figures["epochs"][0]["updates"] == 10
    # Behind ten updates of ten the next rate of a cosine would be 0.
    assert figures["epochs"][0]["learning_rate"] == pytest.approx(1e-3 * (1 + np.cos(0.9 * np.pi)) / 2)
    state = load_state("model.state.safetensors")
    assert state.optimizer is not None
    expected = {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "clip_norm": 1.0}
    assert {key: state.optimizer[key] for key in expected} == expected
    assert "conv1.weight" not in state.arrays


def test_a_training_file_with_its_model():
    shapes = ("--input-shapes", "image:64,1,8,8")
    call("optimize", "model.onnx", "t.onnx", *shapes, "--optimizer", "adamw", "--no-check", "-q")
    with_model = ("--data", "digits.npz", "--model", "model.onnx", "--out", "trained.onnx")
    assert "batches of 64" in call("train", "t.onnx", *with_model).out
    assert Path("trained.onnx").exists()


@pytest.mark.parametrize(
    "words, expected",
    [
        (("model.onnx", "--data", "nothing.npz"), "'nothing.npz' cannot be read"),
        (("model.onnx", "--data", "model.onnx"), "'model.onnx' cannot be read as an .npz file"),
        (("model.onnx", "--data", "digits.npz", "--out", "model.onnx"), "is one of the files"),
        (("model.onnx", "--data", "digits.npz", "--state", "digits.npz"), "is one of the files"),
        (("model.onnx", "--data", "digits.npz", "--out", "folder/a.onnx"), "folder"),
        (("model.onnx", "--data", "digits.npz", "--momentum", "0.9"), "--momentum does not apply to adamw"),
        (("model.onnx", "--data", "digits.npz", "--budget", "1%"), "no plan fits"),
        (("model.onnx", "--data", "digits.npz", "--resume", "--state", "bad.safetensors"), "is not the state of a run"),
        (("model.onnx", "--data", "other.npz"), "the data has no 'image'"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(words: tuple[str, ...], expected: str):
    Path("bad.safetensors").write_bytes(b"no state")
    np.savez("other.npz", picture=np.zeros((4, 1, 8, 8), np.float32), mask=np.zeros(4), labels=np.zeros(4, int))
    before = {path: path.read_bytes() for path in Path().iterdir()}
    error = call("train", *words, code=3 if "--budget" in words else 2).err
    assert expected in error
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_file_without_an_optimizer_is_rejected():
    call("optimize", "model.onnx", "t.onnx", "--no-check", "-q")
    assert "has no optimizer" in call("train", "t.onnx", "--data", "digits.npz", code=2).err


def test_a_run_that_cannot_be_saved_continues(monkeypatch: pytest.MonkeyPatch):
    def gone(*_: Any) -> dict[str, float]:
        shutil.rmtree("states", ignore_errors=True)
        return {}

    Path("states").mkdir()
    monkeypatch.setattr("onnxgc.training.trainer.Trainer.evaluate", gone)
    files = ("--data", "digits.npz", "--state", "states/a.safetensors", "--out", "a.onnx")
    shown = call("train", "model.onnx", *files).out
    assert "the run continues, but it was not saved: cannot write" in shown.replace("\n", " ")
    assert Path("a.onnx").exists()
