"""The GPU check on the CPU provider, without a claim about CUDA: its parts, and smoke runs of its groups."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgc.runtime.ort import make_session
from scripts.benchmarking import cuda_results
from scripts.gpu_checks import profile_reports, races, training_files
from scripts.gpu_checks.check import Check, Jobs, Step
from scripts.gpu_checks.graph_runs import kernel_report
from scripts.gpu_checks.groups import GROUPS
from scripts.gpu_checks.half_precision import computed_in
from scripts.gpu_checks.preparation import make
from scripts.gpu_checks.profile_reports import NodeEvent
from scripts.gpu_checks.settings import CPU, CUDA, SMOKE_LAYERS, SMOKE_NETWORKS, CheckError, Network, Options
from scripts.gpu_checks.training_files import BASELINE, GRAPHS, PLANNED, Recipe, TrainingFiles
from tests.test_layers import PACKAGE

SCRIPT = PACKAGE.parent / "scripts" / "gpu_check.py"


def run_script(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out.mkdir(exist_ok=True)
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments], capture_output=True, text=True, cwd=out
    )
    (record,) = out.glob("*.json")
    return result, json.loads(record.read_text())


def statuses(record: Mapping[str, Any], group: str) -> dict[str, str]:
    return {name: step["status"] for name, step in record["groups"][group]["steps"].items()}


@pytest.fixture
def smoke(tmp_path: Path) -> Callable[..., Check]:

    def create(group: str, **options: Any) -> Check:
        return Check(Options(tmp_path, smoke=True, **options), group, tmp_path / "work")

    return create


def step(name: str, *measures: Callable[[], dict[str, Any]], share: float = 1) -> Step:
    def jobs(check: Check) -> Jobs:
        return {f"row {index}": measure for index, measure in enumerate(measures)}

    return Step(name, jobs, share)


def fail() -> dict[str, Any]:
    raise CheckError("no kernel")


def test_groups_are_merged_and_a_rerun_replaces_its_own(smoke: Callable[..., Check]):
    answers = iter(range(9))
    steps = (step("one", lambda: {"answer": next(answers)}), step("two", lambda: {"answer": next(answers)}))
    for group, options in (("a", {}), ("b", {}), ("a", {}), ("a", {"only": ("one",)})):
        check = smoke(group, **options)
        assert check.run(steps)
    record = json.loads(check.path.read_text())
    found = {
        group: [step["rows"]["row 0"]["answer"] for step in entry["steps"].values()]
        for group, entry in record["groups"].items()
    }
    assert found == {"a": [6, 5], "b": [2, 3]}
    assert record["groups"]["a"]["versions"]["onnx"] == onnx.__version__


def test_a_slow_step_leaves_time_to_later_ones(smoke: Callable[..., Check], monkeypatch: pytest.MonkeyPatch):
    """A step with 60 of 100 seconds, whose first row takes 59: its second is not reached."""
    check = smoke("one", limit_seconds=100.0)
    now = time.perf_counter()

    def take() -> dict[str, Any]:
        monkeypatch.setattr(time, "perf_counter", lambda: now + 59)
        return {}

    assert check.run((step("slow", take, take, share=3), step("a", dict), step("b", dict)))
    found = [[row["status"] for row in entry["rows"].values()] for entry in check.steps.values()]
    assert found == [["held", "not reached"], ["held"], ["held"]]


def test_each_row_is_recorded_at_once(smoke: Callable[..., Check]):
    check = smoke("one")
    seen: list[Any] = []

    def look() -> dict[str, Any]:
        seen.append(json.loads(check.path.read_text())["groups"]["one"]["steps"]["step"])
        return {"status": "not held"}

    assert not check.run((step("step", lambda: {"figure": 0.123456789}, fail, look), step("later", dict)))
    rows = {"row 0": {"status": "held", "figure": 0.123457}, "row 1": {"status": "error", "error": "no kernel"}}
    assert seen == [{"status": "unfinished", "rows": rows}]
    assert [entry["status"] for entry in check.steps.values()] == ["not held", "held"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a card")
def test_the_runtime_fails_without_a_card(tmp_path: Path):
    result, record = run_script(tmp_path, "--group", "torch", "--only", "runtime")
    assert result.returncode == 1
    assert record["provider"] == CUDA
    assert statuses(record, "torch") == {"runtime": "not held"}
    assert "instead of CUDAExecutionProvider" in str(record["groups"]["torch"])


def test_steps_of_a_smoke_run(tmp_path: Path):
    arguments = ("--smoke", "--group", "kernels", "--only", "runtime", "reductions")
    result, record = run_script(tmp_path, *arguments)
    assert result.returncode == 0, result.stdout
    assert (record["smoke"], record["provider"], record["card"]) == (True, CPU, None)
    assert statuses(record, "kernels") == {"runtime": "held", "reductions": "held"}


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "steps"])
def test_smoke_run_of_a_group_passes(tmp_path: Path, group: str):
    result, record = run_script(tmp_path, "--smoke", "--group", group)
    assert result.returncode == 0, result.stdout + result.stderr
    assert statuses(record, group) == {step.name: "held" for step in GROUPS[group]}
    assert cuda_results.results_section(record) == ""


@pytest.mark.slow
def test_smoke_run_with_prepared_files(tmp_path: Path):
    prepared = str(tmp_path / "prepared")
    command = [sys.executable, str(SCRIPT), "--smoke", "--group", "steps", "--prepare", prepared]
    assert subprocess.run(command, capture_output=True).returncode == 0
    result, record = run_script(tmp_path / "out", "--smoke", "--group", "steps", "--prepared", prepared)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "not prepared by this version" not in result.stdout
    assert statuses(record, "steps") == {step.name: "held" for step in GROUPS["steps"]}
    rows = {name: entry["rows"] for name, entry in record["groups"]["steps"]["steps"].items()}
    assert {row["status"] for row in rows["graph"].values()} == {"not available"}
    for graph in GRAPHS:
        assert set(rows["fallback"][graph]["nodes_by_provider"]) == {CPU}
        order = rows["order"][graph]
        assert (order["recomputed"] > 0) == (graph == PLANNED)
        assert 0 < order["barriers"]["executed"] < order["executed"]
    networks = rows["peak"] | rows["table1"]
    assert list(networks) == [network.name for network in SMOKE_NETWORKS]
    for row in networks.values():
        assert_peaks_are_the_simulated_ones(row)
    assert sum(value is True for value in rows["exchange"]["exchange"].values()) == 7
    # The same figures, as if from a card.
    assert "mobilenet_v2, 4" in cuda_results.results_section({**record, "smoke": False, "card": "a card"})
    assert list(cuda_results.networks_in_forms({**record, "smoke": False}, "cpu")) == ["mobilenet_v2"]


def assert_peaks_are_the_simulated_ones(row: dict[str, Any]) -> None:
    """Outputs are bit-identical: kernels of a CPU are deterministic; a GPU's need not be."""
    assert row["distance"]["bit_equal"] == row["distance"]["outputs"] > 1
    assert row["distance"]["loss_value"] > 0
    for figures in (row[BASELINE], row[PLANNED]):
        # test_benchmark.py compares the two with a smaller tolerance.
        assert figures["measured_peak_bytes"] == pytest.approx(figures["simulated_peak_bytes"], rel=0.05)
        assert figures["peak_without_workspaces_bytes"] <= figures["measured_peak_bytes"]
        assert min(figures["step_seconds"]) <= figures["median_seconds"] <= max(figures["step_seconds"])


