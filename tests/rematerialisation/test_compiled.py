"""The compiled judge against the plain one, and what the search of neighbourhoods returns."""

from dataclasses import replace
from random import Random

import pytest

from onnxgc.rematerialisation import compiled, neighbourhoods
from onnxgc.rematerialisation.neighbourhoods import Neighbourhoods, order_of_least_peak
from onnxgc.rematerialisation.problem import OperatorProblem, judge
from onnxgc.rematerialisation.search import Order
from tests.rematerialisation.exhaustive import least_extra
from tests.rematerialisation.random_problems import random_problem, random_sequence, tight_problems


def test_it_holds_what_the_judge_says() -> None:
    random = Random(21)
    for _ in range(500):
        problem = random_problem(random, 9)
        tables = compiled.tables_of(problem)
        state = compiled.state_for(tables, 30)
        # A state is used again and again: nothing of the sequence before may be left.
        for _ in range(3):
            sequence = random_sequence(random, problem, 30)
            state.sequence[: len(sequence)] = sequence
            profile = judge(problem, sequence)
            budget = random.randint(0, profile.peak)
            peak, overflow = compiled.evaluate(tables, state, len(sequence), budget)
            assert peak == profile.peak
            assert state.memory[: len(sequence)].tolist() == list(profile.timeline)
            assert overflow == sum(max(0, held - budget) for held in profile.timeline)


@pytest.mark.parametrize("free_order", [False, True])
def test_all_that_the_search_finds_is_valid_and_within_the_budget(
    free_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbourhoods, "_MOST_EFFORT", 400)
    random = Random(22)
    found: list[tuple[str, int]] = []
    for problem, budget in tight_problems(23, 40, 9):
        search = Neighbourhoods(problem, budget, free_order=free_order, seed=random.randrange(1000))
        starts = [list(range(len(problem)))]
        if free_order:
            starts.append(random_sequence(random, problem, 3 * len(problem)))
        sequences = list(search.first(starts, lambda: False))
        best = min((s for _, s in sequences), key=lambda s: judge(problem, s).duration, default=None)
        # Past the first cycles, so that each kind of round has its turn.
        for _ in range(24):
            improved = search.improved(best)
            if improved is not None:
                sequences.append(("round", improved))
                best = improved
        for how, sequence in sequences:
            assert judge(problem, sequence).peak <= budget
            assert free_order or list(dict.fromkeys(sequence)) == list(range(len(problem)))
            found.append((how, len(sequence)))
    assert {how for how, _ in found} == {"repair", "on demand", "round"} | (
        {"order"} if free_order else set()
    )


def test_an_order_of_a_lower_peak_is_found_where_there_is_one() -> None:
    lower = 0
    for problem, _ in tight_problems(24, 40, 8):
        order = order_of_least_peak(problem, lambda: False)
        assert sorted(order) == list(range(len(problem)))
        before, after = judge(problem, range(len(problem))).peak, judge(problem, order).peak
        best = next(peak for peak in range(after + 1) if _fits_once(problem, peak))
        assert best <= after <= before
        lower += after < before
        assert after <= 1.2 * best
    assert lower > 5


def _fits_once(problem: OperatorProblem, budget: int) -> bool:
    once = replace(problem, operations=tuple(replace(one, may_repeat=False) for one in problem.operations))
    return least_extra(once, budget, Order.FREE) is not None
