"""What changed between two plans for one model."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from onnxgc.api.pipeline import PlannedStep
from onnxgc.planning.peak_contents import held_at_peak
from onnxgc.planning.schedule import Compute, Release
from onnxgc.planning.simulate import MemoryProfile

MOST_HELD = 10
"""Tensors that are named of those held at a peak."""


class PlanFate(StrEnum):
    """What a schedule does with a tensor of forward."""

    CHECKPOINT = "checkpoint"
    """The plan names it, and it is in memory when backward begins."""
    HELD = "held"
    """It is in memory then though the plan does not name it: its segment, the last, is not computed again."""
    AGAIN = "again"
    """It is computed again."""
    ONCE = "once"
    """It is computed once, and gone when backward begins."""


_KEPT = (PlanFate.CHECKPOINT, PlanFate.HELD)


def difference_of(one: tuple[str, PlannedStep], other: tuple[str, PlannedStep]) -> dict[str, Any]:
    """Tensors that fare differently under two plans, and what that does to the peak.

    What one plan names as a checkpoint and the other holds all the same is among the `tensors`, but not
    among those that one plan alone keeps.
    """
    sides = [_side(name, planned) for name, planned in (one, other)]
    fates = [_fates(planned) for _, planned in (one, other)]
    sizes = {**_sizes(one[1]), **_sizes(other[1])}
    tensors = sorted({*fates[0], *fates[1]}, key=lambda name: (-sizes[name], name))
    # What only one of them computes again may be a tensor of backward, which the other computes once.
    pairs = {name: [fate.get(name, PlanFate.ONCE) for fate in fates] for name in tensors}
    for number, side in enumerate(sides):
        kept = [
            name for name, pair in pairs.items() if pair[number] in _KEPT and pair[1 - number] not in _KEPT
        ]
        again = [
            name for name, pair in pairs.items() if pair[number] is PlanFate.AGAIN is not pair[1 - number]
        ]
        side["kept_here_only"] = [{"tensor": name, "bytes": sizes[name]} for name in kept]
        side["computed_again_here_only"] = [{"tensor": name, "bytes": sizes[name]} for name in again]
    first, second = (planned.profile.peak_bytes for _, planned in (one, other))
    return {
        "plans": sides,
        "tensors": [
            {"tensor": name, "bytes": sizes[name], "fates": [fate.value for fate in pair]}
            for name, pair in pairs.items()
            if pair[0] is not pair[1]
        ],
        "kept_by_both": sum(all(fate in _KEPT for fate in pair) for pair in pairs.values()),
        "computed_again_by_both": sum(pair == [PlanFate.AGAIN, PlanFate.AGAIN] for pair in pairs.values()),
        "peak_change_bytes": second - first,
    }


def _side(name: str, planned: PlannedStep) -> dict[str, Any]:
    held = held_at_peak(planned.schedule, planned.step.graph, planned.profile)
    return {
        "name": name,
        "simulated_peak_bytes": planned.profile.peak_bytes,
        **peak_step(planned.profile),
        "largest_at_peak": [{"tensor": tensor, "bytes": size} for tensor, size in held[:MOST_HELD]],
    }


def peak_step(profile: MemoryProfile) -> dict[str, Any]:
    """The operator that runs at the peak, and which of the step's it is, counted from 1 as on the page."""
    return {
        "peak_step": profile.peak_step,
        "peak_step_number": profile.timeline.index(profile.peak_bytes) + 1 if profile.timeline else 0,
        "steps": len(profile.timeline),
    }


def _fates(planned: PlannedStep) -> dict[str, PlanFate]:
    """What becomes of each vertex that takes memory, and of tensors of backward that are computed again."""
    traced = planned.traced
    members, resident = traced.problem.joint().members, planned.step.graph.resident
    again = _computed_again(planned)
    gone = _gone_before_backward(planned)
    named = set(planned.solution.plan.checkpoints)
    found = dict.fromkeys(again, PlanFate.AGAIN)
    for vertex in traced.problem.graph.vertices:
        name = str(vertex)
        if name in again or name in resident:
            continue
        if gone.issuperset((name, *members[vertex])):
            found[name] = PlanFate.ONCE
        else:
            found[name] = PlanFate.CHECKPOINT if vertex in named else PlanFate.HELD
    return found


def _gone_before_backward(planned: PlannedStep) -> set[str]:
    found: set[str] = set()
    for step in planned.schedule.steps:
        if isinstance(step, Compute) and step.chunk is not None:
            break
        if isinstance(step, Release):
            found.update(step.tensors)
    return found


def _computed_again(planned: PlannedStep) -> set[str]:
    """Vertices that run again, of backward the tensors themselves."""
    traced, original_of = planned.traced, planned.schedule.original_of
    copies = (copy for step in planned.schedule.recomputed for copy in step.operator.outputs)
    tensors = (original_of.get(copy, copy) for copy in copies)
    return {str(traced.vertex_of.get(tensor, tensor)) for tensor in tensors}


def _sizes(planned: PlannedStep) -> dict[str, int]:
    """Bytes of vertices, and of all tensors that are none."""
    problem = planned.traced.problem
    return {
        **planned.step.graph.sizes,
        **{str(vertex): problem.size_bytes(vertex) for vertex in problem.graph.vertices},
    }
