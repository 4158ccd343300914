"""No bound exceeds the optimum; problems on which one did are kept here."""

from dataclasses import replace

import pytest

from onnxgc.budget.bounds import covering
from onnxgc.budget.bounds.covering import CoveringBound, fixed_order_bound, free_order_bound
from onnxgc.budget.bounds.moments import MomentBound
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, settled, simulate_sequence
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import Optimum, least_extra
from tests.budget.random_problems import tight_problems

SECONDS = 10.0
BOUNDS = {Order.FREE: free_order_bound, Order.FIXED: fixed_order_bound}


def holds(bound: CoveringBound, optimum: Optimum | None) -> bool:
    if optimum is None:
        return True
    return bound.impossible_at is None and bound.extra <= optimum.extra


def assert_no_bound_exceeds_the_optimum(problem: OperatorProblem, budget: int) -> dict[Order, Optimum | None]:
    best = {order: least_extra(problem, budget, order) for order in Order}
    for order, bound in BOUNDS.items():
        assert holds(bound(problem, budget, SECONDS), best[order]), (order, problem, budget)
    assert floor_of_problem(problem).size <= budget or best[Order.FREE] is None
    return best


def extras_and_bounds(problem: OperatorProblem, budget: int) -> dict[Order, tuple[int, int]]:
    found = {}
    for order, bound in BOUNDS.items():
        best = least_extra(problem, budget, order)
        assert best is not None
        found[order] = best.extra, bound(problem, budget, SECONDS).extra
    return found


def test_no_bound_exceeds_the_optimum_and_most_are_tight() -> None:
    """Bounds of 0 would pass the other tests."""
    met, with_extra, refused = (dict.fromkeys(Order, 0) for _ in range(3))
    for problem, budget in (*tight_problems(5, 120, 7), *tight_problems(4, 8, 9)):
        for order, optimum in assert_no_bound_exceeds_the_optimum(problem, budget).items():
            found = BOUNDS[order](problem, budget, SECONDS)
            if optimum is None:
                refused[order] += found.impossible_at is not None
            elif optimum.extra:
                with_extra[order] += 1
                met[order] += found.extra == optimum.extra
    for order in Order:
        assert refused[order] > 8
        assert met[order] > 0.55 * with_extra[order] > 16


@pytest.mark.parametrize("order", Order)
def test_no_bound_of_moments_exceeds_the_optimum_and_most_meet_it(order: Order) -> None:
    met = {"covering": 0, "moments": 0}
    problems = 0
    for problem, budget in tight_problems(6, 200, 7):
        best = least_extra(problem, budget, order)
        if best is None:
            continue
        # The bound does not depend on the quality of the given sequence.
        for given in (best.extra, 2 * best.extra + 3):
            bound = 0
            for finding in MomentBound(problem, budget, order).findings(given, SECONDS):
                assert finding.extra <= best.extra, (problem, budget)
                bound = max(bound, finding.extra)
                if finding.optimal:
                    assert finding.sequence is not None
                    profile = simulate_sequence(problem, settled(problem, finding.sequence))
                    assert profile.peak <= budget
                    assert profile.duration - problem.duration == best.extra == bound
        covered = BOUNDS[order](problem, budget, SECONDS).extra
        met["covering"] += covered == best.extra
        met["moments"] += max(covered, bound) == best.extra
        problems += 1
    assert met["covering"] < met["moments"] > 0.85 * problems


@pytest.mark.parametrize("max_rows, small_share", [(1, 20_000), (2, 4), (160, 4), (160, 8)])
def test_no_bound_exceeds_the_optimum_with_few_moments_or_many_negligible_storages(
    max_rows: int, small_share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covering, "MAX_ROWS", max_rows)
    monkeypatch.setattr(covering, "SMALL_SHARE", small_share)
    for problem, budget in tight_problems(10 * max_rows + small_share, 60, 7):
        assert_no_bound_exceeds_the_optimum(problem, budget)


def idle_output() -> OperatorProblem:
    """Of three outputs the second is unread; it is written where the third is.

    The first run may omit both; the second run, at a lower level of memory, writes both.
    """
    return OperatorProblem(
        (
            ProblemOperator("beside", (), (0,), 1, may_repeat=False),
            ProblemOperator("three", (), (1, 2, 3), 5, min_writes=1),
            ProblemOperator("first", (0, 1), (4,), 1),
            ProblemOperator("third", (3, 4), (5,), 1),
        ),
        (5, 1, 4, 1, 1, 0),
    )


