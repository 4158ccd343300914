from random import Random

from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes
from onnxgc.solvers.paper.acg import ACG
from tests.graph.random_graphs import chain, random_problem


def test_no_set_at_all_goes_below() -> None:
    random = Random(21)
    for _ in range(400):
        problem = random_problem(random, 7)
        vertices = problem.graph.vertices
        plans = (
            CheckpointPlan(tuple(v for n, v in enumerate(vertices) if bits >> n & 1))
            for bits in range(1 << len(vertices))
        )
        assert any_plan_lower_bound_bytes(problem) <= min(
            paper_objective(problem, p).total_bytes for p in plans
        )


def test_tight_where_it_can_be() -> None:
    for inner in (1, 2, 10, 99, 1000):
        problem = chain([1] * (inner + 2))
        assert any_plan_lower_bound_bytes(problem) == ACG.solve(problem).objective_bytes
    assert any_plan_lower_bound_bytes(chain([2, 9, 3])) == 14
