"""The judge: exact memory of a schedule, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from onnxgc.planning.allocations import allocations
from onnxgc.planning.schedule import Schedule, StepGraph


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes over one training step.

    `timeline` has one entry for each operator that runs: bytes held while it runs; `held_before`
    what is held when it begins. Parameters and fed tensors are not counted. `activation_peak_bytes`
    is the peak without the parameters' gradients, as the literature reports it.
    """

    peak_bytes: int
    peak_step: str
    activation_peak_bytes: int
    parameter_gradient_bytes: int
    timeline: tuple[int, ...]
    held_before: tuple[int, ...]


def simulate(schedule: Schedule, graph: StepGraph) -> MemoryProfile:
    """Memory profile of a schedule, sizes in bytes as requested from the allocator."""
    timeline: list[int] = []
    held_before: list[int] = []
    live = gradients = activation_peak = peak = 0
    peak_step = ""
    for step in allocations(schedule, graph):
        held_before.append(live)
        for storage in step.made:
            live += storage.size_bytes
            if storage.tensor in graph.parameter_gradients:
                gradients += storage.size_bytes
        held = live + step.operator.workspace_bytes
        timeline.append(held)
        if held > peak:
            peak, peak_step = held, step.operator.name
        activation_peak = max(activation_peak, held - gradients)
        live -= sum(storage.size_bytes for storage in step.freed)
        gradients -= sum(
            storage.size_bytes for storage in step.freed if storage.tensor in graph.parameter_gradients
        )
    return MemoryProfile(peak, peak_step, activation_peak, gradients, tuple(timeline), tuple(held_before))
