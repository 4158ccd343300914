"""Plans without a search: every tensor kept, or the user's own checkpoints."""

from dataclasses import replace

from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.plan_bounds import plan_lower_bound

_OBJECTIVES = (Objective.PAPER, Objective.GENERAL, Objective.PEAK, Objective.ACTIVATIONS)


def keep_all(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    return keep_given(problem, replace(options, checkpoints=problem.graph.vertices))


def keep_given(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The plan with `options.checkpoints`. Any set is valid: segments may have several entries and exits.

    Raises:
        PlanError: a checkpoint is no vertex of the graph; the message suggests the closest names.
    """
    plan = CheckpointPlan.for_graph(problem.graph, options.checkpoints)
    bound, operator = plan_lower_bound(problem, options.objective)
    return Finding(plan, Status.FEASIBLE, bound, operator)


STORE_ALL = Solver(
    name="store-all",
    summary="keep every tensor and recompute nothing, as regular training does",
    search=keep_all,
    objectives=_OBJECTIVES,
)

MANUAL = Solver(
    name="manual",
    summary="keep the tensors that --checkpoints names",
    search=keep_given,
    objectives=_OBJECTIVES,
    automatic=False,
)
