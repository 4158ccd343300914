"""The paper's objective: the checkpoints together, plus the heaviest segment between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onnxgc.graph.segments import segments_between
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem


class Objective(Enum):
    """What a plan is to make small."""

    PEAK = "peak"
    """The simulated peak of the training graph that will run."""
    PAPER = "paper"
    """The sum of the checkpoints and the heaviest segment."""


@dataclass(frozen=True, slots=True)
class PaperObjective:
    """The two terms of the paper's objective, in bytes."""

    checkpoint_bytes: int
    heaviest_segment_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint_bytes + self.heaviest_segment_bytes


def paper_objective(problem: CheckpointProblem, plan: CheckpointPlan) -> PaperObjective:
    """Judge any set of checkpoints; a single source and target count as kept whether named or not.

    Each weakly connected component of the tensors that are not kept is one segment, whatever feeds
    it: the value is that of reading A where the plan is valid under it, else that of reading G
    (`onnxgc.graph.segments`).

    Raises:
        PlanError: a checkpoint is no vertex of the graph.

    Source: the paper, equation 2.
    """
    kept = CheckpointPlan.for_graph(problem.graph, plan.checkpoints).checkpoints
    weights = (
        sum(problem.size_bytes(vertex) for vertex in segment.interior)
        for segment in segments_between(problem.graph, kept)
    )
    return PaperObjective(
        checkpoint_bytes=sum(problem.size_bytes(vertex) for vertex in kept),
        heaviest_segment_bytes=max(weights, default=0),
    )
