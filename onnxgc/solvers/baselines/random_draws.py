"""The paper's baseline: the best of some random sets of checkpoints.

Source: the paper, section 6 and the caption of its Table 1.
"""

from __future__ import annotations

from random import Random

from onnxgc.errors import PlanError
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes

MOST_CHECKPOINTS = 5
MOST_TRIALS = 100
"""How many draws in a row may be invalid before it gives up."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The best of `options.draws` valid draws (reading A) of 1 to 5 of all tensors.

    A draw that is not valid is drawn again. When 100 in a row are not, the search ends with the
    valid ones so far: the paper does not say what it does if there are some, but not enough.

    Raises:
        PlanError: not one of the first 100 draws is valid: the paper's "not applicable".
    """
    random = Random(options.seed)
    vertices = problem.graph.vertices
    plans: list[CheckpointPlan] = []
    failed = 0
    while len(plans) < max(options.draws, 1) and failed < MOST_TRIALS:
        drawn = random.sample(vertices, min(random.randint(1, MOST_CHECKPOINTS), len(vertices)))
        if is_valid_reading_a(problem.graph, drawn):
            plans.append(CheckpointPlan.for_graph(problem.graph, drawn))
            failed = 0
        else:
            failed += 1
    if not plans:
        raise PlanError(
            f"solver 'random' is not applicable: none of {MOST_TRIALS} draws of 1 to {MOST_CHECKPOINTS} "
            f"from {len(vertices)} vertices leaves independent segments; use solver 'acg'"
        )
    best = min(plans, key=lambda plan: paper_objective(problem, plan).total_bytes)
    return Finding(best, Status.FEASIBLE, any_plan_lower_bound_bytes(problem))


RANDOM = Solver(
    name="random",
    summary="the paper's baseline: the best of 10 random valid sets of 1 to 5 checkpoints",
    search=search,
)
