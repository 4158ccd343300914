import json
from pathlib import Path

import onnx
import pytest

from onnxgc.api.plan_table import Comparison
from onnxgc.cli import compare as command
from onnxgc.emission.plan_files import plan_of
from tests.api.chains import chain
from tests.api.test_comparison import renamed
from tests.cli.command import run_command as call
from tests.tracing.encoders import encoder


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in (("chain", chain(5)), ("renamed", renamed(chain(5))), ("encoder", encoder(3))):
        onnx.save(model, tmp_path / f"{name}.onnx")
    monkeypatch.chdir(tmp_path)


def fits(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines()) and "\x1b" not in text


def test_a_table_of_solvers():
    shown = call("compare", "encoder.onnx", "--solvers", "acg,peak,per-block,layer-wise,revolve")
    assert fits(shown.out)
    assert shown.err == ""
    first = [line.split() for line in shown.out.splitlines() if " peak " in line or " acg " in line]
    assert first[1][:2] == ["*", "peak"]
    assert "solver 'revolve' takes" not in shown.out
    assert "revolve: solver 'revolve' takes chains of equal states only" in call(
        "compare", "encoder.onnx", "--solvers", "revolve", "-v"
    ).out.replace("\n", " ")


def test_json_and_markdown():
    shown = call("compare", "chain.onnx", "--solvers", "acg", "--json", "-", "--markdown")
    report = json.loads(shown.out)
    assert [row["name"] for row in report["rows"]] == ["acg", "store-all"]
    assert "| plan | peak MB | share |" in shown.err
    assert "| * acg |" in shown.err
    assert call("compare", "chain.onnx", "--solvers", "acg", "--json", "figures.json", "-q").out == ""
    written = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    assert [row["simulated_peak_bytes"] for row in written["rows"]] == [
        row["simulated_peak_bytes"] for row in report["rows"]
    ]


def test_pages_of_one_and_several_models():
    assert "wrote a.html" in call("compare", "chain.onnx", "--solvers", "acg", "--report", "a.html").out
    assert Path("a.html").read_text(encoding="ascii").startswith("<!DOCTYPE html>")
    call("compare", "chain.onnx", "renamed.onnx", "--report", "one.html", "-q")
    call("compare", "chain.onnx", "encoder.onnx", "--solvers", "acg", "--report", "each.html", "-q")
    assert "one network in several files" in Path("one.html").read_text(encoding="ascii")
    assert "Plans for 2 networks" in Path("each.html").read_text(encoding="ascii")


def test_a_bare_graph():
    vertices = [{"id": number, "size": 1} for number in range(9)]
    Path("g.json").write_text(json.dumps({"vertices": vertices, "edges": [[n, n + 1] for n in range(8)]}))
    shown = call("compare", "g.json", "--solvers", "acg,store-all", "--json", "figures.json").out
    assert fits(shown)
    assert "* acg" in shown
    assert json.loads(Path("figures.json").read_text())["rows"][0]["checkpoints"] == [0, 4, 8]
    assert "is a bare graph" in call("compare", "g.json", "--report", "page.html", code=2).err


def test_two_plans():
    for name in ("acg", "chen-sqrt"):
        made = ("--dry-run", "--no-check", "--solver", name, "--save-plan", f"{name}.json")
        call("optimize", "chain.onnx", *made)
    plans = ("--plan", "acg.json", "--plan", "chen-sqrt.json")
    shown = call("compare", "chain.onnx", "--solvers", "store-all", *plans).out
    assert fits(shown)
    assert "by one plan only" in shown
    assert "kept only here:" in shown


def test_one_network_in_two_files():
    shown = call("compare", "chain.onnx", "renamed.onnx", "--carry-over", "plans", "--json", "a.json").out
    assert fits(shown)
    assert "the same network" in shown
    assert f"wrote {Path('plans', 'renamed-plan.json')}" in shown
    carried = json.loads(Path("a.json").read_text(encoding="utf-8"))["pairs"][0]["carried_over"]
    assert len(plan_of("plans/renamed-plan.json").checkpoints) == carried["checkpoints"]
    call("compare", "renamed.onnx", "--solvers", "acg", "--plan", "plans/renamed-plan.json", "-q")


