"""Runs of training files, each in a separate process with inputs and outputs on the device."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime.measure import bound_step
from onnxgc.runtime.ort import load_onnxruntime
from onnxgc.runtime.profile import read_profile
from scripts.gpu_checks.device import free_device_bytes, session_on, settings_of
from scripts.gpu_checks.profile_reports import barrier_report, fallback_report, node_events, order_report
from scripts.gpu_checks.settings import CUDA, PROFILED_RUNS, TIMED_RUNS, Json, device_of, median
from scripts.gpu_checks.training_files import TrainingFiles
from scripts.gpu_checks.worker_process import load_arrays, save_arrays

TOP_KERNELS = 25


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one process: figures and reports for the record, and the outputs of its last run."""

    figures: Json
    fallback: Json
    order: Json
    loss: str
    names: tuple[str, ...]
    path: Path

    def outputs(self) -> dict[str, Array]:
        return load_arrays(self.path, self.names)


def work_run(request: Json, folder: Path) -> Json:
    """Profiled runs of a file, then timed ones."""
    provider = request["provider"]
    files, model, feeds = _model_and_feeds(request)
    started = time.perf_counter()
    session = session_on(model, request, folder / "profile")
    load_seconds = time.perf_counter() - started
    before = free_device_bytes(provider)
    step, binding = bound_step(session, feeds, settings_of(request))
    for _ in range(PROFILED_RUNS):
        step()
    profile = Path(session.end_profiling())
    # An arena does not shrink by itself. The first kernels also load code and handles.
    growth = before - free_device_bytes(provider)
    timed = [step() for _ in range(TIMED_RUNS)]
    outputs = binding.copy_outputs_to_cpu()
    save_arrays(folder / "outputs.npz", outputs)
    runs, events = read_profile(profile, provider), node_events(profile)[-1]
    order = order_report(model, events)
    return {
        "simulated_peak_bytes": files.simulated[request["graph"]],
        "measured_peak_bytes": max(run.requested_peak_bytes for run in runs),
        "peak_without_workspaces_bytes": max(max(run.held_bytes) for run in runs),
        "device_growth_bytes": growth,
        "output_bytes": sum(value.nbytes for value in outputs),
        "load_seconds": load_seconds,
        "step_seconds": timed,
        "median_seconds": median(timed),
        "nodes": len(events),
        "equals_schedule": order["equals_schedule"],
        "fallback": fallback_report(events, provider),
        "order": {**order, "barriers": barrier_report(model, events)},
        "names": [output.name for output in session.get_outputs()],
    }


def work_fixed(request: Json, folder: Path) -> Json:
    """Timed runs with all memory at fixed addresses, as a CUDA graph if requested."""
    provider = request["provider"]
    _, model, feeds = _model_and_feeds(request)
    before = free_device_bytes(provider)
    session = session_on(model, request, cuda_graph=request["cuda_graph"])
    step, results = _fixed_step(session, feeds, device_of(provider))
    for _ in range(PROFILED_RUNS):
        step()
    timed = [step() for _ in range(TIMED_RUNS)]
    growth = before - free_device_bytes(provider)
    save_arrays(folder / "outputs.npz", (value.numpy() for value in results.values()))
    return {
        "names": list(results),
        "step_seconds": timed,
        "median_seconds": median(timed),
        "device_growth_bytes": growth,
    }


def work_kernels(request: Json, folder: Path) -> Json:
    """Timed steps, then a profiled one."""
    _, model, feeds = _model_and_feeds(request)
    step, _ = bound_step(session_on(model, request), feeds, settings_of(request))
    for _ in range(PROFILED_RUNS):
        step()
    seconds = [step() for _ in range(TIMED_RUNS)]
    if request["provider"] == CUDA:
        found = kernel_report(*profiled_by_torch(step))
    else:
        session = session_on(model, request, folder / "profile")
        wall = bound_step(session, feeds, settings_of(request))[0]()
        kernels: dict[str, tuple[int, float]] = {}
        for event in node_events(Path(session.end_profiling()))[-1]:
            calls, total = kernels.get(event.operator, (0, 0.0))
            kernels[event.operator] = calls + 1, total + event.seconds
        found = kernel_report(kernels, wall)
    return {"step_seconds": seconds, "median_seconds": median(seconds), **found}


def kernel_report(kernels: Mapping[str, tuple[int, float]], wall_seconds: float) -> Json:
    """The longest kernels of a step, and the sum of all, from calls and seconds by kernel."""
    ranked = sorted(kernels.items(), key=lambda entry: -entry[1][1])
    return {
        "profiled_seconds": wall_seconds,
        "busy_seconds": sum(seconds for _, seconds in kernels.values()),
        "kernels": sum(calls for calls, _ in kernels.values()),
        "top": [
            {"name": name[:110], "calls": calls, "seconds": seconds} for name, (calls, seconds) in ranked[:TOP_KERNELS]
        ],
    }


def profiled_by_torch(step: Callable[[], object]) -> tuple[dict[str, tuple[int, float]], float]:
    """Kernels and copies on the card during a step, by whichever library, and the step's seconds."""
    import torch
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    events = [event for event in profiler.key_averages() if event.device_type is DeviceType.CUDA]
    return {event.key: (event.count, event.self_device_time_total / 1e6) for event in events}, wall


def _fixed_step(session: Any, feeds: Mapping[str, Array], device: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """A function that runs one step and returns its seconds, and the outputs that it overwrites."""
    ort_value, binding = load_onnxruntime().OrtValue, session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort_value.ortvalue_from_numpy(value, device, 0))
    results = {}
    for output in session.get_outputs():
        dtype = np.dtype(output.type.removeprefix("tensor(").removesuffix(")").replace("float", "float32"))
        results[output.name] = ort_value.ortvalue_from_shape_and_type(output.shape, dtype, device, 0)
        binding.bind_ortvalue_output(output.name, results[output.name])

    def step() -> float:
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return time.perf_counter() - started

    return step, results


def _model_and_feeds(request: Json) -> tuple[TrainingFiles, onnx.ModelProto, dict[str, Array]]:
    files = TrainingFiles.load(Path(request["files"]), request["name"])
    model = files.model(request["graph"])
    return files, model, files.feeds(model)


def distance(expected: Mapping[str, Array], actual: Mapping[str, Array], *, loss: str) -> Json:
    """Relative distances of all outputs by norm; kernels of a GPU need not be deterministic."""
    distances = {name: _relative(expected[name], actual[name]) for name in expected}
    gradients = {name: far for name, far in distances.items() if name != loss and np.isfinite(far)}
    worst = max(gradients, key=lambda name: gradients[name], default=None)
    is_finite_loss = bool(np.isfinite(distances[loss]))
    return {
        "loss": distances[loss] if is_finite_loss else None,
        "loss_value": float(expected[loss]) if is_finite_loss else None,
        "loss_is_finite": is_finite_loss,
        "largest": None if worst is None else gradients[worst],
        "largest_of": worst,
        "not_finite": sum(not np.isfinite(far) for far in distances.values()),
        "bit_equal": sum(np.array_equal(expected[name], actual[name]) for name in expected),
        "outputs": len(expected),
    }


def _relative(expected: Array, actual: Array) -> float:
    one, two = expected.astype(np.float64), actual.astype(np.float64)
    return float(np.linalg.norm(one - two)) / (float(np.linalg.norm(one)) or 1.0)
