import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.cli import train as train_module
from onnxgc.errors import TrainingError
from tests.api.chains import chain
from tests.cli.command import run_command as call

BUDGET = ("--budget", "60%")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(chain(3, batch=8), tmp_path / "m.onnx")
    (tmp_path / "folder").mkdir()
    for name, text in (("empty.onnx", ""), ("empty.json", ""), ("text.onnx", "no model\n")):
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe")
    np.savez(tmp_path / "d.npz", x=np.zeros(1))
    monkeypatch.chdir(tmp_path)


def rejected(*arguments: str) -> str:
    before = sorted(os.listdir())
    shown = call(*arguments, code=2)
    assert shown.out == ""
    assert sorted(os.listdir()) == before
    return shown.err.removeprefix("onnxgc: ").strip()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("optimize", "m.onnx", *BUDGET, "--order", "foo"), "'--order': 'foo' is not one of 'free', 'fixed'"),
        (("train", "m.onnx", "--data", "d", "--schedule", "x"), "'x' is not one of 'constant', 'step'"),
        (("bench", "m.onnx", "--optimizer", "x"), "'x' is not one of 'none', 'sgd', 'adamw'"),
        (("compare", "m.onnx", "--seed", "1.5"), "'--seed': '1.5' is not an integer"),
        (("compare", "m.onnx", "--seed", "-1"), "'--seed': '-1' is not at least 0"),
        (("optimize", "m.onnx", "--seed", str(2**64)), f"'{2**64}' is not at most {2**32 - 1}"),
        (("verify", "m.onnx", "m.onnx", "--threads", "9999"), "'9999' is not at most 1024"),
        (("solve", "g.json", "--time-limit", "soon"), "'--time-limit': 'soon' is not a number"),
        (("bench", "m.onnx", "--time-limit", "nan"), "'nan' is not at least 0"),
        (("optimize", "m.onnx", *BUDGET, "--time-limit", "inf"), "'inf' is not a finite number"),
        (("train", "m.onnx", "--data", "d", "--lr", "inf"), "'--lr': 'inf' is not a finite number"),
        (("train", "m.onnx", "--data", "d", "--clip-norm", "nan"), "'nan' is not a finite number"),
        (("train", "m.onnx", "--data", "d", "--budget", ""), "'--budget': the value is empty"),
        (("compare", "m.onnx", "m.onnx", "--carry-over", " "), "'--carry-over': the value is empty"),
        (("inspect", "m.onnx", "--freeze", "a", "--freeze", ""), "'--freeze': the value is empty"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_rejected(arguments: tuple[str, ...], expected: str):
    line = rejected(*arguments)
    assert expected in line
    assert line.endswith(f"; see `onnxgc {arguments[0]} --help`")
    assert "error" not in line
    assert "Input" not in line


@pytest.mark.parametrize(
    "command, model, expected",
    [
        ("optimize", "folder", "'folder' is a directory, not an ONNX file"),
        ("inspect", "none.onnx", "there is no file 'none.onnx'"),
        ("bench", "empty.onnx", "'empty.onnx' is empty (0 bytes)"),
        ("compare", "text.onnx", "'text.onnx' is not an ONNX file"),
        ("train", "pipe", "'pipe' is not a regular file"),
        ("verify", "m.onnx/x", "'m.onnx/x' cannot be read: Not a directory"),
    ],
)
def test_a_file_that_is_not_a_model_is_rejected_by_all_commands(command: str, model: str, expected: str):
    more = {"verify": (model,), "train": ("--data", "d.npz")}.get(command, ())
    assert expected in rejected(command, model, *more)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("optimize", "m.onnx", "-"), "OUTPUT '-': only --json writes to standard output"),
        (("optimize", "m.onnx", "--dry-run", "--report", "-"), "--report '-'"),
        (("train", "m.onnx", "--data", "d.npz", "--state", "-"), "--state '-'"),
        (("optimize", "m.onnx", "--plan", "empty.json"), "'empty.json' is empty (0 bytes)"),
        (("solve", "empty.json"), "the graph 'empty.json' is empty"),
        (("solve", "empty.json", "--budget", ".8"), "the graph 'empty.json' is empty"),
        (("train", "m.onnx", "--data", "folder"), "'folder' cannot be read: Is a directory"),
        (("compare", "m.onnx", "--order", "fixed"), "--order applies to a budget only"),
        (("bench", "m.onnx", "--step-limit", "3"), "--step-limit applies to a budget only"),
    ],
)
def test_unsuitable_files_and_options_are_rejected(arguments: tuple[str, ...], expected: str):
    assert expected in rejected(*arguments)


def test_a_time_limit_of_0_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    def trainer(*_: object, **options: Any) -> None:
        asked.update(options)
        raise TrainingError("enough")

    monkeypatch.setattr(train_module, "Trainer", trainer)
    monkeypatch.setattr(train_module, "read_arrays", lambda source: {})
    call("train", "m.onnx", "--data", "d.npz", "--time-limit", "0", code=2)
    assert asked["time_limit"] == 0.0
    assert "budget" not in asked
