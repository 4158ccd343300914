"""The difference between two plans for one model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from onnxgc.api.planned_step import PlannedStep
from onnxgc.planning.peak_contents import live_at_peak
from onnxgc.planning.schedule import Compute, Release
from onnxgc.planning.simulate import MemoryProfile
from onnxgc.report.data.compare_report import DifferenceReport, DifferenceSide, PeakPosition

MAX_LISTED = 10
"""Largest tensors at a peak to list."""


class PlanFate(StrEnum):
    """The fate of a forward tensor under a schedule."""

    CHECKPOINT = "checkpoint"
    """A checkpoint that is live when backward begins."""
    HELD = "held"
    """Live when backward begins, but not a checkpoint: its segment, the last, is not recomputed."""
    RECOMPUTED = "again"
    ONCE = "once"
    """Computed once, and released before backward."""


_KEPT = (PlanFate.CHECKPOINT, PlanFate.HELD)


def compare_two_plans(one: tuple[str, PlannedStep], other: tuple[str, PlannedStep]) -> DifferenceReport:
    """Tensors that two plans treat differently, and the change of the peak.

    A tensor that is a checkpoint of one plan and kept by the other as well is among the `tensors`, but not
    among those that only one plan keeps.
    """
    fates = [_fates(planned) for _, planned in (one, other)]
    sizes = {**_sizes(one[1]), **_sizes(other[1])}
    tensors = sorted({*fates[0], *fates[1]}, key=lambda name: (-sizes[name], name))
    # A tensor that only one plan recomputes may be one of backward, which the other computes once.
    pairs = {name: (fates[0].get(name, PlanFate.ONCE), fates[1].get(name, PlanFate.ONCE)) for name in tensors}
    ones = [(name, sizes[name], *pair) for name, pair in pairs.items()]
    others = [(name, size, there, here) for name, size, here, there in ones]
    first, second = (planned.profile.peak_bytes for _, planned in (one, other))
    return {
        "plans": [_side(*one, ones), _side(*other, others)],
        "tensors": [
            {"tensor": name, "bytes": sizes[name], "fates": [fate.value for fate in pair]}
            for name, pair in pairs.items()
            if pair[0] is not pair[1]
        ],
        "kept_by_both": sum(all(fate in _KEPT for fate in pair) for pair in pairs.values()),
        "computed_again_by_both": sum(
            pair == (PlanFate.RECOMPUTED, PlanFate.RECOMPUTED) for pair in pairs.values()
        ),
        "peak_change_bytes": second - first,
    }


def _side(
    name: str, planned: PlannedStep, fates: Sequence[tuple[str, int, PlanFate, PlanFate]]
) -> DifferenceSide:
    """One plan's figures; `fates` are tensors with sizes, and their fates here and under the other plan."""
    live = live_at_peak(planned.schedule, planned.step.graph, planned.profile)
    return {
        "name": name,
        "simulated_peak_bytes": planned.profile.peak_bytes,
        **peak_operator(planned.profile),
        "largest_at_peak": [{"tensor": tensor, "bytes": size} for tensor, size in live[:MAX_LISTED]],
        "kept_here_only": [
            {"tensor": tensor, "bytes": size}
            for tensor, size, here, there in fates
            if here in _KEPT and there not in _KEPT
        ],
        "computed_again_here_only": [
            {"tensor": tensor, "bytes": size}
            for tensor, size, here, there in fates
            if here is PlanFate.RECOMPUTED is not there
        ],
    }


def peak_operator(profile: MemoryProfile) -> PeakPosition:
    """The operator at the peak, with its number in the step from 1."""
    return {
        "peak_step": profile.peak_operator,
        "peak_step_number": profile.timeline.index(profile.peak_bytes) + 1 if profile.timeline else 0,
        "steps": len(profile.timeline),
    }


def _fates(planned: PlannedStep) -> dict[str, PlanFate]:
    """The fates of all vertices with memory, and of recomputed tensors of backward."""
    traced = planned.traced
    members, resident = traced.problem.joint().members, planned.step.graph.resident
    again = _recomputed(planned)
    gone = _released_before_backward(planned)
    named = set(planned.solution.plan.checkpoints)
    found = dict.fromkeys(again, PlanFate.RECOMPUTED)
    for vertex in traced.problem.graph.vertices:
        name = str(vertex)
        if name in again or name in resident:
            continue
        if gone.issuperset((name, *members[vertex])):
            found[name] = PlanFate.ONCE
        else:
            found[name] = PlanFate.CHECKPOINT if vertex in named else PlanFate.HELD
    return found


def _released_before_backward(planned: PlannedStep) -> set[str]:
    found: set[str] = set()
    for step in planned.schedule.instructions:
        if isinstance(step, Compute) and step.chunk is not None:
            break
        if isinstance(step, Release):
            found.update(step.tensors)
    return found


def _recomputed(planned: PlannedStep) -> set[str]:
    """Recomputed vertices, and recomputed tensors of backward."""
    traced, original_of = planned.traced, planned.schedule.original_of
    copies = (copy for step in planned.schedule.recomputed for copy in step.operator.outputs)
    tensors = (original_of.get(copy, copy) for copy in copies)
    return {str(traced.vertex_of.get(tensor, tensor)) for tensor in tensors}


def _sizes(planned: PlannedStep) -> dict[str, int]:
    """Bytes of vertices, and of all other tensors."""
    problem = planned.traced.problem
    return {
        **planned.step.graph.sizes,
        **{str(vertex): problem.size_bytes(vertex) for vertex in problem.graph.vertices},
    }
