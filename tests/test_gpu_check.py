"""The GPU check on the CPU provider, without a claim about CUDA: its parts, and smoke runs of its groups."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgc.runtime.ort import make_session
from scripts.benchmarking import cuda_results
from scripts.gpu_checks import groups, profile_reports, races, training_files
from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.groups import GROUPS, Step, run_group
from scripts.gpu_checks.half_precision import computed_in
from scripts.gpu_checks.kernels import TOP_KERNELS, kernel_report
from scripts.gpu_checks.preparation import make
from scripts.gpu_checks.profile_reports import NodeEvent
from scripts.gpu_checks.settings import CPU, CUDA, SMOKE_LAYERS, SMOKE_NETWORKS, CheckError, Network, Options
from scripts.gpu_checks.training_files import BASELINE, GRAPHS, PLANNED, Recipe, TrainingFiles
from tests.test_layers import PACKAGE

SCRIPT = PACKAGE.parent / "scripts" / "gpu_check.py"


def run_script(
    out: Path, *arguments: str, python_path: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The finished script and its record."""
    environment = dict(os.environ)
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
    )
    (record,) = out.glob("*.json")
    return result, json.loads(record.read_text())


def statuses(record: Mapping[str, Any], group: str) -> dict[str, str]:
    return {name: step["status"] for name, step in record["groups"][group]["steps"].items()}


# -- groups and records ------------------------------------------------------------------------------


@pytest.fixture
def smoke(tmp_path: Path) -> Callable[..., Check]:
    """Creates the check of a group that writes to a common folder."""

    def create(group: str, **options: Any) -> Check:
        return Check(Options(tmp_path, smoke=True, **options), group, tmp_path / "work")

    return create


def fake_steps(monkeypatch: pytest.MonkeyPatch, *steps: Step) -> None:
    monkeypatch.setattr(groups, "GROUPS", {"one": steps, "other": steps})


