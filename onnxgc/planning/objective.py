"""The value of a plan: its simulated peak, or the paper's sum of checkpoints and heaviest segment."""

from dataclasses import dataclass

from onnxgc.graph.segments import segments_between
from onnxgc.planning.plan import CheckpointPlan, Objective
from onnxgc.planning.problem import CheckpointProblem


@dataclass(frozen=True, slots=True)
class PaperObjective:
    """The two terms of the paper's objective, in bytes."""

    checkpoint_bytes: int
    heaviest_segment_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint_bytes + self.heaviest_segment_bytes


def objective_bytes(problem: CheckpointProblem, plan: CheckpointPlan, objective: Objective) -> int:
    """The value of a plan: its simulated peak, or the paper's sum."""
    if objective in (Objective.PEAK, Objective.TIME):
        return problem.joint().profile(plan).peak_bytes
    if objective is Objective.ACTIVATIONS:
        return problem.joint().profile(plan).activation_peak_bytes
    return paper_objective(problem, plan).total_bytes


def paper_objective(problem: CheckpointProblem, plan: CheckpointPlan) -> PaperObjective:
    """The paper's objective of any set of checkpoints; a single source and target are always kept.

    Each weakly connected component of the tensors that are not kept is one segment: reading A of
    `onnxgc.graph.segments` if the plan is valid under it, otherwise reading G.

    Raises:
        PlanError: a checkpoint is not a vertex of the graph.

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
