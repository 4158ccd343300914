import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgc.api import benchmarking
from onnxgc.api.benchmarking import Benchmark, bench
from onnxgc.api.pipeline import optimize
from onnxgc.errors import RuntimeFailedError, RuntimeUnavailableError
from onnxgc.report.text.benchmark_tables import paper_row, run_lines
from onnxgc.runtime import interleaved_timing
from onnxgc.runtime.measure import Measurement
from onnxgc.runtime.profile import RunProfile
from tests.api.chains import chain
from tests.model.model_helpers import model_of
from tests.training.samples import unstored

# Wide, so that parameter gradients are a large part of the peak.
MODEL = chain(layers=6, batch=256, width=128)


@pytest.fixture(scope="module")
def found() -> Iterator[Benchmark]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interleaved_timing, "_PAUSE_SECONDS", 0.0)
        yield bench(MODEL, provider="cpu", threads=1, runs=2, warm_up=1, check=False)


def test_measured_peaks_are_the_simulated_ones(found: Benchmark):
    for side in (found.regular, found.planned):
        assert side.requested_peak_bytes == pytest.approx(side.simulated_peak_bytes, rel=0.01)
        assert side.activation_peak_bytes == pytest.approx(side.simulated_activation_peak_bytes, rel=0.01)
        assert side.in_use_peak_bytes is not None
        assert side.in_use_peak_bytes >= (side.requested_peak_bytes or 0)
        assert len(side.step_seconds) == 2
        assert min(side.step_seconds) > 0
    assert found.planned.simulated_peak_bytes < found.regular.simulated_peak_bytes
    # Otherwise the exclusion of gradients would have no effect.
    assert found.planned.simulated_activation_peak_bytes < 0.95 * found.planned.simulated_peak_bytes


def test_peaks_of_a_step_with_an_optimizer_include_its_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interleaved_timing, "_PAUSE_SECONDS", 0.0)
    found = bench(MODEL, optimizer="adamw", provider="cpu", threads=1, runs=1, warm_up=0, check=False)
    state_bytes = found.state_bytes
    weights = sum(numpy_helper.to_array(weight).nbytes for weight in MODEL.graph.initializer)
    assert state_bytes == 2 * weights
    for side in (found.regular, found.planned):
        assert side.requested_peak_bytes == pytest.approx(side.simulated_peak_bytes, rel=0.01)
        assert side.simulated_peak_bytes > state_bytes
        assert side.activation_peak_bytes is None
        assert len(side.step_seconds) == 1
    report = found.as_json()
    assert report["optimizer"] == {"name": "adamw", "state_bytes": state_bytes}
    assert "of adamw state; each step updates the parameters" in " ".join(run_lines(report))
    assert "-" not in paper_row(report).rows[0]


class Runtime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at: int = -1, peak: int = 100) -> None:
        self.graphs: list[onnx.GraphProto] = []
        self.timed: list[list[str]] = []
        self._fails_at, self._peak = fails_at, peak
        self.most_at_once = 2
        monkeypatch.setattr(benchmarking, "measure", self.measure)
        monkeypatch.setattr(benchmarking, "seconds_in_turns", self.seconds_in_turns)

    def measure(self, path: Path, feeds: object, **options: Any) -> Measurement:
        self.graphs.append(onnx.load(path).graph)
        if len(self.graphs) - 1 == self._fails_at:
            raise RuntimeFailedError(f"'{path}' does not run on ONNX Runtime: no memory")
        run = RunProfile(("a",), (1,), (self._peak,), (self._peak,), (0,), 1.0, {})
        return Measurement((run,), (1.0,), None)

    def seconds_in_turns(
        self, files: Mapping[str, os.PathLike[str]], feeds: object, **options: Any
    ) -> dict[str, tuple[float, ...]]:
        self.timed.append(list(files))
        if len(files) > self.most_at_once:
            raise RuntimeFailedError("no memory")
        return dict.fromkeys(files, (0.5,))


