"""The user's own checkpoints, any set of them."""

from __future__ import annotations

from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Take `options.checkpoints` as they are; segments may have several entries and exits.

    Raises:
        PlanError: a checkpoint is no vertex of the graph; the closest names are given.
    """
    plan = CheckpointPlan.for_graph(problem.graph, options.checkpoints)
    return Finding(plan, Status.FEASIBLE, any_plan_lower_bound_bytes(problem))


MANUAL = Solver(
    name="manual",
    summary="keep the tensors that --checkpoints names",
    search=search,
    automatic=False,
)
