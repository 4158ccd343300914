import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxgc.api.benchmarking import Benchmark, Contender, bench
from onnxgc.cli import bench as command
from tests.api.chains import chain
from tests.cli.command import run_command as call

REGULAR = Contender(5519 * 10**6, 5417 * 10**6, 5519 * 10**6, 5600 * 10**6, 5417 * 10**6, (0.202, 0.21, 0.25))
PLANNED = Contender(1592 * 10**6, 1490 * 10**6, 1592 * 10**6, 1600 * 10**6, 1490 * 10**6, (0.22, 0.207, 0.26))
FOUND = Benchmark(
    model="models/resnet50.onnx",
    inputs={"x": (64, 3, 224, 224)},
    provider="CPUExecutionProvider",
    device="a machine",
    threads=2,
    runs=3,
    warm_up=1,
    seed=0,
    solver="peak",
    status="feasible",
    budget_bytes=None,
    predicted_extra_ratio=0.031,
    timing="data sheet of one core of a CPU",
    regular=REGULAR,
    planned=PLANNED,
    versions={"onnxgc": "1", "onnxruntime": "2"},
    notes=("loss: [4, 1000]",),
)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(chain(3, batch=64), tmp_path / "chain.onnx")
    monkeypatch.chdir(tmp_path)


def recorded(monkeypatch: pytest.MonkeyPatch, found: Benchmark) -> dict[str, Any]:
    given: dict[str, Any] = {}

    def replacement(*arguments: Any, **options: Any) -> Benchmark:
        given.update(inspect.signature(bench).bind(*arguments, **options).arguments)
        return found

    monkeypatch.setattr(command, "bench", replacement)
    return given


def cells(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines()]


def test_tables(monkeypatch: pytest.MonkeyPatch):
    recorded(monkeypatch, FOUND)
    shown = call("bench", "chain.onnx")
    assert shown.err == ""
    assert all(len(line) <= 80 for line in shown.out.splitlines())
    assert "\x1b" not in shown.out
    rows = cells(shown.out)
    assert ["resnet50,", "64", "5,417", "1,490", "72.5%", "202", "ms", "207", "ms", "4.00%"] in rows
    assert ["peak,", "simulated", "5,519", "MB", "1,592", "MB", "28.8%"] in rows
    assert ["step,", "best", "202", "ms", "207", "ms", "102%"] in rows
    assert ["samples", "per", "second", "317", "309"] in rows
    assert ["predicted", "3.10%"] in rows
    assert "threads: 2" in shown.out
    assert "note: loss: [4, 1000]" in shown.out


def test_a_missing_figure_is_a_dash(monkeypatch: pytest.MonkeyPatch):
    failed = Contender(5519, 5417, failure="the baseline does not run: no memory")
    unknown = Contender(1592, 1490, step_seconds=(0.2,))
    recorded(monkeypatch, replace(FOUND, regular=failed, planned=unknown, threads=None, budget_bytes=2 * 10**6))
    shown = call("bench", "chain.onnx").out
    assert ["resnet50,", "64", "-", "-", "-", "-", "200", "ms", "-"] in cells(shown)
    text = " ".join(shown.split())
    assert "the baseline was not measured: the baseline does not run" in text
    assert "no peak was measured: the profile does not cover the arena of CPUExecutionProvider" in text
    assert "plan: peak within 2.0 MB, feasible" in text


def test_json_markdown_and_quiet(monkeypatch: pytest.MonkeyPatch):
    recorded(monkeypatch, FOUND)
    shown = call("bench", "chain.onnx", "--json", "-", "--markdown")
    assert json.loads(shown.out) == FOUND.as_json()
    assert "| resnet50, 64 | 5,417 | 1,490 | 72.5% | 202 ms | 207 ms | 4.00% |" in shown.err
    assert "\n- plan: peak, feasible" in shown.err
    done = call("bench", "chain.onnx", "--json", "figures.json", "-q")
    assert (done.out, done.err) == ("", "")
    assert json.loads(Path("figures.json").read_text(encoding="utf-8")) == FOUND.as_json()


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch):
    given = recorded(monkeypatch, FOUND)
    options = "--budget 60% --loss mse --freeze a --freeze b --trainable c --input-shapes x:8,16 --threads 1"
    more = "--provider cpu --runs 9 --warm-up 0 --plan p.json --solver acg --device h100 --no-check --untie"
    call("bench", "chain.onnx", *options.split(), *more.split())
    assert {key: given[key] for key in ("model", "budget", "loss", "freeze", "trainable", "threads")} == {
        "model": "chain.onnx",
        "budget": "60%",
        "loss": "mse",
        "freeze": ("a", "b"),
        "trainable": ("c",),
        "threads": 1,
    }
    assert given["input_shapes"] == {"x": (8, 16)}
    assert (given["provider"], given["runs"], given["warm_up"]) == ("cpu", 9, 0)
    assert (given["plan"], given["solver"], given["device"]) == ("p.json", "acg", "h100")
    assert (given["check"], given["untie"], given["freeze_bn"]) == (False, True, False)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["none.onnx"], "there is no file 'none.onnx'"),
        (["bad.onnx"], "'bad.onnx' is not an ONNX file"),
        (["chain.onnx", "--provider", "tpu"], "unknown provider 'tpu'"),
        (["chain.onnx", "--solver", "manual"], "give --plan"),
        (["chain.onnx", "--runs", "0"], "--runs"),
        (["chain.onnx", "--json", "chain.onnx"], "one of the files that are read or written"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str):
    Path("bad.onnx").write_text("not a model")
    assert expected in call("bench", *arguments, code=2).err