def test_groups_are_merged_and_a_rerun_replaces_its_own(
    smoke: Callable[..., Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(range(9))
    step = Step("step", lambda check: Finding(True, "done", {"answer": next(answers)}), 1)
    fake_steps(monkeypatch, step, Step("other step", step.run, 1))
    for group, options in (("one", {}), ("other", {}), ("one", {}), ("one", {"only": ("step",)})):
        check = smoke(group, **options)
        assert run_group(check, group)
    record = json.loads((check.options.out / "cpu-smoke.json").read_text())
    found = {
        name: [one["answer"] for one in entry["steps"].values()] for name, entry in record["groups"].items()
    }
    assert found == {"one": [6, 5], "other": [2, 3]}
    assert record["groups"]["one"]["versions"]["onnx"] == onnx.__version__


def test_a_slow_step_leaves_time_to_later_ones(
    smoke: Callable[..., Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    def measure(check: Check) -> Finding:
        left.append(check.seconds_left())
        if len(left) == 1:
            now = time.perf_counter()
            monkeypatch.setattr(time, "perf_counter", lambda: now + 59)
        return Finding(True, "", {})

    fake_steps(monkeypatch, Step("slow", measure, 3), Step("a", measure, 1), Step("b", measure, 1))
    assert run_group(smoke("one", limit_seconds=100.0), "one")
    assert left == pytest.approx([60, 20.5, 41], abs=1)


def test_rows_without_time_and_with_errors_are_recorded(smoke: Callable[..., Check]) -> None:
    def fail() -> dict[str, Any]:
        raise CheckError("no kernel")

    rows: dict[str, Any] = {}
    check = smoke("one")
    check.begin("step", {"rows": rows})
    check.add_row(rows, "good", lambda: {"figure": 0.123456789}, str)
    check.add_row(rows, "bad", fail, str)
    check.open_step(0.0)
    check.add_row(rows, "late", dict, str)
    record = json.loads((check.options.out / "cpu-smoke.json").read_text())
    step = record["groups"]["one"]["steps"]["step"]
    assert step["status"] == "unfinished"
    assert step["rows"] == {
        "good": {"figure": 0.123457, "status": "held"},
        "bad": {"status": "error", "error": "no kernel"},
        "late": {"status": "not reached"},
    }


def test_failed_steps_fail_the_group(smoke: Callable[..., Check], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(check: Check) -> Finding:
        raise CheckError("no card")

    good = Step("good", lambda check: Finding(True, "", {}), 1)
    fake_steps(monkeypatch, Step("bad", fail, 1), Step("wrong", lambda c: Finding(False, "", {}), 1), good)
    check = smoke("one")
    assert not run_group(check, "one")
    assert [step["status"] for step in check.steps.values()] == ["error", "not held", "held"]


def test_unknown_networks_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="unknown network 'no_such'; pass one of resnet50, "):
        _ = Options(tmp_path, networks=("no_such",)).paper_networks
    assert [network.name for network in Options(tmp_path, networks=("vgg16",)).paper_networks] == ["vgg16"]


def test_every_group_begins_with_the_runtime() -> None:
    assert {steps[0].name for steps in GROUPS.values()} == {"runtime"}
    names = [step.name for steps in GROUPS.values() for step in steps[1:]]
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a card")
def test_the_runtime_fails_without_a_card(tmp_path: Path) -> None:
    # The last way to find CUDA's libraries, which takes seconds.
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").touch()
    arguments = ("--group", "torch", "--only", "runtime")
    result, record = run_script(tmp_path, *arguments, python_path=tmp_path / "site")
    assert result.returncode == 1
    assert record["provider"] == CUDA
    assert statuses(record, "torch") == {"runtime": "error"}


def test_a_shadowed_build_of_onnxruntime_is_no_conflict(tmp_path: Path) -> None:
    """Metadata of another onnxruntime comes first on the path."""
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if installed != ["onnxruntime-gpu"]:
        pytest.skip("needs the build with CUDA")
    other = tmp_path / "site" / "onnxruntime-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime\nVersion: 1.0\n")
    out = tmp_path / "out"
    out.mkdir()
    arguments = ("--smoke", "--group", "kernels", "--only", "runtime", "reductions")
    result, record = run_script(out, *arguments, python_path=tmp_path / "site")
    assert result.returncode == 0, result.stdout
    assert statuses(record, "kernels") == {"runtime": "held", "reductions": "held"}
    assert record["groups"]["kernels"]["versions"]["onnxruntime"] == "1.0"


def _is_installed(name: str) -> bool:
    return any(metadata.distributions(name=name))


# -- smoke runs --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "steps"])
def test_smoke_run_of_a_group_passes(tmp_path: Path, group: str) -> None:
    result, record = run_script(tmp_path, "--smoke", "--group", group)
    assert result.returncode == 0, result.stdout + result.stderr
    assert statuses(record, group) == {step.name: "held" for step in GROUPS[group]}
    assert cuda_results.results_section(record) == ""


@pytest.mark.slow
def test_smoke_run_with_prepared_files(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    out.mkdir()
    command = [sys.executable, str(SCRIPT), "--smoke", "--group", "steps", "--prepare", str(prepared)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    result, record = run_script(out, "--smoke", "--group", "steps", "--prepared", str(prepared))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "not prepared by this version" not in result.stdout
    steps = record["groups"]["steps"]["steps"]
    assert statuses(record, "steps") == {step.name: "held" for step in GROUPS["steps"]}
    assert_no_cuda_claimed(record)
    assert_order_is_the_schedule(steps["order"])
    rows = steps["peak"]["networks"] | steps["table1"]["networks"]
    assert list(rows) == [network.name for network in SMOKE_NETWORKS]
    for row in rows.values():
        assert_planned_peak_is_below_regular(row)
        assert_bits_are_equal(row["distance"])
    shared = [value for value in steps["exchange"].values() if isinstance(value, bool)]
    assert len(shared) == 7
    assert all(shared)
    # The same figures, as if from a card.
    assert "mobilenet_v2, 4" in cuda_results.results_section({**record, "smoke": False, "card": "a card"})


def assert_no_cuda_claimed(record: dict[str, Any]) -> None:
    assert record["smoke"] is True
    assert record["provider"] == CPU
    assert record["card"] is None
    steps = record["groups"]["steps"]["steps"]
    assert steps["runtime"]["matmul"]["provider"] == CPU
    assert {row["status"] for row in steps["graph"]["rows"].values()} == {"not on this provider"}
    for graph in GRAPHS:
        assert set(steps["fallback"][graph]["nodes_by_provider"]) == {CPU}
        for row in steps["peak"]["networks"].values():
            assert row[graph]["session_providers"] == [CPU]
            assert row[graph]["device_growth_bytes"] == []


def assert_order_is_the_schedule(step: dict[str, Any]) -> None:
    assert step[BASELINE]["recomputed"] == 0 < step[PLANNED]["recomputed"]
    for graph in GRAPHS:
        assert step[graph]["equals_schedule"] is True
        assert step[graph]["lost_recomputed"]["count"] == 0
        assert 0 < step[graph]["barriers"]["executed"] < step[graph]["executed"]
        assert 0 < step[graph]["barriers"]["host_time_share"] < 0.5


def assert_planned_peak_is_below_regular(row: dict[str, Any]) -> None:
    regular, planned = row[BASELINE], row[PLANNED]
    assert planned["simulated_peak_bytes"] < regular["simulated_peak_bytes"]
    assert planned["measured_peak_bytes"] < regular["measured_peak_bytes"]
    for figures in (regular, planned):
        assert figures["measured_by"] == "arena, requested"
        # test_benchmark.py compares the two with a smaller tolerance.
        assert figures["measured_peak_bytes"] == pytest.approx(figures["simulated_peak_bytes"], rel=0.05)
        assert figures["peak_without_workspaces_bytes"] <= figures["measured_peak_bytes"]
        assert min(figures["step_seconds"]) <= figures["median_seconds"] <= max(figures["step_seconds"])
        assert 0 < figures["output_bytes"] <= figures["measured_peak_bytes"]


def assert_bits_are_equal(distance: dict[str, Any]) -> None:
    """Kernels of a CPU are deterministic; a GPU's need not be."""
    assert distance["bit_equal"] == distance["outputs"] > 1
    assert distance["largest"] == 0
    assert distance["loss_value"] > 0


# -- training files ----------------------------------------------------------------------------------


def test_prepared_files_are_runnable_and_belong_to_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(Network("resnet18", (2, 3, 32, 32)), "cpu")
    assert not recipe.is_prepared(tmp_path)
    make(recipe, tmp_path)
    (archive,) = tmp_path.iterdir()
    assert archive.stat().st_size < 50_000
    files = TrainingFiles.load(tmp_path, recipe.name)
    losses = []
    for graph in GRAPHS:
        model = files.model(graph)
        session = make_session(model, providers=[CPU], threads=1)
        feeds = files.feeds(model)
        losses.append(session.run([files.loss], feeds)[0])
        assert files.simulated[graph] > sum(value.nbytes for value in feeds.values())
    assert losses[0] == losses[1]
    # The deviation of random logits is far above zero, so drawn weights are in use.
    assert losses[0] > np.log(1000)
    monkeypatch.setattr(training_files, "package_version", lambda: "other")
    assert not recipe.is_prepared(tmp_path)
    with pytest.raises(CheckError, match="belongs to other sources; make it again by --prepare"):
        TrainingFiles.load(tmp_path, recipe.name)


def test_half_precision_keeps_weights_and_outputs_in_float32() -> None:
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


# -- races and profiles ------------------------------------------------------------------------------


REQUEST = {"provider": CPU, "threads": 1, "smoke": True}


@pytest.mark.parametrize("layer", [1, 3])
def test_every_form_of_a_weight_gradient_is_right(layer: int) -> None:
    graphs = dict(races.weight_forms(SMOKE_LAYERS[layer]))
    assert {name.partition(":")[0] for name in graphs} == {"cpu", "cuda"}
    assert "cuda: by columns, whole batch" in graphs
    found = races.work_weights({**REQUEST, "layer": layer}, Path())["forms"]
    assert list(found) == ["torch", *graphs]
    assert all(figures["error"] < 1e-6 for figures in found.values())


def test_forms_of_reductions_are_right() -> None:
    for shape in ((2, 4, 6, 6), (64, 8)):
        found = races.work_reductions({**REQUEST, "shape": shape}, Path())["forms"]
        assert {"cpu form", "cuda form", "all axes at once"} < set(found)
        assert all(figures["error"] < 1e-6 for figures in found.values())


def test_a_wrong_form_fails_the_race(smoke: Callable[..., Check], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"right": {"seconds": 1e-6, "error": 1e-7}, "wrong": {"seconds": 1e-6, "error": 0.5}}
    monkeypatch.setattr(Check, "worker", lambda *arguments: {"forms": rows})
    finding = races.reductions_step(smoke("kernels"))
    assert not finding.holds
    assert "wrong: 2x4x6x6: wrong, 64x8: wrong" in finding.line


def test_copies_of_a_graph_share_inputs_and_constants() -> None:
    (_, graph), *_ = races.weight_forms(SMOKE_LAYERS[1])
    copied = races.repeated(graph, 3)
    assert len(copied.node) == 3 * len(graph.node)
    assert [value.name for value in copied.output] == ["result_0", "result_1", "result_2"]
    assert [value.name for value in copied.input] == ["x", "dy"]
    assert len({node.name for node in copied.node}) == len(copied.node)


def test_kernels_are_ranked_by_time() -> None:
    kernels = {f"k{index}": (2, index / 1e3) for index in range(40)}
    report = kernel_report(kernels, 2.0)
    assert report["kernels"] == 80
    assert report["busy_seconds"] == pytest.approx(0.78)
    assert [one["name"] for one in report["top"]] == [
        f"k{index}" for index in range(39, 39 - TOP_KERNELS, -1)
    ]


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


def event(
    name: str, operator: str = "", provider: str = CUDA, outputs: Any = (("float", (4,)),)
) -> NodeEvent:
    return NodeEvent(name, operator, provider, 1.0, outputs)


FILE_ORDER = [event(node.name, node.op_type) for node in MODEL.graph.node]


def test_file_order_equals_the_schedule() -> None:
    report = profile_reports.order_report(MODEL, FILE_ORDER)
    assert report["equals_schedule"] is True
    assert report["late"]["count"] == report["unknown"]["count"] == report["not_executed"]["count"] == 0


def test_late_lost_and_unknown_nodes_are_named() -> None:
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


def test_barriers_and_adjacent_copies_are_counted() -> None:
    assert profile_reports.barrier_nodes(MODEL) == {"e", "s", "t", "h"}
    copy = event("Memcpy_token_0", "MemcpyToHost")
    first, e, *rest = FILE_ORDER
    report = profile_reports.barrier_report(MODEL, [copy, first, e, copy, *rest, copy])
    assert report["executed"] == report["in_file"] == 4
    assert report["copies_beside"] == {"MemcpyToHost": 1}
    assert report["host_time_share"] == pytest.approx(4 / 10)


def test_shape_arithmetic_is_distinguished_from_computation() -> None:
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