def test_an_unread_output_is_omitted_with_the_one_after_it() -> None:
    for budget, extra in ((7, 5), (8, 5), (9, 5), (10, 5), (11, 0)):
        best = assert_no_bound_exceeds_the_optimum(idle_output(), budget)[Order.FIXED]
        assert best is not None
        assert best.extra == extra


def one_run_for_two_moments() -> OperatorProblem:
    """At the first heavy operator `r`, or `s` computed from it, is live or recomputed; at the second, `s`.

    Where both are discarded before, one more run of each serves both moments.
    """
    return OperatorProblem(
        (
            ProblemOperator("r", (), (0, 1), 10),
            ProblemOperator("s", (0,), (2,), 1),
            ProblemOperator("q", (2,), (3,), 1, may_repeat=False),
            ProblemOperator("heavy", (1,), (4,), 1, workspace=9, may_repeat=False),
            ProblemOperator("heavy too", (3, 4), (5,), 1, workspace=9, may_repeat=False),
            ProblemOperator("end", (2, 5), (6,), 1),
        ),
        (2, 1, 2, 1, 1, 1, 1),
    )


def test_a_storage_and_its_dependent_may_share_a_run() -> None:
    for budget, extra in ((12, 11), (13, 11), (14, 0)):
        best = assert_no_bound_exceeds_the_optimum(one_run_for_two_moments(), budget)[Order.FREE]
        assert best is not None
        assert best.extra == extra
    assert free_order_bound(one_run_for_two_moments(), 12, SECONDS).extra == 11


def test_one_run_may_serve_readers_in_any_order() -> None:
    """Two heavy operators, each before one reader and neither before the other: one more run serves both."""
    problem = OperatorProblem(
        (
            ProblemOperator("s", (), (0, 1), 7),
            ProblemOperator("heavy", (1,), (2,), 1, workspace=9, may_repeat=False),
            ProblemOperator("after heavy", (0, 2), (3,), 1, may_repeat=False),
            ProblemOperator("first", (0,), (4,), 1, may_repeat=False),
            ProblemOperator("heavy too", (4,), (5,), 1, workspace=9, may_repeat=False),
            ProblemOperator("after both", (0, 3, 5), (6,), 1),
        ),
        (3, 0, 0, 0, 0, 0, 0),
    )
    assert extras_and_bounds(problem, 9) == {Order.FREE: (7, 7), Order.FIXED: (14, 14)}


def test_a_live_input_serves_the_recomputation_of_an_omitted_output() -> None:
    """The second output is omitted, and its operator is rerun on an input that stayed live."""
    problem = OperatorProblem(
        (
            ProblemOperator("beside", (), (0,), 1, may_repeat=False),
            ProblemOperator("slow", (0,), (1,), 10),
            ProblemOperator("two", (1,), (2, 3), 1, min_writes=1),
            ProblemOperator("middle", (0, 2), (4,), 1),
            ProblemOperator("end", (3, 4), (5,), 1),
        ),
        (5, 4, 0, 3, 0, 0),
    )
    assert extras_and_bounds(problem, 11) == {Order.FREE: (1, 1), Order.FIXED: (1, 1)}


def test_an_input_overwritten_in_place_and_read_later_is_live_or_recomputed() -> None:
    problem = OperatorProblem(
        (
            ProblemOperator("s", (), (0,), 3),
            ProblemOperator("over", (0,), (1,), 1, workspace=2, in_place=0, may_repeat=False),
            ProblemOperator("both", (0, 1), (2,), 1),
        ),
        (4, 4, 0),
    )
    assert extras_and_bounds(problem, 9) == {Order.FREE: (3, 3), Order.FIXED: (3, 3)}


def test_durations_beyond_the_precision_of_floating_point() -> None:
    for number, (problem, budget) in enumerate(tight_problems(6, 100, 6)):
        operators = [
            replace(operator, duration=operator.duration * (10**15 + number) + index)
            for index, operator in enumerate(problem.operators)
        ]
        assert_no_bound_exceeds_the_optimum(replace(problem, operators=tuple(operators)), budget)
