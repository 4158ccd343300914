import json
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnxgc
from onnxgc.budget.operator_graph_file import parse_operator_graph
from onnxgc.planning.allocations import Allocations, allocations
from onnxgc.runtime.profile import RunProfile
from onnxgc.solvers.paper.acg import ACG
from scripts import benchmark
from scripts.benchmarking import (
    documents,
    exactness,
    growth,
    growth_picture,
    memory_picture,
    paper_graphs,
    peaks,
    table1,
)
from scripts.benchmarking.layered import layered_graph
from scripts.benchmarking.records import MODELS, Progress, packed, read_records, unpacked
from tests.graph.random_graphs import chain
from tests.matching.networks import Network, renamed


def figures(folder: Path, name: str) -> Any:
    (record,) = read_records(name, folder)
    assert record["environment"]["versions"]["onnx"] == onnx.__version__
    return record["figures"]


@pytest.mark.slow
def test_all_figures_of_one_network(tmp_path: Path):
    size = ["--network", "resnet18", "--batch", "2", "--pixels", "64"]
    arguments = ["resnet50", *size, "--threads", "1", "--rounds", "1", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    found = figures(tmp_path, "resnet50")
    assert found["identical"] == {
        "loss": True, "gradients": 62, "gradients_of": 62, "statistics": 40, "statistics_of": 40,
    }  # fmt: skip
    simulated, measured = found["simulated_peak_bytes"], found["measured"]["make_session"]
    for kind in ("regular", "planned"):
        assert abs(measured[kind]["requested_bytes"] - simulated[kind]) < 0.01 * simulated[kind] + 2**20
        assert measured[kind]["in_use_bytes"] >= measured[kind]["requested_bytes"]
    assert found["accuracy"]["parameters"] == 62
    assert found["accuracy"]["ratio_max"] < 2
    assert all(found["step_seconds"][name]["minimum"] > 0 for name in ("regular", "planned", "torch"))
    assert "62 of 62 gradients" in documents.results(tmp_path)


@pytest.mark.slow
def test_simulated_peaks_equal_measured_peaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["peaks", "--only", "mobilenet_v2", "--pixels", "64", "--time-limit", "1"]
    assert len(list(peaks.LIGHT_FOLDER.glob("*.onnx"))) == 9
    assert benchmark.main([*arguments, "--record", str(tmp_path)]) == 0
    rows = figures(tmp_path, "peaks")["rows"]
    assert [row["plan"] for row in rows][:2] == ["regular", "planned"]
    assert rows[2]["plan"] in (peaks.BUDGET, peaks.LEAST)
    for row in rows:
        assert row["input"] == [2, 3, 64, 64]
        assert peaks.is_close(row)
        assert row["requested_bytes"] < row["in_use_bytes"]
        # Only shapes for barriers are not simulated.
        assert row["worst"] is None
    assert all(row["simulated_bytes"] < rows[0]["simulated_bytes"] for row in rows[1:])
    assert "mobilenet_v2" in capsys.readouterr().out
    assert "| mobilenet_v2, 2x3x64x64 |" in documents.results(tmp_path)


def test_nodes_with_other_allocations_than_simulated_are_named():
    result = onnxgc.optimize(MODELS / "resnet18.onnx", input_shapes={"x": (1, 3, 64, 64)}, solver="peak", check=False)
    steps = list(allocations(result.planned.schedule, result.planned.step.graph))
    names = tuple(step.operator.name for step in steps)
    held = list(live_bytes(steps))
    large, deep = names.index("/layer1/0/conv2"), names.index("/layer2/1/conv2/grad/ConvTranspose")
    held[large:] = [size + 5000 for size in held[large:]]
    workspaces = [0] * len(steps)
    workspaces[deep] = steps[deep].operator.workspace_bytes - 256
    # Within the slack of a chunk.
    workspaces[0] = steps[0].operator.workspace_bytes + 4096
    run = RunProfile(names, (0,) * len(steps), tuple(held), tuple(held), tuple(workspaces), 0.0, {})
    found = [residual for residual in peaks.residuals(result, run) if residual.bytes]
    assert [(r.node, r.operator, r.what, r.bytes) for r in found] == [
        ("/layer1/0/conv2", "Conv", "outputs", 5000),
        ("/layer2/1/conv2/grad/ConvTranspose", "ConvTranspose", "workspace", -256),
    ]


def live_bytes(steps: list[Allocations]) -> Iterator[int]:
    live = 0
    for step in steps:
        live += sum(storage.size_bytes for storage in step.made)
        yield live
        live -= sum(storage.size_bytes for storage in step.freed)


def test_exit_code_reports_differences_beyond_the_tolerances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    worst = {"node": "n", "what": "workspace", "bytes": -1024}
    row = {"network": "net", "input": [1], "plan": "regular", "worst": worst, "requested_bytes": 1000}
    for simulated, arena, expected in ((1009, 1029, 0), (1011, 1000, 1), (1000, 1031, 1)):
        sizes = {"simulated_bytes": simulated, "arena_bytes": arena, "in_use_bytes": 1000}
        found = {"steps": 2, "rows": [{**row, **sizes}]}
        monkeypatch.setattr(peaks, "run", lambda options, progress, found=found: found)
        assert benchmark.main(["peaks", "--record", str(tmp_path)]) == expected
        assert ("net, regular: workspace of 'n': -1,024 bytes" in capsys.readouterr().out) == expected


def test_paper_table_has_its_batch_sizes_and_inputs(tmp_path: Path):
    assert table1.paper_networks()["alexnet"] == (1024, (3, 224, 224))
    options = table1.Options(("alexnet", "resnet18"))
    rows = table1.run(options, Progress("table1", tmp_path))
    assert table1.failures(rows) == []
    for row in rows:
        plans, regular = row["plans"], row["regular"]["activation_peak_bytes"]
        assert plans["peak, activations"]["activation_peak_bytes"] <= plans["acg"]["activation_peak_bytes"] < regular
        assert 0 < plans["peak, activations"]["extra_of_forward"] <= 1
    assert "for 2 of 2 networks" in documents.results(tmp_path)


def test_the_record_of_table_1_grows_by_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(network: str, *_: object) -> dict[str, Any]:
        if network == "vgg13":
            raise KeyboardInterrupt
        return {"network": network, "time": 1}

    def run(*only: str) -> Any:
        return table1.run(table1.Options(only), Progress("table1", tmp_path))

    monkeypatch.setattr(table1, "_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    first, again = {"network": "alexnet", "time": 1}, {"network": "vgg11", "time": 2}
    assert figures(tmp_path, "table1") == [first, {"network": "vgg11", "time": 1}]
    monkeypatch.setattr(table1, "_row", lambda network, *_: {"network": network, "time": 2})
    assert run("vgg11") == figures(tmp_path, "table1") == [first, again]
    assert {row["time"] for row in run()} == {2}
    with pytest.raises(ValueError, match="--only vgg12: not one of alexnet"):
        run("vgg12")


def test_exit_code_reports_violated_laws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wrong = replace(paper_graphs.PAPER_GRAPHS["alexnet"], code_mebibytes=1600, cuts_mebibytes=1600)
    monkeypatch.setattr(table1, "PAPER_GRAPHS", {"alexnet": wrong})
    assert benchmark.main(["table1", "--only", "alexnet", "--record", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "alexnet, paper's graph: acg is not at the 1600 MiB" in shown
    assert "alexnet, paper's graph: general is above the known 1600 MiB" in shown
    assert len(figures(tmp_path, "table1")) == 1


def test_solve_times_are_recorded_by_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "TIMED", ("acg", "peak"))
    monkeypatch.setattr(growth, "_REPEATS", 1)
    for family in ("CHAIN", "RANDOM", "TRANSFORMER"):
        monkeypatch.setattr(growth, f"{family}_VERTICES", (20, 40))
    assert benchmark.main(["growth", "--most-vertices", "40", "--record", str(tmp_path)]) == 0
    found = figures(tmp_path, "growth")
    assert [row["name"] for row in found["graphs"] if row["family"] != "network"] == [
        "chain of 20", "chain of 40", "random, 20", "random, 40", "transformer, 20", "transformer, 40",
    ]  # fmt: skip
    assert all(row["seconds"][name] > 0 for row in found["graphs"] for name in ("acg", "peak"))
    assert all(row["vertices"] <= 40 for row in found["graphs"])
    root = ElementTree.fromstring(growth_picture.draw(found["graphs"]))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 6
    assert "(growth.svg)" in documents.results(tmp_path)


def test_solvers_that_would_take_too_long_are_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(growth, "CHAIN_VERTICES", (30, 60))
    found = growth.run(growth.Options(60), Progress())["graphs"]
    rows = [row for row in found if row["family"] == "chain"]
    assert rows[0]["seconds"]["acg"] > 0
    assert set(rows[1]["seconds"].values()) == {None}


def test_random_graphs_have_the_requested_size():
    assert len(growth.random_chain(50).graph) == 50
    graph = growth.random_dag(50).graph
    assert (len(graph), len(graph.edges), len(graph.sources)) == (50, 100, 1)
    block = growth.transformer(15).graph
    assert (len(block), len(block.sources), len(block.sinks)) == (15, 1, 1)
    assert len(growth.transformer(100).graph) == 99


def test_solvers_are_compared_with_exhaustive_searches(tmp_path: Path):
    sizes = ["--graphs", "30", "--chains", "10", "--families", "10", "--schedules", "6"]
    assert benchmark.main(["exactness", *sizes, "--record", str(tmp_path)]) == 0
    rows = figures(tmp_path, "exactness")
    for row in rows:
        assert row["below"] == row["false_bounds"] == row["false_proofs"] == 0
        if row["truth"] != "all schedules":
            assert row["equal"] == row["instances"] or row["solver"] == "general"
        assert 1 <= row["mean_ratio"] <= row["worst_ratio"]
    assert sum(row["instances"] for row in rows if "peak" in row["solver"]) == 16
    assert "optimality: none" in documents.results(tmp_path)


def test_wrong_claims_of_a_solver_are_counted():
    solution = ACG.solve(chain([1, 5, 1]))
    comparison = exactness.Comparison("acg", "", "")
    comparison.add(solution, solution.objective_bytes - 1)
    comparison.add(solution, solution.objective_bytes + 1)
    counted = comparison.figures()
    kinds = ("equal", "below", "false_bounds", "false_proofs")
    assert [counted[kind] for kind in kinds] == [0, 1, 1, 1]


def test_layered_graphs_are_deterministic_with_few_outputs():
    graph = layered_graph(200, seed=5)
    assert graph == layered_graph(200, seed=5) != layered_graph(200, seed=6)
    problem = parse_operator_graph(graph).problem
    assert len(problem) == 200
    assert len(problem.kept) <= 8
    assert all(operation.reads for operation in problem.operators[8:])


def test_memory_picture_is_well_formed_and_reaches_both_peaks(tmp_path: Path):
    arguments = ["memory", "--network", "resnet18", "--batch", "2", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    found = figures(tmp_path, "memory")
    for kind in ("regular", "planned"):
        assert max(size for _, size in found["timeline"][kind]) == found["peak_bytes"][kind]
    root = ElementTree.fromstring(memory_picture.draw(found))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_twins_match_and_their_plans_are_transferred(tmp_path: Path):
    folder = tmp_path / "twins"
    folder.mkdir()
    net, x = Network(), "x"
    for _ in range(3):
        y = net.node("Conv", x, net.weight(3, 3, 3, 3), net.weight(3), pads=[1] * 4)
        x = net.node("Add", x, net.node("Sigmoid", y))
    pooled = net.node("ReduceMean", x, net.ints(2, 3), keepdims=0)
    model = net.model(net.node("Gemm", pooled, net.weight(3, 4), net.weight(4)), (2, 3, 64, 64), (2, 4))
    onnx.save(model, folder / "resnet50-one.onnx")
    onnx.save(renamed(model, random.Random(0))[0], folder / "resnet50-other.onnx")
    arguments = ["twins", str(folder), "--time-limit", "1", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    found = figures(tmp_path, "twins")["networks"]["resnet50"]
    counts = found["counts"]
    assert (counts["pairs"], counts["same"], counts["wrong"]) == (2, 2, 0)
    assert counts["checkpoints_matched"] == counts["checkpoints"] > 0
    assert found["variants"]["renamed"]["wrong"] == 0
    assert 0 < found["variants"]["doubled"]["matched"] < found["variants"]["doubled"]["tensors"]
    assert found["variants"]["doubled"]["wrong"] == 0
    assert sum(group["plans"] for group in found["plans"]) == 4
    assert {group["fitted"] for group in found["plans"]} == {1.0}
    assert "| resnet50, 2 | 2 |" in documents.results(tmp_path)


@pytest.mark.parametrize(
    "figures",
    [
        [{"a": 1, "b": {"x": [1]}}, {"a": 2, "b": {"x": []}}, {"a": None, "b": {"x": [2]}}],
        [{"a": 1}, {"a": 2}, {"b": 3}],
        {"one": {"a": 1, "b": 2}, "two": {"a": 3, "b": 4}, "three": {"a": 5, "b": 6}},
        [{}, {}, {}],
        {"rows": [{"a": [{"b": 1}] * 3}] * 3, "empty": {}, "text": "keys"},
    ],
)
def test_packed_figures_are_unpacked(figures: Any):
    assert unpacked(json.loads(json.dumps(packed(figures)))) == figures