def test_prepared_files_run_and_belong_to_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe(Network("resnet18", (2, 3, 32, 32)), "cpu")
    assert not recipe.is_prepared(tmp_path)
    make(recipe, tmp_path)
    (archive,) = tmp_path.iterdir()
    assert archive.stat().st_size < 50_000
    files = TrainingFiles.load(tmp_path, recipe.name)
    losses = []
    for graph in GRAPHS:
        model = files.model(graph)
        feeds = files.feeds(model)
        losses.append(make_session(model, providers=[CPU], threads=1).run([files.loss], feeds)[0])
    # Drawn weights are in use: equal logits would have a loss of log(1000).
    assert losses[0] == losses[1] > np.log(1000) + 0.1
    monkeypatch.setattr(training_files, "package_version", lambda: "other")
    assert not recipe.is_prepared(tmp_path)
    with pytest.raises(CheckError, match="belongs to other sources; make it again by --prepare"):
        TrainingFiles.load(tmp_path, recipe.name)


def test_half_precision_keeps_weights_and_outputs_in_float32():
    text = """<ir_version: 9, opset_import: ["": 18]>
    half (float[3, 4] x) => (float[3, 2] y) <float[4, 2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}> {
        b = Constant <value = float[2] {0.5, 0.25}> ()
        p = MatMul(x, w)
        q = Cast<to = 1>(p)
        y = Add(q, b)
    }"""
    model = onnx.parser.parse_model(text)
    changed = computed_in(model, "float16")
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    # ONNX Runtime computes float16 in float32 on a CPU.
    results: list[Any] = [ReferenceEvaluator(one).run(None, {"x": x}) for one in (model, changed)]
    (one,), (other,) = results
    assert other.dtype == np.float32
    assert 0 < np.abs(one - other).max() < 1e-2
    casts = {node.input[0]: node.attribute[0].i for node in changed.graph.node if node.op_type == "Cast"}
    assert casts == dict.fromkeys(["x", "w", "b", "p"], 10) | {"y__float16": 1}