def benchmarked(model: onnx.ModelProto = MODEL, **options: Any) -> Benchmark:
    return bench(model, provider="cpu", check=False, **options)


def test_the_baseline_may_not_fit(monkeypatch: pytest.MonkeyPatch):
    """The planned file runs first; then the baseline fails for lack of memory."""
    runtime = Runtime(monkeypatch, fails_at=1)
    found = benchmarked()
    assert found.regular.failure == "the baseline does not run on ONNX Runtime: no memory"
    assert found.regular.requested_peak_bytes is None
    assert found.planned.step_seconds == (0.5,)
    assert found.time_ratio is None
    assert runtime.timed == [["the planned graph"]]
    report = found.as_json()
    assert report["extra_time_ratio"] is None
    assert report["regular"]["best_seconds"] is None
    assert report["regular"]["samples_per_second"] is None


def test_a_planned_file_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch):
    Runtime(monkeypatch, fails_at=0)
    with pytest.raises(RuntimeFailedError, match=r"^the planned graph does not run on ONNX Runtime: no mem"):
        benchmarked()


def test_files_too_large_together_are_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    runtime = Runtime(monkeypatch)
    runtime.most_at_once = 1
    found = benchmarked()
    assert [len(files) for files in runtime.timed] == [2, 1, 1]
    assert found.time_ratio == 1
    assert any("one was timed after the other" in note for note in found.notes)


def test_an_unknown_arena_gives_no_peak(monkeypatch: pytest.MonkeyPatch):
    Runtime(monkeypatch, peak=0)
    found = benchmarked()
    assert (found.planned.requested_peak_bytes, found.planned.activation_peak_bytes) == (None, None)
    assert found.planned.simulated_peak_bytes > 0


def test_weights_that_the_file_does_not_store_are_drawn(monkeypatch: pytest.MonkeyPatch):
    runtime = Runtime(monkeypatch)
    benchmarked(unstored())
    drawn = []
    for graph in runtime.graphs:
        (stored,) = (tensor for tensor in graph.initializer if tensor.name == "w0")
        drawn.append(numpy_helper.to_array(stored))
    assert np.std(drawn[0]) > 0.1
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_both_files_are_in_the_order_of_a_given_plan(monkeypatch: pytest.MonkeyPatch):
    body = "{ a = MatMul(x, v) b = Tanh(a) c = MatMul(x, w) d = Tanh(c) y = Add(b, d) }"
    model = model_of(f"(float[64,16] x) => (float[64,16] y) {body}", v=np.eye(16), w=np.eye(16))
    found = optimize(model, check=False, loss="mse", solver="peak")
    assert found.plan.order[:3] == ("x", "b", "d")
    plan = replace(found.plan, order=("x", "d", "b", *found.plan.order[3:]))
    runtime = Runtime(monkeypatch)
    benchmark = benchmarked(model, plan=plan, loss="mse")
    for graph in runtime.graphs:
        outputs = [output for node in graph.node for output in node.output]
        assert outputs.index("d") < outputs.index("b")
    assert benchmark.solver == "plan"


def test_a_budget_has_its_bytes_and_durations(monkeypatch: pytest.MonkeyPatch):
    Runtime(monkeypatch)
    found = benchmarked(chain(batch=256), budget="60%", step_limit=2, device="h100")
    assert found.budget_bytes is not None
    assert found.planned.simulated_peak_bytes <= found.budget_bytes
    assert found.predicted_extra_ratio > 0
    assert found.timing == "data sheet of NVIDIA H100 SXM"


def test_invalid_options_are_rejected_before_any_file_is_read():
    with pytest.raises(RuntimeUnavailableError, match=r"unknown provider 'tpu' \(known: cpu, cuda\)"):
        bench("none.onnx", provider="tpu")
    with pytest.raises(RuntimeFailedError, match="give at least one run"):
        bench("none.onnx", runs=0)
