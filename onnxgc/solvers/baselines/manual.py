"""The user's own checkpoints."""

from __future__ import annotations

from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.plan_bounds import plan_lower_bound


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The plan with `options.checkpoints`. Any set is valid: segments may have several entries and exits.

    Raises:
        PlanError: a checkpoint is no vertex of the graph; the message suggests the closest names.
    """
    plan = CheckpointPlan.for_graph(problem.graph, options.checkpoints)
    bound, operator = plan_lower_bound(problem, options.objective)
    return Finding(plan, Status.FEASIBLE, bound, operator)


MANUAL = Solver(
    name="manual",
    summary="keep the tensors that --checkpoints names",
    search=search,
    objectives=(Objective.PAPER, Objective.GENERAL, Objective.PEAK, Objective.ACTIVATIONS),
    automatic=False,
)
