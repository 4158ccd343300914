from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from onnxgc.budget.improve import compiled_loops, local_moves
from onnxgc.budget.improve.local_moves import LocalMoves, order_of_least_peak
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_problem, random_sequence, tight_problems


def test_the_compiled_simulator_equals_the_plain_one():
    random = Random(21)
    for _ in range(500):
        problem = random_problem(random, 9)
        tables = compiled_loops.tables_of(problem)
        state = compiled_loops.state_for(tables, 30)
        # A state is reused: nothing of the sequence before may be left.
        for _ in range(3):
            sequence = random_sequence(random, problem, 30)
            state.sequence[: len(sequence)] = sequence
            profile = simulate_sequence(problem, sequence)
            budget = random.randint(0, profile.peak)
            peak, overflow = compiled_loops.evaluate(tables, state, len(sequence), budget)
            assert peak == profile.peak
            assert state.memory[: len(sequence)].tolist() == list(profile.timeline)
            assert overflow == sum(max(0, live - budget) for live in profile.timeline)


@pytest.mark.parametrize("free_order", [False, True])
def test_every_sequence_of_the_search_is_valid_and_within_the_budget(free_order: bool):
    random = Random(22)
    found: list[tuple[str, int]] = []
    for problem, budget in tight_problems(23, 40, 9):
        search = LocalMoves(problem, budget, free_order=free_order, seed=random.randrange(1000), effort=400)
        starts = [list(range(len(problem)))]
        if free_order:
            starts.append(random_sequence(random, problem, 3 * len(problem)))
        sequences = list(search.first_sequences(starts, lambda: False))
        best = min((s for _, s in sequences), key=lambda s: simulate_sequence(problem, s).duration, default=None)
        # Past the first cycles, so that each kind of round occurs.
        for _ in range(24):
            improved = search.improve(best)
            if improved is not None:
                sequences.append(("round", improved))
                best = improved
        for how, sequence in sequences:
            assert simulate_sequence(problem, sequence).peak <= budget
            assert free_order or list(dict.fromkeys(sequence)) == list(range(len(problem)))
            found.append((how, len(sequence)))
    assert {how for how, _ in found} == {"repair", "on demand", "round"} | ({"order"} if free_order else set())


def test_the_estimate_that_rejects_a_removal_is_a_lower_bound():
    random = Random(25)
    positive = 0
    for _ in range(300):
        problem = random_problem(random, 9)
        tables = compiled_loops.tables_of(problem)
        state = compiled_loops.state_for(tables, 30)
        sequence = random_sequence(random, problem, 30)
        state.sequence[: len(sequence)] = sequence
        budget = random.randint(0, simulate_sequence(problem, sequence).peak)
        compiled_loops.evaluate(tables, state, len(sequence), budget)
        for position in range(len(sequence)):
            if sequence[position] not in sequence[:position]:
                continue
            least = compiled_loops._overflow_without(tables, state, position, budget, float("inf"))
            timeline = simulate_sequence(problem, sequence[:position] + sequence[position + 1 :]).timeline
            assert least <= sum(max(0, live - budget) for live in timeline)
            positive += least > 0
    assert positive > 50


def test_a_run_on_demand_keeps_to_the_budget():
    """Also if an eviction discards another output of the operator, or a storage that is kept to the end."""
    sequences = 0
    for problem, budget in tight_problems(27, 400, 10):
        tables = compiled_loops.tables_of(problem)
        state = compiled_loops.state_for(tables, 60)
        length = compiled_loops.run_on_demand(tables, state, np.arange(len(problem)), budget, 1.0, 0.3)
        if length:
            assert simulate_sequence(problem, state.sequence[:length].tolist()).peak <= budget
            sequences += 1
    assert sequences > 100


def test_reordering_finds_an_order_of_a_lower_peak_where_there_is_one():
    lower = 0
    for problem, _ in tight_problems(24, 40, 8):
        order = order_of_least_peak(problem, lambda: False)
        assert sorted(order) == list(range(len(problem)))
        before, after = (simulate_sequence(problem, range(len(problem))).peak, simulate_sequence(problem, order).peak)
        best = next(peak for peak in range(after + 1) if _fits_once(problem, peak))
        assert best <= after <= before
        lower += after < before
        assert after <= 1.2 * best
    assert lower > 5


def _fits_once(problem: OperatorProblem, budget: int) -> bool:
    once = replace(problem, operators=tuple(replace(one, may_repeat=False) for one in problem.operators))
    return least_extra(once, budget, Order.FREE) is not None


def forward_and_backward(count: int) -> OperatorProblem:
    forward = [ProblemOperator(f"f{i}", (i - 1,) if i else (), (i,), 1) for i in range(count)]
    backward = [
        ProblemOperator(f"b{i}", (count + i - 1, count - 1 - i), (count + i,), 1) if i else
        ProblemOperator("b0", (count - 1,), (count,), 1)
        for i in range(count)
    ]  # fmt: skip
    return OperatorProblem((*forward, *backward), (1,) * (2 * count), frozenset((2 * count - 1,)))


def test_a_repair_in_many_calls_equals_a_repair_in_one(monkeypatch: pytest.MonkeyPatch):
    problem = forward_and_backward(40)
    repaired = []
    for work in (local_moves._WORK_PER_REPAIR, 0):
        monkeypatch.setattr(local_moves, "_WORK_PER_REPAIR", work)
        repaired.append(LocalMoves(problem, 15, free_order=False, seed=0)._repair(range(80)))
    assert repaired[0] is not None
    assert repaired[0] == repaired[1]
    assert len(repaired[0]) > 100


def test_a_first_sequence_is_found_without_time():
    found = 0
    for problem, budget in tight_problems(23, 40, 9):
        search = LocalMoves(problem, budget, free_order=True, seed=0, is_over=lambda: True)
        sequences: list[list[int]] = []
        for _, sequence in search.first_sequences([range(len(problem))], lambda: bool(sequences)):  # noqa: B023
            sequences.append(sequence)
        assert len(sequences) <= 1
        found += len(sequences)
    assert found > 20


def test_moves_of_runs_end_with_the_time(monkeypatch: pytest.MonkeyPatch):
    moves: list[int] = []
    reorder = compiled_loops.reorder

    def counted(*arguments: Any) -> float:
        moves.append(arguments[5])
        reorder(*arguments)
        return 1.0

    monkeypatch.setattr(compiled_loops, "reorder", counted)
    monkeypatch.setattr(local_moves, "_WORK_PER_ORDER", 1_000)
    problem, budget = next(iter(tight_problems(30, 1, 9)))
    search = LocalMoves(problem, budget, free_order=True, seed=0, is_over=lambda: len(moves) == 3)
    search._reorder(range(len(problem)), budget, 10_000)
    assert len(moves) == 3
    assert sum(moves) < 1_000
