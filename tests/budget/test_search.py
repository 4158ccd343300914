import functools

import pytest

from onnxgc.budget.improve import local_moves
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.budget.search import COMPILING, BudgetedSequence, NoSequence, SearchOptions, compile_loops, within_budget
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import Status
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import tight_problems

ROUNDS = 4


@pytest.mark.parametrize("order", list(Order))
def test_peak_is_within_the_budget_and_the_optimum_between_bound_and_extra_time(order: Order) -> None:
    found_best = found_any = 0
    for problem, budget in tight_problems(31, 80, 7):
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
    assert found_best > 0.9 * found_any > 30


def test_the_same_seed_gives_the_same_sequence() -> None:
    for problem, budget in tight_problems(32, 10, 9):
        options = SearchOptions(time_limit_seconds=None, max_rounds=2, seed=7)
        first, second = (within_budget(problem, budget, options) for _ in range(2))
        assert isinstance(first, NoSequence) == isinstance(second, NoSequence)
        if isinstance(first, BudgetedSequence) and isinstance(second, BudgetedSequence):
            assert first.sequence == second.sequence


def test_a_problem_within_the_budget_keeps_its_order() -> None:
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


def test_a_fixed_order_ignores_starts_in_another_order() -> None:
    free_start = (1, 2, 0, 3)
    found = {order: within_budget(late_heavy(), 9, SearchOptions(order, None, ROUNDS), [free_start]) for order in Order}
    free, fixed = found[Order.FREE], found[Order.FIXED]
    assert isinstance(free, BudgetedSequence)
    assert isinstance(fixed, BudgetedSequence)
    assert (free.sequence, free.extra) == (free_start, 0)
    assert (fixed.sequence, fixed.extra, fixed.lower_bound) == ((0, 1, 2, 0, 3), 3, 3)


def test_a_gap_is_the_distance_to_the_lower_bound() -> None:
    """Of 10 units of time 2 are extra, and the bound is 1."""
    found = BudgetedSequence((0, 1, 0), 5, 10, 2, 1, 0.0)
    assert (found.time.gap, found.time.gap_of_extra, found.status) == (0.1, 0.5, Status.FEASIBLE)


def test_without_time_the_search_returns_a_known_sequence() -> None:
    stages: list[str] = []
    options = SearchOptions(time_limit_seconds=0.0, progress=stages.append)
    found = within_budget(late_heavy(), 9, options, [(0, 1, 2, 0, 3)])
    assert isinstance(found, BudgetedSequence)
    assert (found.sequence, found.extra, found.lower_bound) == ((0, 1, 2, 0, 3), 3, 0)
    assert stages == ["planning: 50.000 % extra time, lower bound 0.000 %"]


def test_compilation_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_moves, "run_all_loops", functools.cache(lambda: None))
    stages: list[str] = []
    for _ in range(2):
        assert compile_loops(stages.append) < 1
    assert stages == [COMPILING]
