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

import onnxgc
from onnxgc.api import optimize
from onnxgc.cli import optimize as command
from onnxgc.emission.plan_files import write_plan
from onnxgc.errors import PlanError
from tests.api.chains import chain
from tests.cli.command import Done, run_command

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = ("--dry-run", "--no-check", "--step-limit", "1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    onnx.save(chain(), tmp_path / "chain.onnx")
    monkeypatch.chdir(tmp_path)
    return "chain.onnx"


def test_memory_and_time_are_shown_with_lower_bounds(model: str):
    shown = run_command("optimize", model, *QUICK, "--budget", "60%", "--order", "fixed", "--device", "a100")
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
    feasible = run_command("optimize", model, *QUICK, "--budget", "32%", "--device", "cpu").out
    assert "of the extra time" in feasible
    assert "of the time could still be saved" in " ".join(feasible.split())
    assert "one core of a CPU" in feasible


def test_figures_as_json(model: str):
    shown = run_command("optimize", model, *QUICK, "--budget", "min", "--json", "-")
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


def test_the_trade_off_is_a_table_and_a_picture(model: str):
    arguments = ("--pareto", "--budget", "70%", "--json", "figures.json")
    shown = run_command("optimize", model, *QUICK[:-1], "0", *arguments).out
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


def test_the_lowest_peak_within_an_extra_time(model: str):
    assert "extra time allowed" in run_command("optimize", model, *QUICK, "--extra-time", "10%").out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--budget", "0"), "less than one byte"),
        (("--budget", "60%", "--calibrate", "chain.onnx"), "--calibrate 'chain.onnx'"),
        (("--budget", "60%", "--calibrate", "notes.txt"), "'notes.txt' is not a calibration"),
        (("--budget", "60%", "--calibrate", "out.onnx"), "--calibrate 'out.onnx'"),
        (("--budget", "60%", "--calibrate", "no/t.json"), "no/t.json"),
        (("--budget", "60%", "--calibrate", "t.json", "--json", "t.json"), "--json 't.json'"),
        (("--budget", "60%", "--checkpoints", ""), "--checkpoints chooses the plan by hand"),
        (("--extra-time", "often"), "'often' is not a valid share"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(model: str, arguments: tuple[str, ...], words: str):
    Path("notes.txt").write_text("no times")
    before = sorted(os.listdir())
    shown = run_command("optimize", model, "out.onnx", "--no-check", *arguments, code=2)
    assert not shown.out
    assert words in shown.err
    assert sorted(os.listdir()) == before


def test_a_budget_that_no_plan_fits_has_exit_code_3(model: str):
    shown = run_command("optimize", model, "out.onnx", "--no-check", "--budget", "10%", code=3)
    assert shown.err.startswith("onnxgc: no plan fits ")
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
def test_ctrl_c_gives_the_best_plan_so_far_if_there_is_one(model: str, budget: str, heard: bytes, code: int):
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


def run(*arguments: str, code: int = 0) -> Done:
    return run_command("optimize", *arguments, "--no-check", code=code)


@pytest.mark.parametrize("options", [[], ["--budget", "60%", "--step-limit", "2"], ["--solver", "chen-sqrt"]])
def test_a_plan_from_a_file_gives_the_same_training_file(options: list[str], model: str):
    assert "wrote plan.json" in run(model, "first.onnx", "--save-plan", "plan.json", *options).out
    assert json.loads(Path("plan.json").read_text(encoding="utf-8"))["kind"] == "onnxgc.plan"
    run(model, "second.onnx", "--plan", "plan.json")
    run(model, "third.onnx", "--plan", "first.onnx")
    names = ("first.onnx", "second.onnx", "third.onnx")
    graphs = [onnx.load(name).graph.SerializeToString() for name in names]
    assert graphs[0] == graphs[1] == graphs[2]


def test_a_plan_excludes_the_options_of_a_search(model: str):
    run(model, "training.onnx")
    for option in (["--budget", "60%"], ["--solver", "acg"], ["--checkpoints", "h1"], ["--pareto"]):
        assert "a plan replaces a search" in run(model, "--plan", "training.onnx", *option, "--dry-run", code=2).err
    onnx.save(chain(2), "other.onnx")
    assert "is not an operator of the step" in run("other.onnx", "--plan", "training.onnx", "--dry-run", code=2).err
    assert "--save-plan" in run(model, "training.onnx", "--save-plan", "training.onnx", code=2).err


def test_the_result_of_a_search_is_a_plan():
    found = onnxgc.optimize(chain(), check=False)
    again = onnxgc.optimize(chain(), check=False, plan=found)
    for key in ("planned", "checkpoints"):
        assert again.report[key] == found.report[key]
    assert again.report["solver"] == "plan"
    with pytest.raises(PlanError, match="a plan replaces a search"):
        onnxgc.optimize(chain(), plan=found, solver="acg")


def test_verbose_and_quiet(model: str):
    usual = run(model, "--dry-run").out
    assert "memory over one step" in usual
    assert "checkpoints: " not in usual
    assert max(map(len, usual.splitlines())) <= 80
    more = run(model, "--dry-run", "-v").out
    assert "checkpoints: x" in more
    assert "solve " in more
    shown = run(model, "--dry-run", "-q", "--json", "-")
    assert json.loads(shown.out)["model"] == model
    assert not shown.err


def test_a_plan_for_another_file_gives_a_note(tmp_path: Path):
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


def test_a_page_is_written_with_the_settings_of_the_call(model: str):
    call = (model, "--dry-run", "--no-check", "--loss", "mse", "--freeze", "w0", "--freeze", "w1")
    assert "wrote a.html" in run_command("optimize", *call, "--report", "a.html", "--json", "a.json").out
    text = Path("a.html").read_text(encoding="ascii")
    assert "<dd>--loss mse; --freeze w0 w1; --no-check; --dry-run</dd>" in text
    assert "<h1>chain.onnx: memory of one training step</h1>" in text
    assert sorted(path.name for path in Path().iterdir()) == ["a.html", "a.json", "chain.onnx"]
    run_command("optimize", *call, "--report", "b.html")
    assert Path("b.html").read_bytes() == Path("a.html").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--report", "chain.onnx"),
        ("--report", "out.onnx"),
        ("--report", "out.onnx.data"),
        ("--report", "a.html", "--json", "./a.html"),
        ("--report", "nowhere/a.html"),
        ("--report", "."),
    ],
)
def test_an_unusable_path_is_rejected_before_any_work(
    model: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "optimize", lambda *_, **__: pytest.fail("work was done"))
    shown = run_command("optimize", model, "out.onnx", *arguments, code=2)
    assert shown.out == ""
    assert "--report" in shown.err or arguments[1] in shown.err
