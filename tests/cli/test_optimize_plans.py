"""Plans in files: `--save-plan` and `--plan`."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import onnxgc
from onnxgc.api import optimize
from onnxgc.emission.plan_files import write_plan
from onnxgc.errors import PlanError
from tests.api.chains import chain
from tests.cli.command import run_command


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    onnx.save(chain(), tmp_path / "chain.onnx")
    monkeypatch.chdir(tmp_path)
    return "chain.onnx"


def run(*arguments: str) -> int:
    return run_command("optimize", *arguments, "--no-check")


@pytest.mark.parametrize("options", [[], ["--budget", "60%", "--step-limit", "2"], ["--solver", "chen-sqrt"]])
def test_a_plan_from_a_file_gives_the_same_training_file(
    options: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "first.onnx", "--save-plan", "plan.json", *options) == 0
    assert "wrote plan.json" in capsys.readouterr().out
    assert json.loads(Path("plan.json").read_text(encoding="utf-8"))["kind"] == "onnxgc.plan"
    assert run(model, "second.onnx", "--plan", "plan.json") == 0
    assert run(model, "third.onnx", "--plan", "first.onnx") == 0
    names = ("first.onnx", "second.onnx", "third.onnx")
    graphs = [onnx.load(name).graph.SerializeToString() for name in names]
    assert graphs[0] == graphs[1] == graphs[2]


def test_a_plan_excludes_the_options_of_a_search(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "training.onnx") == 0
    for option in (["--budget", "60%"], ["--solver", "acg"], ["--checkpoints", "h1"], ["--pareto"]):
        assert run(model, "--plan", "training.onnx", *option, "--dry-run") == 2
        assert "a plan replaces a search" in capsys.readouterr().err
    onnx.save(chain(2), "other.onnx")
    assert run("other.onnx", "--plan", "training.onnx", "--dry-run") == 2
    assert "is not an operator of the step" in capsys.readouterr().err
    assert run(model, "training.onnx", "--save-plan", "training.onnx") == 2
    assert "--save-plan" in capsys.readouterr().err


def test_the_result_of_a_search_is_a_plan() -> None:
    found = onnxgc.optimize(chain(), check=False)
    again = onnxgc.optimize(chain(), check=False, plan=found)
    for key in ("planned", "checkpoints"):
        assert again.report[key] == found.report[key]
    assert again.report["solver"] == "plan"
    with pytest.raises(PlanError, match="a plan replaces a search"):
        onnxgc.optimize(chain(), plan=found, solver="acg")


def test_verbose_and_quiet(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--dry-run") == 0
    usual = capsys.readouterr().out
    assert "memory over one step" in usual
    assert "checkpoints: " not in usual
    assert max(map(len, usual.splitlines())) <= 80
    assert run(model, "--dry-run", "-v") == 0
    more = capsys.readouterr().out
    assert "checkpoints: x" in more
    assert "solve 0." in more
    assert run(model, "--dry-run", "-q", "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"] == model
    assert not shown.err


def test_a_plan_for_another_file_gives_a_note(tmp_path: Path) -> None:
    for name in ("one", "other"):
        onnx.save(chain(4), tmp_path / f"{name}.onnx")
    found = optimize(tmp_path / "one.onnx", check=False)
    write_plan(found.plan, tmp_path / "plan.json", solver="peak", model="folder/one.onnx")
    notes = [
        optimize(tmp_path / f"{name}.onnx", plan=tmp_path / "plan.json", check=False).report["notes"]
        for name in ("one", "other")
    ]
    assert "the plan was made for 'folder/one.onnx'" not in notes[0]
    assert "the plan was made for 'folder/one.onnx'" in notes[1]
