"""What changed between two plans for one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnxgc.api.pipeline import PlannedStep
from onnxgc.planning.held import held_at_peak

MOST_HELD = 10
"""Tensors that are named of those held at a peak."""


def difference_of(one: tuple[str, PlannedStep], other: tuple[str, PlannedStep]) -> dict[str, Any]:
    """Tensors that only one of two plans keeps, or computes again, and what that does to the peak."""
    sides = [_side(name, planned) for name, planned in (one, other)]
    kept = [_kept(planned) for _, planned in (one, other)]
    again = [_computed_again(planned) for _, planned in (one, other)]
    for side, own, others in zip(sides, (0, 1), (1, 0), strict=True):
        side["kept_here_only"] = _only(kept[own], kept[others])
        side["computed_again_here_only"] = _only(again[own], again[others])
    first, second = (planned.profile.peak_bytes for _, planned in (one, other))
    return {
        "plans": sides,
        "kept_by_both": len(kept[0].keys() & kept[1].keys()),
        "computed_again_by_both": len(again[0].keys() & again[1].keys()),
        "peak_change_bytes": second - first,
    }


def _side(name: str, planned: PlannedStep) -> dict[str, Any]:
    held = held_at_peak(planned.schedule, planned.step.graph, planned.profile)
    return {
        "name": name,
        "simulated_peak_bytes": planned.profile.peak_bytes,
        "peak_step": planned.profile.peak_step,
        "peak_step_number": planned.profile.timeline.index(planned.profile.peak_bytes) + 1,
        "steps": len(planned.profile.timeline),
        "largest_at_peak": [{"tensor": tensor, "bytes": size} for tensor, size in held[:MOST_HELD]],
    }


def _kept(planned: PlannedStep) -> dict[str, int]:
    problem = planned.traced.problem
    return {str(name): problem.size_bytes(name) for name in planned.solution.plan.checkpoints}


def _computed_again(planned: PlannedStep) -> dict[str, int]:
    """Vertices that run again, of backward the tensors themselves, with their bytes."""
    traced, sizes = planned.traced, planned.step.graph.sizes
    found: dict[str, int] = {}
    for step in planned.schedule.recomputed:
        for copy in step.operator.outputs:
            tensor = planned.schedule.original_of.get(copy, copy)
            vertex = traced.vertex_of.get(tensor)
            if vertex is None:
                found[tensor] = sizes.get(tensor, 0)
            else:
                found[vertex] = traced.problem.size_bytes(vertex)
    return found


def _only(here: Mapping[str, int], there: Iterable[str]) -> list[dict[str, Any]]:
    """What is here and not there, the largest first."""
    absent = set(there)
    names = sorted((name for name in here if name not in absent), key=lambda name: (-here[name], name))
    return [{"tensor": name, "bytes": here[name]} for name in names]
