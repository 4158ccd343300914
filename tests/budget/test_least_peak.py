from random import Random

import pytest

from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.least_peak import least_peak
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.budget.search import SearchOptions
from onnxgc.budget.trade_off import trade_off
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_sequence, tight_problems


def true_least_peak(problem: OperatorProblem, order: Order, max_extra: int | None) -> int:
    budget = 0
    while True:
        best = least_extra(problem, budget, order)
        if best is not None and (max_extra is None or best.extra <= max_extra):
            return budget
        budget += 1


@pytest.mark.parametrize("order", list(Order))
def test_the_true_least_peak_is_between_the_floor_and_the_peak_found(order: Order) -> None:
    random = Random(51)
    met = tried = 0
    for problem, _ in tight_problems(52, 8, 6):
        for max_extra in (None, random.randint(0, problem.duration)):
            options = SearchOptions(order, None, 1)
            start = random_sequence(random, problem, 2 * len(problem))
            floor = floor_of_problem(problem).size
            answer = least_peak(problem, floor, options, [start], max_extra)
            assert simulate_sequence(problem, answer.best.sequence).peak == answer.best.peak
            assert max_extra is None or answer.best.extra <= max_extra
            assert order.allows(answer.best.sequence)
            least = true_least_peak(problem, order, max_extra)
            assert answer.floor <= least <= answer.best.peak
            tried += 1
            met += least == answer.best.peak
    assert met >= 0.8 * tried


@pytest.mark.parametrize("order", list(Order))
def test_each_optimum_of_the_trade_off_is_between_bound_and_extra_time(order: Order) -> None:
    for problem, budget in tight_problems(53, 8, 6):
        budgets = [budget + more for more in range(4)]
        points = trade_off(problem, budgets, SearchOptions(order, None, 2))
        for point in points:
            best = least_extra(problem, point.budget, order)
            assert best is not None
            assert point.best.lower_bound <= best.extra <= point.best.extra
            assert point.best.peak <= point.budget


def test_without_time_a_sequence_of_a_low_peak_gives_one_for_each_budget() -> None:
    """Each budget recomputes only as much as it needs to make room for `heavy`."""
    problem = OperatorProblem(
        (
            *(ProblemOperator(f"stored {number}", (), (number,), 1) for number in range(4)),
            ProblemOperator("read", (0, 1, 2, 3), (4,), 1),
            ProblemOperator("heavy", (4,), (5,), 1, workspace=6),
            ProblemOperator("end", (0, 1, 2, 3, 5), (6,), 1),
        ),
        (1, 1, 1, 1, 0, 0, 0),
    )
    start = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6)
    points = trade_off(problem, range(6, 11), SearchOptions(time_limit_seconds=0.0), [start])
    assert [(point.budget, point.best.extra) for point in points] == [(10, 0), (9, 1), (8, 2), (7, 3), (6, 4)]
