"""The smoke run of the GPU check, which makes no claim about CUDA, and its reports on profiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
import pytest
from scripts.gpu_checks.steps import STEPS

from scripts.gpu_checks import profile_reports, settings
from scripts.gpu_checks.profile_reports import NodeEvent
from scripts.gpu_checks.settings import CPU, CUDA
from tests.test_layers import PACKAGE

SCRIPT = PACKAGE.parent / "scripts" / "gpu_check.py"


def run_script(
    out: Path, *arguments: str, python_path: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
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


@pytest.mark.slow
def test_smoke_run_passes_and_claims_no_cuda(tmp_path: Path) -> None:
    result, record = run_script(tmp_path, "--smoke")
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = [str(step.number) for step in STEPS]
    assert [line[0] for line in result.stdout.splitlines() if line[0].isdigit()] == numbers
    steps = record["steps"]
    assert {number: step["status"] for number, step in steps.items()} == dict.fromkeys(numbers, "held")
    assert record["threads"] == 2
    assert record["versions"]["onnx"] == onnx.__version__
    assert_no_cuda_claimed(record)
    assert_order_is_the_schedule(steps["3"])
    rows = steps["4"]["networks"]
    assert list(rows) == [network.name for network in settings.SMOKE_NETWORKS]
    for row in rows.values():
        assert_planned_peak_is_below_regular(row)
        assert_bits_are_equal(row["distance"])
    shared = [value for value in steps["6"].values() if isinstance(value, bool)]
    assert len(shared) == 7
    assert all(shared)


def assert_no_cuda_claimed(record: dict[str, Any]) -> None:
    assert record["smoke"] is True
    assert record["provider"] == CPU
    assert record["card"] is None
    assert record["steps"]["1"]["matmul"]["provider"] == CPU
    for graph in settings.GRAPHS:
        assert set(record["steps"]["2"][graph]["nodes_by_provider"]) == {CPU}
        for row in record["steps"]["4"]["networks"].values():
            assert row[graph]["session_providers"] == [CPU]
            assert row[graph]["device_growth_bytes"] == []


def assert_order_is_the_schedule(step: dict[str, Any]) -> None:
    assert step["regular"]["recomputed"] == 0 < step["planned"]["recomputed"]
    for graph in settings.GRAPHS:
        assert step[graph]["equals_schedule"] is True
        assert step[graph]["lost_recomputed"]["count"] == 0
        assert 0 < step[graph]["barriers"]["executed"] < step[graph]["executed"]
        assert 0 < step[graph]["barriers"]["host_time_share"] < 0.5


def assert_planned_peak_is_below_regular(row: dict[str, Any]) -> None:
    regular, planned = row["regular"], row["planned"]
    assert planned["simulated_peak_bytes"] < regular["simulated_peak_bytes"]
    assert planned["measured_peak_bytes"] < regular["measured_peak_bytes"]
    for figures in (regular, planned):
        assert figures["measured_by"] == "arena, requested"
        # test_benchmark.py compares the two with a smaller tolerance.
        assert figures["measured_peak_bytes"] == pytest.approx(figures["simulated_peak_bytes"], rel=0.05)
        assert len(figures["arena_by_run"]) == settings.RUNS
        assert min(figures["step_seconds"]) > 0
        assert 0 < figures["output_bytes"] <= figures["measured_peak_bytes"]


def assert_bits_are_equal(distance: dict[str, Any]) -> None:
    """Kernels of a CPU are deterministic; a GPU's need not be."""
    assert distance["bit_equal"] == distance["outputs"] > 1
    assert distance["largest"] == 0
    assert distance["loss_value"] > 0


def test_steps_after_a_failed_one_run(tmp_path: Path) -> None:
    result, record = run_script(
        tmp_path, "--smoke", "--only", "1", "2", "4", "6", "--networks", "no_such_network"
    )
    assert result.returncode == 1
    steps = record["steps"]
    assert {number: step["status"] for number, step in steps.items()} == {
        "1": "held",
        "2": "error",
        "4": "not held",
        "6": "held",
    }
    assert "no_such_network" in steps["2"]["error"]
    assert "no_such_network" in steps["4"]["networks"]["no_such_network"]["error"]


def test_networks_beyond_the_time_limit_are_reported(tmp_path: Path) -> None:
    result, record = run_script(tmp_path, "--smoke", "--only", "4", "--limit-s", "30")
    assert result.returncode == 1
    rows = record["steps"]["4"]["networks"].values()
    assert [row["status"] for row in rows] == ["not reached"] * len(settings.SMOKE_NETWORKS)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a card")
def test_every_step_fails_without_a_card(tmp_path: Path) -> None:
    result, record = run_script(tmp_path, "--only", "1", "6")
    assert result.returncode == 1
    assert record["provider"] == CUDA
    assert {step["status"] for step in record["steps"].values()} == {"error"}


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
    result, record = run_script(out, "--smoke", "--only", "1", python_path=tmp_path / "site")
    assert result.returncode == 0, result.stdout
    assert record["versions"]["onnxruntime"] == "1.0"


def _is_installed(name: str) -> bool:
    return any(metadata.distributions(name=name))


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


def test_arena_peak_excludes_earlier_bytes_and_providers_without_figures() -> None:
    def using(in_use: int, added: int) -> NodeEvent:
        figures = {"mem_bytes_requested_in_use": in_use, "mem_requested_in_use_delta": added}
        return replace(event("node"), memory=figures)

    events = [using(1100, 100), using(1500, 400), using(1200, -300), event("host", provider=CPU)]
    report = profile_reports.arena_report(events)
    assert list(report) == [CUDA]
    assert report[CUDA]["requested_before_bytes"] == 1000
    assert report[CUDA]["requested_peak_bytes"] == 500
