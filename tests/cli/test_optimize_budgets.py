"""`optimize` with a budget: output, exit codes, JSON keys, and Ctrl-C."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.api.chains import chain
from tests.cli.command import run_command

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = ("--dry-run", "--no-check", "--step-limit", "1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    onnx.save(chain(), tmp_path / "chain.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return "chain.onnx"


def test_memory_and_time_are_shown_with_lower_bounds(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("optimize", model, *QUICK, "--budget", "60%", "--order", "fixed", "--device", "a100") == 0
    shown = capsys.readouterr()
    assert not shown.err
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in shown.out
    rows = {cells[0]: cells[1:] for line in lines if len(cells := [c.strip() for c in line.split("│")[1:]]) > 2}
    assert rows["memory budget"][1:3] == ["0.944 MB", "60%"]
    assert rows["simulated peak"][0] == "1.6 MB"
    assert rows["extra time"][1] == rows["lower bound on extra time"][1] == "10.7%"
    assert "gap" not in rows
    assert "optimal: no plan within the budget takes less time" in shown.out
    last = "durations: data sheet of NVIDIA A100 SXM 80GB; operator order: fixed (the model's)"
    assert last in " ".join(shown.out.split())
    assert run_command("optimize", model, *QUICK, "--budget", "32%", "--device", "cpu") == 0
    feasible = capsys.readouterr().out
    assert "of the extra time" in feasible
    assert "of the time could still be saved" in " ".join(feasible.split())
    assert "one core of a CPU" in feasible


def test_figures_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("optimize", model, *QUICK, "--budget", "min", "--json", "-") == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert set(report["budget"]) >= {
        "bytes", "timing", "order", "regular_seconds", "extra_time_ratio", "lower_bound_ratio", "gap",
        "gap_of_extra", "most_extra_time_ratio",
    }  # fmt: skip
    assert report["frontier"] == []
    assert (report["solver"], report["objective"]) == ("budget", "time")
    assert report["planned"]["simulated_peak_bytes"] < report["regular"]["simulated_peak_bytes"]
    assert "lower bound" in shown.err
    assert "\x1b" not in shown.err
    assert "planning" not in shown.err


def test_the_trade_off_is_a_table_and_a_picture(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--pareto", "--budget", "70%", "--json", "figures.json")
    assert run_command("optimize", model, *QUICK[:-1], "0", *arguments) == 0
    shown = capsys.readouterr().out
    frontier = json.loads(Path("figures.json").read_text())["frontier"]
    assert set(frontier[0]) == {
        "budget_bytes", "simulated_peak_bytes", "status", "extra_time_ratio", "lower_bound_ratio", "gap",
        "gap_of_extra",
    }  # fmt: skip
    table, _, picture = shown.partition("extra time of the best plans found (X: chosen)")
    assert table.count("│ X │") == 1
    assert len([line for line in table.splitlines() if line.count("│") == 8]) == len(frontier) + 1 >= 11
    picture, _, _ = picture.partition("memory over one step")
    rows = [line for line in picture.splitlines() if "|" in line]
    assert len(rows) == 13
    assert sum(row.count("X") for row in rows) == 1
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_the_lowest_peak_within_an_extra_time(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("optimize", model, *QUICK, "--extra-time", "10%") == 0
    assert "extra time allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--budget", "8Q"), "'8Q' is not a valid memory size; write 8GiB, 500MB, 60%"),
        (("--budget", "0"), "less than one byte"),
        (("--budget", ""), "the value is empty"),
        (("--budget", "60%", "--order", "any"), "--order"),
        (("--budget", "60%", "--step-limit", "-1"), "--step-limit"),
        (("--budget", "60%", "--time-limit", "-1"), "--time-limit"),
        (("--budget", "60%", "--device", "a1000"), "did you mean 'a100'"),
        (("--budget", "60%", "--device", "cpu", "--calibrate", "t.json"), "give one of them"),
        (("--budget", "60%", "--calibrate", "chain.onnx"), "--calibrate 'chain.onnx'"),
        (("--budget", "60%", "--calibrate", "notes.txt"), "'notes.txt' is not a calibration"),
        (("--budget", "60%", "--calibrate", "out.onnx"), "--calibrate 'out.onnx'"),
        (("--budget", "60%", "--calibrate", "no/t.json"), "no/t.json"),
        (("--budget", "60%", "--calibrate", "t.json", "--json", "t.json"), "--json 't.json'"),
        (("--budget", "60%", "--checkpoints", "h3"), "--checkpoints chooses the plan by hand"),
        (("--budget", "60%", "--checkpoints", ""), "--checkpoints chooses the plan by hand"),
        (("--pareto", "--solver", "acg"), "leave --solver out"),
        (("--pareto", "--solver", "store-all"), "leave --solver out"),
        (("--budget", "60%", "--objective", "paper"), "--objective paper does not apply to a budget"),
        (("--budget", "60%", "--extra-time", "10%"), "give one"),
        (("--extra-time", "often"), "'often' is not a valid share"),
        (("--solver", "budget"), "needs --budget"),
        (("--solver", "peak", "--order", "fixed"), "--order applies to a budget only"),
        (("--solver", "peak", "--device", "a100"), "--device applies to a budget only"),
        (("--solver", "peak", "--calibrate", "t.json"), "--calibrate applies to a budget only"),
        (("--solver", "peak", "--step-limit", "3"), "--step-limit applies to a budget only"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    model: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    Path("notes.txt").write_text("no times")
    before = sorted(os.listdir())
    assert run_command("optimize", model, "out.onnx", "--no-check", *arguments) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("onnxgc: ")
    assert shown.err.count("\n") == 1
    assert words in shown.err
    assert sorted(os.listdir()) == before


def test_a_budget_that_no_plan_fits_has_exit_code_3(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("optimize", model, "out.onnx", "--no-check", "--budget", "10%") == 3
    shown = capsys.readouterr()
    assert shown.err.startswith("onnxgc: no plan fits ")
    assert shown.err.count("\n") == 1
    assert "Tanh_h9/grad" in shown.err
    assert sorted(os.listdir()) == ["chain.onnx"]


SETTINGS = ("--no-check", "--time-limit", "300")
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored where this was started in the background.
from onnxgc.cli.main import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    "budget, heard, code", [("30%", b"% extra time", 0), ("393216", b"no plan yet", 130)], ids=["plan", "none"]
)
def test_ctrl_c_gives_the_best_plan_so_far_if_there_is_one(model: str, budget: str, heard: bytes, code: int) -> None:
    import pty

    ours, theirs = pty.openpty()
    arguments = ("optimize", model, "out.onnx", *SETTINGS, "--budget", budget)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        said, pressed = b"", 0.0
        while process.poll() is None and (not pressed or time.monotonic() < pressed + 100):
            if select.select([ours], [], [], 0.1)[0]:
                said += os.read(ours, 4096)
            if heard in said and not pressed:
                # By now, or a little later, it is in compiled code.
                time.sleep(0.5)
                process.send_signal(signal.SIGINT)
                pressed = time.monotonic()
        if process.poll() is None:
            process.kill()
        shown = process.stdout.read() if process.stdout else ""
    os.close(ours)
    os.close(theirs)
    assert process.returncode == code, said
    assert (code == 0) == ("the search was interrupted" in shown)
    assert (code == 0) == Path("out.onnx").exists()
    if code:
        assert not shown
