import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgc
from onnxgc.api import bench
from onnxgc.errors import OnnxgcError
from tests.api.chains import chain
from tests.cli.command import run_command
from tests.training.samples import samples

DRY = ("optimize", "model.onnx", "--no-check", "--dry-run")
TRAIN = ("train", "model.onnx", "--data", "data.npz")
FILE = ("train", "training.onnx", "--data", "data.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("files")
    onnx.save(chain(2, batch=64), here / "model.onnx")
    onnx.save(chain(2, batch=64), here / "other.onnx")
    how: dict[str, Any] = {"check": False, "optimizer": "sgd"}
    onnxgc.optimize(here / "model.onnx", here / "training.onnx", **how)
    data = samples(0, 64)
    np.savez(here / "data.npz", **data)
    np.savez(here / "tested.npz", **data, **{f"{name}_test": array for name, array in data.items()})
    edges = [[number, number + 1] for number in range(4)]
    vertices = [{"id": number, "size": 1} for number in range(5)]
    nodes = [{"id": number, "size": 1.5, "duration": 1} for number in range(5)]
    bare = {"vertices": vertices, "edges": edges, "source": 0, "target": 4}
    (here / "graph.json").write_text(json.dumps(bare), encoding="utf-8")
    operators = {"nodes": nodes, "edges": [*edges, [0, 4]]}
    (here / "operators.json").write_text(json.dumps(operators), encoding="utf-8")
    return here


@pytest.mark.parametrize(
    "words, expected",
    [
        ((*DRY, "--plan", "training.onnx", "--time-limit", "1"), "leave out --time-limit"),
        ((*DRY, "--plan", "training.onnx", "--json", "training.onnx"), "is one of the files that are read"),
        ((*DRY, "--save-external-data"), "--save-external-data needs the file that --dry-run does not write"),
        ((*DRY, "--verify", "1"), "--verify needs the file that --dry-run does not write"),
        ((*DRY, "--quiet", "--verbose"), "drop one of them"),
        ((*DRY, "--solver", "peak", "--device", "a100"), "--device applies to a budget only"),
        (("inspect", "model.onnx", "--device", "h200"), "give --provider cuda with it"),
        (("inspect", "model.onnx", "--provider", "cuda", "--device", "h2"), "unknown device 'h2'"),
        (("compare", "model.onnx", "other.onnx", "--device", "a100"), "--device does not apply"),
        (("bench", "model.onnx", "--plan", "training.onnx", "--time-limit", "1"), "leave out --time-limit"),
        (("verify", "model.onnx", "training.onnx", "--input-shapes", "x:32,16"), "with a plan file only"),
        (("verify", "model.onnx", "training.onnx", "--loss", "mse"), "with a plan file only"),
        (("solve", "graph.json", "--draws", "3"), "--draws applies to the solver 'random', not 'acg'"),
        (("solve", "graph.json", "--slots", "3"), "--slots applies to the solver 'revolve', not 'acg'"),
        (("solve", "graph.json", "--checkpoints", "1", "--solver", "acg"), "selects the solver 'manual'"),
        (("solve", "operators.json", "--budget", "80%", "--draws", "3"), "--draws applies to checkpoints"),
        ((*TRAIN, "--batch", "16", "--input-shapes", "x:32,16"), "'x' has 32 samples; give one of them"),
        ((*TRAIN, "--plan", "training.onnx", "--time-limit", "1"), "leave out --time-limit"),
        ((*TRAIN, "--model", "other.onnx"), "two forward models are given"),
        (("train", "model.onnx", "--data", "tested.npz", "--validation", "data.npz"), "drop one of them"),
        ((*FILE, "--batch", "16"), "batch cannot be changed in a training file"),
        ((*FILE, "--accumulate", "2"), "accumulate cannot be changed in a training file"),
        ((*FILE, "--weight-decay", "0.1"), "a training file has its plan already; leave out --weight-decay"),
        ((*FILE, "--input-shapes", "x:32,16"), "leave out --input-shapes"),
        ((*FILE, "--out", "trained.onnx"), "--out needs the forward model of the training file"),
        ((*FILE, "--validation", "data.npz"), "--validation needs the forward model of the training file"),
        (
            ("train", "training.onnx", "--data", "tested.npz"),
            "needs the forward model of the training file; give it by --model",
        ),
    ],
)
def test_no_option_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str):
    monkeypatch.chdir(folder)
    before = set(folder.iterdir())
    error = run_command(*words, code=2).err
    assert expected in error
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda model: onnxgc.optimize(model, solver="peak", order="fixed"), "order applies to a budget"),
        (lambda model: onnxgc.optimize(model, solver="peak", device="a100"), "device applies to a budget"),
        (lambda model: onnxgc.optimize(model, solver="peak", calibrate="t.json"), "calibrate applies to a budget"),
        (lambda model: onnxgc.optimize(model, solver="peak", step_limit=3), "step_limit applies to a budget"),
        (lambda model: bench(model, device="a100", calibrate="times.json"), "both sources of durations"),
    ],
)
def test_no_argument_is_ignored(call: Callable[[onnx.ModelProto], object], words: str):
    with pytest.raises(OnnxgcError, match=words):
        call(chain(2, batch=64))


@pytest.mark.parametrize("budget, limit", [("4.5", 4.5), (4.5, 4.5), ("5", 5), ("6.2", 6), ("100%", 4.5), (1.0, 4.5)])
def test_a_budget_of_a_bare_graph_is_a_size_in_its_unit(folder: Path, budget: Any, limit: float):
    """Sizes are 1.5 each; a limit is rounded down to a multiple of what all are multiples of."""
    assert onnxgc.solve(folder / "operators.json", budget=budget).report["budget"] == limit


def test_a_fraction_up_to_1_is_a_share(folder: Path):
    with pytest.raises(OnnxgcError, match=r"no sequence fits 3\.5"):
        onnxgc.solve(folder / "operators.json", budget=".8")


def test_a_run_that_is_done_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(folder)
    state = str(tmp_path / "run.safetensors")
    for is_done in (False, True):
        assert ("the state has 1 epochs already" in run_command(*FILE, "--state", state, "--resume").out) is is_done
