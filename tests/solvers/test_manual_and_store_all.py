from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Status
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.fixed_plans import MANUAL, STORE_ALL
from tests.graph.random_graphs import chain, problem_of, random_problem


def test_manual_accepts_any_set_without_guarantee() -> None:
    # Not valid under reading A: {3} is fed by 0 and by 2.
    problem = problem_of([(0, 1), (1, 2), (2, 3), (3, 4), (0, 3)], [1, 1, 1, 9, 7])
    solution = MANUAL.solve(problem, SolverOptions(checkpoints=(2,)))
    assert solution.plan.checkpoints == (0, 2, 4)
    assert solution.objective_bytes == 8 + 10
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_bytes <= solution.objective_bytes


def test_manual_without_checkpoints_keeps_the_ends() -> None:
    solution = MANUAL.solve(chain([1, 2, 3, 4]))
    assert solution.plan.checkpoints == (0, 3)
    assert solution.objective_bytes == 10


def test_manual_rejects_unknown_checkpoints() -> None:
    with pytest.raises(PlanError, match="did you mean"):
        MANUAL.solve(chain([1] * 20), SolverOptions(checkpoints=(99, 3)))


def test_store_all_is_the_total() -> None:
    random = Random(20)
    for _ in range(50):
        problem = random_problem(random, 10)
        solution = STORE_ALL.solve(problem)
        assert solution.plan.checkpoints == problem.graph.vertices
        assert solution.objective_bytes == problem.total_bytes
        assert solution.status is Status.FEASIBLE