REQUEST = {"provider": CPU, "threads": 1, "smoke": True}


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_forms_of_a_weight_gradient_are_right(layer: int):
    graphs = dict(races.weight_forms(SMOKE_LAYERS[layer]))
    assert {name.partition(":")[0] for name in graphs} == {"cpu", "cuda"}
    assert "cuda: by columns, whole batch" in graphs
    assert ("cuda: by blocks" in graphs) == (layer == 0)
    found = races.work_weights({**REQUEST, "layer": layer}, Path())
    assert list(found["forms"]) == ["torch", *graphs]
    assert found["status"] == "held"
    assert all(form["error"] < 1e-6 for form in found["forms"].values())


def test_a_wrong_form_fails_the_race(monkeypatch: pytest.MonkeyPatch):
    right = races.work_reductions({**REQUEST, "shape": (64, 8)}, Path())
    assert right["status"] == "held"
    mixed = races._chain((64, 8), ("Reshape", 8, 64), ("ReduceSum", 1))
    monkeypatch.setattr(races, "reduction_forms", lambda shape: [("wrong", mixed)])
    found = races.work_reductions({**REQUEST, "shape": (64, 8)}, Path())
    assert (found["status"], found["forms"]["wrong"].keys()) == ("not held", {"seconds", "error"})


def test_kernels_are_ranked_by_time():
    report = kernel_report({f"k{index}": (2, index / 1e3) for index in range(40)}, 2.0)
    assert (report["kernels"], report["busy_seconds"]) == (80, pytest.approx(0.78))
    assert [one["name"] for one in report["top"]] == [f"k{index}" for index in range(39, 14, -1)]


# A barrier (e, s, t, h) between two nodes, in the form of emission.
MODEL = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
held (float[4] x, int64[1] barrier_zero) => (float[4] y) <int64[1] shape = {4}, int64[1] axes = {0}> {
    [first] a = Relu(x)
    [e] e = Slice(a, barrier_zero, barrier_zero, axes)
    [s] s = Shape(e)
    [t] t = Add(shape, s)
    [h] h = Reshape(x, t)
    [again] r = Relu(h)
    [last] y = Add(a, r)
}""")
MODEL.graph.node[5].metadata_props.add(key="onnxgc.role", value="recompute")


def event(name: str, operator: str = "", provider: str = CUDA, outputs: Any = (("float", (4,)),)) -> NodeEvent:
    return NodeEvent(name, operator, provider, 1.0, outputs)


FILE_ORDER = [event(node.name, node.op_type) for node in MODEL.graph.node]


def test_file_order_equals_the_schedule():
    report = profile_reports.order_report(MODEL, FILE_ORDER)
    assert report["equals_schedule"] is True
    assert report["late"]["count"] == report["unknown"]["count"] == report["not_executed"]["count"] == 0


def test_late_lost_and_unknown_nodes_are_named():
    first, *middle, again, last = FILE_ORDER
    late = profile_reports.order_report(MODEL, [*middle, again, first, last])
    assert late["equals_schedule"] is False
    assert late["late"] == {"count": 1, "names": ["first"], "largest_delay_nodes": 5}
    # Barriers compute nothing, and ONNX Runtime runs Shape as early as possible.
    early = profile_reports.order_report(MODEL, [*middle, first, again, last])
    assert early["equals_schedule"] is True
    lost = profile_reports.order_report(MODEL, [first, *middle, event("fused", "Relu"), last])
    assert lost["equals_schedule"] is False
    assert lost["lost_recomputed"] == {"count": 1, "names": ["again"]}
    assert lost["unknown"] == {"count": 1, "names": ["fused"]}


def test_barriers_take_their_share_of_host_time():
    assert profile_reports.barrier_nodes(MODEL) == {"e", "s", "t", "h"}
    copy = event("Memcpy_token_0", "MemcpyToHost")
    report = profile_reports.barrier_report(MODEL, [copy, *FILE_ORDER, copy, copy])
    assert report == {"executed": 4, "host_time_share": pytest.approx(4 / 10)}


def test_shape_arithmetic_is_distinguished_from_computation():
    events = [
        event("relu", "Relu"),
        event("shape", "Shape", CPU, (("int64", (4,)),)),
        event("empty", "Slice", CPU, (("float", (0, 8)),)),
        event("scatter", "ScatterElements", CPU, (("float", (64, 1000)),)),
        event("labels", "Equal", CPU, (("bool", (64,)),)),
        event("there", "MemcpyToHost", CUDA, (("float", (64, 1000)),)),
        event("back", "MemcpyFromHost", CUDA, (("int64", (2,)),)),
    ]
    report = profile_reports.fallback_report(events, CUDA)
    assert report["nodes_by_provider"] == {CPU: 4, CUDA: 3}
    assert list(report["compute_elsewhere"]) == ["Equal", "ScatterElements"]
    assert report["compute_elsewhere"]["ScatterElements"]["outputs"] == ["float[64, 1000]"]
    assert list(report["shape_arithmetic_elsewhere"]) == ["Shape", "Slice"]
    assert list(report["copies"]) == ["MemcpyFromHost", "MemcpyToHost"]
    assert list(report["copies_of_data"]) == ["MemcpyToHost"]
