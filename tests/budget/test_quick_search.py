import random

import pytest

from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.least_peak import quick_least_peak
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, settled, simulate_sequence
from onnxgc.budget.quick_search import quick_within
from onnxgc.budget.search import SearchOptions
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_problem

OPTIONS = SearchOptions(time_limit_seconds=None)


@pytest.mark.parametrize("seed", range(25))
def test_quick_plans_are_within_their_limits_and_near_the_optimum(seed: int) -> None:
    problem = random_problem(random.Random(seed), 7)
    allowed = problem.duration // 3
    floor = floor_of_problem(problem).size
    found = quick_least_peak(problem, floor, OPTIONS, (), allowed)
    again = quick_least_peak(problem, floor, OPTIONS, (), allowed)
    assert (again.best.sequence, again.floor) == (found.best.sequence, found.floor)
    profile = simulate_sequence(problem, found.best.sequence)
    assert (profile.peak, profile.duration) == (found.best.peak, found.best.duration)
    assert found.best.extra <= allowed
    assert floor <= found.floor <= found.best.peak
    exact = least_extra(problem, found.best.peak, Order.FREE)
    assert exact is not None
    assert found.best.lower_bound <= exact.extra <= found.best.extra
    within = quick_within(problem, found.best.peak, [found.best.sequence])
    assert within is not None
    assert simulate_sequence(problem, within).duration <= found.best.duration
    assert quick_within(problem, floor - 1) is None


def test_a_replacement_waits_for_the_last_reader_and_its_own_readers_wait_too() -> None:
    """`read` uses a value that `replace` overwrites; `after` uses the new one."""
    operators = (
        ProblemOperator("first", (), (0,), 1),
        ProblemOperator("read", (0,), (1, 2), 1),
        ProblemOperator("replace", (2,), (3,), 1, may_repeat=False),
        ProblemOperator("after", (3,), (4,), 1),
        ProblemOperator("end", (1, 4), (5,), 1),
    )
    problem = OperatorProblem(operators, (4, 4, 0, 1, 1, 1), frozenset({5}), frozenset({2}))
    assert settled(problem, [0, 1, 2, 3, 0, 1, 4]) == [0, 1, 0, 1, 2, 3, 4]
    assert settled(problem, [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    without = OperatorProblem(operators, problem.sizes, problem.kept)
    assert settled(without, [0, 1, 2, 3, 0, 1, 4]) == [0, 1, 2, 3, 0, 1, 4]
