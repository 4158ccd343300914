"""Keep everything: regular training, the yardstick for the others."""

from __future__ import annotations

from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    del options  # Nothing to choose.
    return Finding(
        CheckpointPlan(problem.graph.vertices), Status.FEASIBLE, any_plan_lower_bound_bytes(problem)
    )


STORE_ALL = Solver(
    name="store-all",
    summary="keep every tensor and recompute nothing, as regular training does",
    search=search,
)
