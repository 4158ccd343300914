"""The compiled judge against the plain one, and what the search of neighbourhoods returns."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from onnxgc.budget.improve import kernels, local_moves
from onnxgc.budget.improve.local_moves import LocalMoves, order_of_least_peak
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.planning.order import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_problem, random_sequence, tight_problems


def test_it_holds_what_the_judge_says() -> None:
    random = Random(21)
    for _ in range(500):
        problem = random_problem(random, 9)
        tables = kernels.tables_of(problem)
        state = kernels.state_for(tables, 30)
        # A state is used again and again: nothing of the sequence before may be left.
        for _ in range(3):
            sequence = random_sequence(random, problem, 30)
            state.sequence[: len(sequence)] = sequence
            profile = simulate_sequence(problem, sequence)
            budget = random.randint(0, profile.peak)
            peak, overflow = kernels.evaluate(tables, state, len(sequence), budget)
            assert peak == profile.peak
            assert state.memory[: len(sequence)].tolist() == list(profile.timeline)
            assert overflow == sum(max(0, held - budget) for held in profile.timeline)


@pytest.mark.parametrize("free_order", [False, True])
def test_all_that_the_search_finds_is_valid_and_within_the_budget(
    free_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_moves, "_MOST_EFFORT", 400)
    random = Random(22)
    found: list[tuple[str, int]] = []
    for problem, budget in tight_problems(23, 40, 9):
        search = LocalMoves(problem, budget, free_order=free_order, seed=random.randrange(1000))
        starts = [list(range(len(problem)))]
        if free_order:
            starts.append(random_sequence(random, problem, 3 * len(problem)))
        sequences = list(search.first(starts, lambda: False))
        best = min(
            (s for _, s in sequences), key=lambda s: simulate_sequence(problem, s).duration, default=None
        )
        # Past the first cycles, so that each kind of round has its turn.
        for _ in range(24):
            improved = search.improved(best)
            if improved is not None:
                sequences.append(("round", improved))
                best = improved
        for how, sequence in sequences:
            assert simulate_sequence(problem, sequence).peak <= budget
            assert free_order or list(dict.fromkeys(sequence)) == list(range(len(problem)))
            found.append((how, len(sequence)))
    assert {how for how, _ in found} == {"repair", "on demand", "round"} | (
        {"order"} if free_order else set()
    )


def test_what_is_turned_down_unseen_would_hold_at_least_as_much() -> None:
    random = Random(25)
    told = 0
    for _ in range(300):
        problem = random_problem(random, 9)
        tables = kernels.tables_of(problem)
        state = kernels.state_for(tables, 30)
        sequence = random_sequence(random, problem, 30)
        state.sequence[: len(sequence)] = sequence
        budget = random.randint(0, simulate_sequence(problem, sequence).peak)
        kernels.evaluate(tables, state, len(sequence), budget)
        for place in range(len(sequence)):
            if sequence[place] not in sequence[:place]:
                continue
            least = kernels._overflow_without(tables, state, place, budget, float("inf"))
            timeline = simulate_sequence(problem, sequence[:place] + sequence[place + 1 :]).timeline
            assert least <= sum(max(0, held - budget) for held in timeline)
            told += least > 0
    assert told > 50


def test_an_order_of_a_lower_peak_is_found_where_there_is_one() -> None:
    lower = 0
    for problem, _ in tight_problems(24, 40, 8):
        order = order_of_least_peak(problem, lambda: False)
        assert sorted(order) == list(range(len(problem)))
        before, after = (
            simulate_sequence(problem, range(len(problem))).peak,
            simulate_sequence(problem, order).peak,
        )
        best = next(peak for peak in range(after + 1) if _fits_once(problem, peak))
        assert best <= after <= before
        lower += after < before
        assert after <= 1.2 * best
    assert lower > 5


def _fits_once(problem: OperatorProblem, budget: int) -> bool:
    once = replace(problem, operations=tuple(replace(one, may_repeat=False) for one in problem.operations))
    return least_extra(once, budget, Order.FREE) is not None


def forth_and_back(count: int) -> OperatorProblem:
    """A chain, and another one back that reads what the first wrote, all of size and duration 1."""
    forth = [ProblemOperator(f"f{i}", (i - 1,) if i else (), (i,), 1) for i in range(count)]
    back = [
        ProblemOperator(f"b{i}", (count + i - 1, count - 1 - i), (count + i,), 1) if i else
        ProblemOperator("b0", (count - 1,), (count,), 1)
        for i in range(count)
    ]  # fmt: skip
    return OperatorProblem((*forth, *back), (1,) * (2 * count), frozenset((2 * count - 1,)))


def test_a_repair_in_many_calls_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = forth_and_back(40)
    repaired = []
    for work in (local_moves._WORK_A_REPAIR, 0):
        monkeypatch.setattr(local_moves, "_WORK_A_REPAIR", work)
        repaired.append(LocalMoves(problem, 15, free_order=False, seed=0)._repaired(range(80)))
    assert repaired[0] is not None
    assert repaired[0] == repaired[1]
    assert len(repaired[0]) > 100


def test_without_time_a_first_sequence_is_found_all_the_same() -> None:
    found = 0
    for problem, budget in tight_problems(23, 40, 9):
        search = LocalMoves(problem, budget, free_order=True, seed=0, is_over=lambda: True)
        sequences: list[list[int]] = []
        for _, sequence in search.first([range(len(problem))], lambda: bool(sequences)):  # noqa: B023
            sequences.append(sequence)
        assert len(sequences) <= 1
        found += len(sequences)
    assert found > 20


def test_runs_are_moved_no_longer_than_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    reorder = kernels.reorder

    def counted(*arguments: Any) -> float:
        moves.append(arguments[5])
        reorder(*arguments)
        return 1.0

    monkeypatch.setattr(kernels, "reorder", counted)
    monkeypatch.setattr(local_moves, "_WORK_AN_ORDER", 1_000)
    problem, budget = next(iter(tight_problems(30, 1, 9)))
    search = LocalMoves(problem, budget, free_order=True, seed=0, is_over=lambda: len(moves) == 3)
    search._reordered(range(len(problem)), budget, 10_000)
    assert len(moves) == 3
    assert sum(moves) < 1_000
