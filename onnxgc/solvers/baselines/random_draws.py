"""The paper's baseline: the best of several random sets of checkpoints.

Source: Feng & Huang, CVPR 2021, section 6 and the caption of Table 1.
"""

from random import Random

from onnxgc.errors import PlanError
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes

MAX_CHECKPOINTS = 5
MAX_INVALID_DRAWS = 100
"""Number of consecutive invalid draws that ends the search."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The best of several valid draws (reading A) of 1 to 5 tensors. O(vertices + edges) for each draw.

    An invalid draw is repeated. After 100 consecutive invalid draws the search ends with the valid ones; the
    paper does not define this case.

    Args:
        problem: any acyclic graph, sizes in bytes.
        options: `draws` is the number of valid draws, `seed` the seed of the random numbers.

    Raises:
        PlanError: the first 100 draws are all invalid: the paper's "not applicable".

    Source: the paper, section 6.
    """
    random = Random(options.seed)
    vertices = problem.graph.vertices
    plans: list[CheckpointPlan] = []
    failed = 0
    while len(plans) < max(options.draws, 1) and failed < MAX_INVALID_DRAWS:
        drawn = random.sample(vertices, min(random.randint(1, MAX_CHECKPOINTS), len(vertices)))
        if is_valid_reading_a(problem.graph, drawn):
            plans.append(CheckpointPlan.for_graph(problem.graph, drawn))
            failed = 0
        else:
            failed += 1
    if not plans:
        raise PlanError(
            f"solver 'random' is not applicable: none of {MAX_INVALID_DRAWS} draws of 1 to {MAX_CHECKPOINTS} "
            f"from {len(vertices)} vertices leaves independent segments; use solver 'acg'"
        )
    best = min(plans, key=lambda plan: paper_objective(problem, plan).total_bytes)
    return Finding(best, Status.FEASIBLE, paper_lower_bound_bytes(problem))


RANDOM = Solver(
    name="random", summary="the paper's baseline: the best of 10 random valid sets of 1 to 5 checkpoints", search=search
)
