from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE, MAX_VERTICES
from tests.graph.random_graphs import chain, problem_of, random_problem


@pytest.mark.parametrize(
    "edges, sizes, optimum",
    [
        # By hand: every set of the diamond is valid, and of the bridge only {} and all.
        ([(0, 1), (0, 2), (1, 3), (2, 3)], [0, 3, 5, 0], 5),
        ([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], [0, 3, 5, 0], 8),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [0, 4, 1, 4, 0], 5),
        ([(0, 2), (1, 2)], [4, 6, 1], 7),
    ],
)
def test_optima_derived_by_hand(edges: list[tuple[int, int]], sizes: list[int], optimum: int) -> None:
    solution = EXHAUSTIVE.solve(problem_of(edges, sizes))
    assert solution.objective_bytes == solution.lower_bound_bytes == optimum
    assert solution.status is Status.OPTIMAL


def test_result_is_valid_and_optimal() -> None:
    """The same search with the definitions of validity and objective used elsewhere."""
    random = Random(19)
    for _ in range(150):
        problem = random_problem(random, 6)
        vertices = problem.graph.vertices
        values = []
        for bits in range(1 << len(vertices)):
            plan = CheckpointPlan.for_graph(problem.graph, [v for n, v in enumerate(vertices) if bits >> n & 1])
            if is_valid_reading_a(problem.graph, plan.checkpoints):
                values.append(paper_objective(problem, plan).total_bytes)
        solution = EXHAUSTIVE.solve(problem)
        assert solution.objective_bytes == min(values)
        assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)


def test_larger_graphs_are_rejected() -> None:
    problem = chain([1] * (MAX_VERTICES + 1))
    assert EXHAUSTIVE.refusal(problem) is not None
    with pytest.raises(PlanError, match=f"up to {MAX_VERTICES} vertices, this one has {MAX_VERTICES + 1}"):
        EXHAUSTIVE.solve(problem)
