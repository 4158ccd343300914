from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.planning.plan import Status
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.random_draws import MAX_CHECKPOINTS, RANDOM
from onnxgc.solvers.paper.acg import ACG
from tests.graph.random_graphs import chain, random_problem
from tests.solvers import networks


def test_plans_are_valid_small_and_no_better_than_the_optimum() -> None:
    random = Random(51)
    solved = 0
    for seed in range(300):
        problem = random_problem(random, 12)
        try:
            solution = RANDOM.solve(problem, SolverOptions(seed=seed))
        except PlanError:
            continue
        solved += 1
        ends = {*problem.graph.sources, *problem.graph.sinks}
        assert len(set(solution.plan.checkpoints) - ends) <= MAX_CHECKPOINTS
        assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)
        assert solution.objective_bytes >= ACG.solve(problem).objective_bytes
        assert solution.status is Status.FEASIBLE
    assert solved > 250


def test_seed_and_number_of_draws() -> None:
    problem = networks.vgg("66M77M888M999M999M", batch=64)
    plans = [RANDOM.solve(problem, SolverOptions(seed=seed)).plan for seed in range(20)]
    assert plans == [RANDOM.solve(problem, SolverOptions(seed=seed)).plan for seed in range(20)]
    assert len(set(plans)) > 5
    few, many = (RANDOM.solve(problem, SolverOptions(draws=draws)).objective_bytes for draws in (1, 200))
    assert many < few


def test_not_applicable_is_said_in_one_line() -> None:
    """As for the paper's NAS networks: hardly any set of a densely connected graph is valid."""
    problem = networks.dense_block_with_wide_concats(200)
    with pytest.raises(PlanError, match="not applicable: none of 100 draws") as caught:
        RANDOM.solve(problem)
    assert "\n" not in str(caught.value)


def test_one_vertex() -> None:
    assert RANDOM.solve(chain([7])).plan.checkpoints == (0,)
