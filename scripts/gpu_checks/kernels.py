"""Kernels of a step: the longest ones, and the device's busy time against the wall."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from onnxgc.runtime.measure import bound_step
from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.device import load_libraries, session_on, settings_of
from scripts.gpu_checks.profile_reports import node_events
from scripts.gpu_checks.settings import CUDA, PROFILED_RUNS, TIMED_RUNS, Json, median
from scripts.gpu_checks.training_files import BASELINE, PLANNED, Recipe, TrainingFiles

TOP_KERNELS = 25
_MAX_NAME_CHARACTERS = 110
Kernels = Mapping[str, tuple[int, float]]
"""Calls and seconds by kernel."""


def kernels_step(check: Check) -> Finding:
    """Baselines in the forms for CUDA; the first network also planned, and in the forms for CPUs."""
    rows: dict[str, Json] = {}
    check.begin("kernels", {"networks": rows})
    first, *others = check.options.paper_networks
    jobs = [(Recipe(first), BASELINE), (Recipe(first, "cpu"), BASELINE)]
    jobs += [(Recipe(network), BASELINE) for network in others] + [(Recipe(first), PLANNED)]
    for recipe, graph in jobs:
        name = f"{recipe.name} {graph}"
        check.add_row(rows, name, functools.partial(kernels_row, check, recipe, graph), kernels_line)
    reached = [row for row in rows.values() if row["status"] != "not reached"]
    holds = bool(reached) and all(row["status"] == "held" for row in reached)
    return Finding(holds, f"{len(reached)} of {len(rows)} files profiled", {"networks": rows})


def kernels_row(check: Check, recipe: Recipe, graph: str) -> Json:
    return check.worker("kernels", check.run_request(recipe, graph), f"kernels-{recipe.name}-{graph}")


def kernels_line(row: Json) -> str:
    top = ", ".join(f"{one['name'][:40]} {1e3 * one['seconds']:.1f}" for one in row["top"][:3])
    return (
        f"step {1e3 * row['median_seconds']:.1f} ms, {row['kernels']} kernels, busy "
        f"{1e3 * row['busy_seconds']:.1f} of {1e3 * row['profiled_seconds']:.1f} ms; longest, ms: {top}"
    )


def work_kernels(request: Json, folder: Path) -> Json:
    """Timed steps, then a profiled one."""
    load_libraries(request["provider"])
    files = TrainingFiles.load(Path(request["files"]), request["name"])
    model = files.model(request["graph"])
    feeds = files.feeds(model)
    step, _ = bound_step(session_on(model, request), feeds, settings_of(request))
    for _ in range(PROFILED_RUNS):
        step()
    seconds = [step() for _ in range(TIMED_RUNS)]
    if request["provider"] == CUDA:
        found = {"measured_by": "torch.profiler", **kernel_report(*profiled_by_torch(step))}
    else:
        session = session_on(model, request, folder / "profile")
        wall = bound_step(session, feeds, settings_of(request))[0]()
        kernels: dict[str, tuple[int, float]] = {}
        for event in node_events(Path(session.end_profiling()))[-1]:
            calls, total = kernels.get(event.operator, (0, 0.0))
            kernels[event.operator] = calls + 1, total + event.seconds
        found = {"measured_by": "ONNX Runtime, by operator", **kernel_report(kernels, wall)}
    return {"step_seconds": seconds, "median_seconds": median(seconds), **found}


def kernel_report(kernels: Kernels, wall_seconds: float) -> Json:
    """The longest kernels of a step, and the sum of all."""
    ranked = sorted(kernels.items(), key=lambda entry: -entry[1][1])
    return {
        "profiled_seconds": wall_seconds,
        "busy_seconds": sum(seconds for _, seconds in kernels.values()),
        "kernels": sum(calls for calls, _ in kernels.values()),
        "top": [
            {"name": name[:_MAX_NAME_CHARACTERS], "calls": calls, "seconds": seconds}
            for name, (calls, seconds) in ranked[:TOP_KERNELS]
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
