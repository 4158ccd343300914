"""The user's own checkpoints, any set of them."""

from __future__ import annotations

from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_bound


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Take `options.checkpoints` as they are; segments may have several entries and exits.

    Raises:
        PlanError: a checkpoint is no vertex of the graph; the closest names are given.
    """
    plan = CheckpointPlan.for_graph(problem.graph, options.checkpoints)
    bound, operator = any_plan_bound(problem, options.objective)
    return Finding(plan, Status.FEASIBLE, bound, operator)


MANUAL = Solver(
    name="manual",
    summary="keep the tensors that --checkpoints names",
    search=search,
    objectives=(Objective.PAPER, Objective.GENERAL, Objective.PEAK, Objective.ACTIVATIONS),
    automatic=False,
)
