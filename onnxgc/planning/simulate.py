"""The simulator: exact memory of a schedule, step by step."""

from dataclasses import dataclass

from onnxgc.planning.allocations import allocations
from onnxgc.planning.schedule import Schedule, StepGraph


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes over one training step, without parameters and fed tensors.

    `timeline` has one entry for each operator that runs: live bytes while it runs; `live_before`, live bytes
    when it begins. `activation_peak_bytes` is the peak without the parameters' gradients, as the literature
    reports it.
    """

    peak_bytes: int
    peak_operator: str
    activation_peak_bytes: int
    parameter_gradient_bytes: int
    timeline: tuple[int, ...]
    live_before: tuple[int, ...]


def simulate(schedule: Schedule, graph: StepGraph) -> MemoryProfile:
    """Memory profile of a schedule, sizes in bytes as requested from the allocator.

    The definition of a schedule's memory: faster models of it are tested against this function
    (docs/memory-models.md). Linear in the inputs and outputs of all runs.
    """
    timeline: list[int] = []
    live_before: list[int] = []
    live = gradients = activation_peak = peak = 0
    peak_operator = ""
    for step in allocations(schedule, graph):
        live_before.append(live)
        for storage in step.made:
            live += storage.size_bytes
            if storage.tensor in graph.parameter_gradients:
                gradients += storage.size_bytes
        running = live + step.operator.workspace_bytes
        timeline.append(running)
        if running > peak:
            peak, peak_operator = running, step.operator.name
        activation_peak = max(activation_peak, running - gradients)
        live -= sum(storage.size_bytes for storage in step.freed)
        gradients -= sum(storage.size_bytes for storage in step.freed if storage.tensor in graph.parameter_gradients)
    return MemoryProfile(peak, peak_operator, activation_peak, gradients, tuple(timeline), tuple(live_before))


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
            contents = [*live.items(), *([(step.operator.name, workspace)] if workspace else [])]
            return tuple(sorted(contents, key=lambda item: (-item[1], item[0])))
        for storage in step.freed:
            del live[storage.tensor]
    return ()
