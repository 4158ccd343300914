"""The tensors that are live at the peak."""

from __future__ import annotations

from onnxgc.planning.allocations import allocations
from onnxgc.planning.schedule import Schedule, StepGraph
from onnxgc.planning.simulate import MemoryProfile


def live_at_peak(schedule: Schedule, graph: StepGraph, profile: MemoryProfile) -> tuple[tuple[str, int], ...]:
    """Live tensors with their bytes, and the operator's workspace under its name, the largest first.

    Their sum is the peak.
    """
    peak_run = profile.timeline.index(profile.peak_bytes)
    live: dict[str, int] = {}
    for run, step in enumerate(allocations(schedule, graph)):
        live.update((storage.tensor, storage.size_bytes) for storage in step.made)
        if run == peak_run:
            workspace = step.operator.workspace_bytes
            found = [*live.items(), *([(step.operator.name, workspace)] if workspace else [])]
            return tuple(sorted(found, key=lambda item: (-item[1], item[0])))
        for storage in step.freed:
            del live[storage.tensor]
    return ()
