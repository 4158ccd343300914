from random import Random

from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes
from tests.graph.random_graphs import chain, random_problem


def test_bound_holds_for_all_sets() -> None:
    random = Random(21)
    for _ in range(400):
        problem = random_problem(random, 7)
        vertices = problem.graph.vertices
        plans = (
            CheckpointPlan(tuple(v for n, v in enumerate(vertices) if bits >> n & 1))
            for bits in range(1 << len(vertices))
        )
        assert paper_lower_bound_bytes(problem) <= min(paper_objective(problem, p).total_bytes for p in plans)


def test_bound_is_tight_on_unit_chains() -> None:
    for inner in (1, 2, 10, 99, 1000):
        problem = chain([1] * (inner + 2))
        assert paper_lower_bound_bytes(problem) == ACG.solve(problem).objective_bytes
    assert paper_lower_bound_bytes(chain([2, 9, 3])) == 14
