from random import Random

import pytest

from onnxgc.planning.objective import Objective, paper_objective
from onnxgc.solvers.registry import SOLVERS
from tests.graph.random_graphs import random_problem


def test_names_are_those_of_the_solvers() -> None:
    assert set(SOLVERS) == {"acg", "store-all", "manual", "exhaustive"}
    assert all(name == solver.name for name, solver in SOLVERS.items())
    assert [name for name, solver in SOLVERS.items() if solver.exact_for is Objective.PAPER] == [
        "acg",
        "exhaustive",
    ]
    assert not any(solver.takes_budget for solver in SOLVERS.values())


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solution_is_judged_bounded_and_in_order(name: str) -> None:
    random = Random(22)
    for _ in range(100):
        problem = random_problem(random, 9)
        solution = SOLVERS[name].solve(problem)
        assert solution.solver == name
        assert solution.objective_bytes == paper_objective(problem, solution.plan).total_bytes
        assert solution.lower_bound_bytes <= solution.objective_bytes
        assert solution.plan.checkpoints == problem.graph.in_order(solution.plan.checkpoints)
        assert solution.seconds >= 0.0
