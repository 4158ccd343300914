import functools
import random
from random import Random

import pytest

from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.improve import local_moves
from onnxgc.budget.least_peak import least_peak, quick_least_peak
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, settled, simulate_sequence
from onnxgc.budget.quick_search import quick_within
from onnxgc.budget.search import COMPILING, BudgetedSequence, NoSequence, SearchOptions, compile_loops, within_budget
from onnxgc.budget.trade_off import trade_off
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import Status
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_problem, random_sequence, tight_problems

ROUNDS = 4


@pytest.mark.parametrize("order", list(Order))
def test_peak_is_within_the_budget_and_the_optimum_between_bound_and_extra_time(order: Order):
    found_best = found_any = 0
    for problem, budget in tight_problems(31, 40, 7):
        best = least_extra(problem, budget, order)
        found = within_budget(problem, budget, SearchOptions(order, None, ROUNDS))
        if isinstance(found, NoSequence):
            assert best is None or not found.impossible
            continue
        assert best is not None
        profile = simulate_sequence(problem, found.sequence)
        assert profile.peak == found.peak <= budget
        assert profile.duration == found.duration == problem.duration + found.extra
        assert found.lower_bound <= best.extra <= found.extra
        assert order is Order.FREE or list(dict.fromkeys(found.sequence)) == list(range(len(problem)))
        found_any += 1
        found_best += found.extra == best.extra
    assert found_best > 0.9 * found_any > 15


def test_the_same_seed_gives_the_same_sequence():
    for problem, budget in tight_problems(32, 10, 9):
        options = SearchOptions(time_limit_seconds=None, max_rounds=2, seed=7)
        first, second = (within_budget(problem, budget, options) for _ in range(2))
        assert isinstance(first, NoSequence) == isinstance(second, NoSequence)
        if isinstance(first, BudgetedSequence) and isinstance(second, BudgetedSequence):
            assert first.sequence == second.sequence


def test_a_problem_within_the_budget_keeps_its_order():
    for problem, _ in tight_problems(33, 20, 7):
        found = within_budget(problem, simulate_sequence(problem, range(len(problem))).peak)
        assert isinstance(found, BudgetedSequence)
        assert found.sequence == tuple(range(len(problem)))
        assert (found.extra, found.status) == (0, Status.OPTIMAL)


def late_heavy() -> OperatorProblem:
    """An operator that needs much memory, after one whose large output is read at the end."""
    return OperatorProblem(
        (
            ProblemOperator("large", (), (0,), 3),
            ProblemOperator("small", (), (1,), 1),
            ProblemOperator("heavy", (1,), (2,), 1, workspace=6),
            ProblemOperator("end", (0, 1, 2), (3,), 1),
        ),
        (5, 2, 1, 0),
    )


def test_a_fixed_order_ignores_starts_in_another_order():
    free_start = (1, 2, 0, 3)
    found = {order: within_budget(late_heavy(), 9, SearchOptions(order, None, ROUNDS), [free_start]) for order in Order}
    free, fixed = found[Order.FREE], found[Order.FIXED]
    assert isinstance(free, BudgetedSequence)
    assert isinstance(fixed, BudgetedSequence)
    assert (free.sequence, free.extra) == (free_start, 0)
    assert (fixed.sequence, fixed.extra, fixed.lower_bound) == ((0, 1, 2, 0, 3), 3, 3)


def test_a_gap_is_the_distance_to_the_lower_bound():
    """Of 10 units of time 2 are extra, and the bound is 1."""
    found = BudgetedSequence((0, 1, 0), 5, 10, 2, 1, 0.0)
    assert (found.time.gap, found.time.gap_of_extra, found.status) == (0.1, 0.5, Status.FEASIBLE)


def test_without_time_the_search_returns_a_known_sequence():
    stages: list[str] = []
    options = SearchOptions(time_limit_seconds=0.0, progress=stages.append)
    found = within_budget(late_heavy(), 9, options, [(0, 1, 2, 0, 3)])
    assert isinstance(found, BudgetedSequence)
    assert (found.sequence, found.extra, found.lower_bound) == ((0, 1, 2, 0, 3), 3, 0)
    assert stages == ["planning: 50.000 % extra time, lower bound 0.000 %"]


def test_compilation_is_reported_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_moves, "run_all_loops", functools.cache(lambda: None))
    stages: list[str] = []
    for _ in range(2):
        assert compile_loops(stages.append) < 1
    assert stages == [COMPILING]


def true_least_peak(problem: OperatorProblem, order: Order, max_extra: int | None) -> int:
    budget = 0
    while True:
        best = least_extra(problem, budget, order)
        if best is not None and (max_extra is None or best.extra <= max_extra):
            return budget
        budget += 1


@pytest.mark.parametrize("order", list(Order))
def test_the_true_least_peak_is_between_the_floor_and_the_peak_found(order: Order):
    random = Random(51)
    met = tried = 0
    for problem, _ in tight_problems(52, 5, 6):
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
def test_each_optimum_of_the_trade_off_is_between_bound_and_extra_time(order: Order):
    for problem, budget in tight_problems(53, 8, 6):
        budgets = [budget + more for more in range(4)]
        points = trade_off(problem, budgets, SearchOptions(order, None, 2))
        for point in points:
            best = least_extra(problem, point.budget, order)
            assert best is not None
            assert point.best.lower_bound <= best.extra <= point.best.extra
            assert point.best.peak <= point.budget


def test_without_time_a_sequence_of_a_low_peak_gives_one_for_each_budget():
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


OPTIONS = SearchOptions(time_limit_seconds=None)


@pytest.mark.parametrize("seed", range(25))
def test_quick_plans_are_within_their_limits_and_near_the_optimum(seed: int):
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


def test_a_replacement_waits_for_the_last_reader_and_its_own_readers_wait_too():
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
