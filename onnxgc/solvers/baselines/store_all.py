"""The baseline: keep every tensor, without recomputation."""

from __future__ import annotations

from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.plan_bounds import plan_lower_bound


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The plan that keeps every tensor."""
    bound, operator = plan_lower_bound(problem, options.objective)
    return Finding(CheckpointPlan(problem.graph.vertices), Status.FEASIBLE, bound, operator)


STORE_ALL = Solver(
    name="store-all",
    summary="keep every tensor and recompute nothing, as regular training does",
    search=search,
    objectives=(Objective.PAPER, Objective.GENERAL, Objective.PEAK, Objective.ACTIVATIONS),
)