def test_a_plan_for_another_batch_size_comes_with_its_options():
    onnx.save(renamed(chain(5, batch=64)), "small.onnx")
    assert (
        "use it with optimize --input-shapes other_x:2048,16"
        in call("compare", "chain.onnx", "small.onnx", "--carry-over", "plans").out
    )
    given = ("--plan", "plans/small-plan.json", "--input-shapes", "other_x:2048,16")
    call("optimize", "small.onnx", "training.onnx", *given)
    call("verify", "small.onnx", "training.onnx")


def test_each_of_several_by_two_processes():
    Path("broken.onnx").write_bytes(b"nothing")
    arguments = ("chain.onnx", "encoder.onnx", "broken.onnx", "--solvers", "acg,per-block", "--json", "a.json")
    shown = call("compare", *arguments, code=2)
    assert fits(shown.out)
    assert "1 of 3 models were not compared" in shown.err
    assert "2 networks in" in shown.out
    found = json.loads(Path("a.json").read_text(encoding="utf-8"))["comparisons"]
    assert [one["model"] for one in found] == ["chain.onnx", "encoder.onnx", "broken.onnx"]
    assert ["error" in one for one in found] == [False, False, True]


def test_a_budget_that_no_plan_fits_has_a_row():
    asked = ("--solvers", "acg", "--budget", "10%", "--json", "a.json")
    shown = call("compare", "chain.onnx", *asked, code=3)
    assert ["budget", "no", "fit"] in [line.split() for line in shown.out.splitlines()]
    assert shown.err.startswith("onnxgc: no plan fits ")
    assert json.loads(Path("a.json").read_text(encoding="utf-8"))["budget_bytes"] > 0


def test_a_budget_may_fit_some_of_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "MAX_WORKERS", 1)
    onnx.save(chain(5, batch=64), "small.onnx")
    two = ("chain.onnx", "small.onnx", "--solvers", "store-all")
    rows = [line.split() for line in call("compare", *two, "--budget", "100KB").out.splitlines()]
    assert [row[2:] for row in rows if row[:1] in (["chain"], ["small"])] == [["no", "fit"], ["*100.0"]]
    shown = call("compare", *two, "--budget", "1KB", code=3)
    assert "no plan fits for any of 2 networks, the first because no plan fits 1,000 bytes" in shown.err


def test_several_models_with_solvers_are_several_networks(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def noted(*models: str, each: bool, **options: object) -> Comparison:
        asked.append(each)
        return Comparison({"kind": "each", "comparisons": [], "seconds": 0.0}, {})

    monkeypatch.setattr(command, "compare", noted)
    two = ("chain.onnx", "encoder.onnx", "-q")
    for more in (("--solvers", "all"), ("--each",), ()):
        call("compare", *two, *more)
    assert asked == [True, True, False]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("chain.onnx", "--solvers", "chen-squirt"), "did you mean 'chen-sqrt'"),
        (("chain.onnx", "--solvers", " ,"), "--solvers is empty"),
        (("chain.onnx", "--plan", "none.json"), "cannot read the plan 'none.json'"),
        (("chain.onnx", "--plan", "encoder.onnx"), "is a model without a plan"),
        (("chain.onnx", "--json", "chain.onnx"), "is one of the files"),
        (("chain.onnx", "--report", "chain.onnx"), "is one of the files"),
        (("chain.onnx", "--carry-over", "plans"), "give several files of one network"),
        (("chain.onnx", "renamed.onnx", "--budget", "50%"), "add --each"),
        (("chain.onnx", "renamed.onnx", "--carry-over", "chain.onnx"), "'chain.onnx' is not a folder"),
        (("chain.onnx", "a/renamed.onnx", "--plan", "a/renamed-plan.json", "--carry-over", "a"), "is one of"),
        (("chain.onnx", "a/renamed.onnx", "--report", "a/renamed-plan.json", "--carry-over", "a"), "is one of"),
        (("chain.onnx", "a/renamed.onnx", "b/renamed.onnx", "--carry-over", "p"), "two models have the same name"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], words: str):
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "renamed.onnx").write_bytes(Path("renamed.onnx").read_bytes())
    shown = call("compare", *arguments, code=2)
    assert shown.out == ""
    assert words in shown.err
