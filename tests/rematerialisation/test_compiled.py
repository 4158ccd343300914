"""The compiled judge against the plain one, and what the search of neighbourhoods returns."""

from random import Random

import pytest

from onnxgc.rematerialisation import compiled, neighbourhoods
from onnxgc.rematerialisation.neighbourhoods import Neighbourhoods
from onnxgc.rematerialisation.problem import judge
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
        sequences = list(search.first(starts, lambda: False, lambda: False))
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
    assert {how for how, _ in found} == {"repair", "on demand", "round"} | ({"order"} if free_order else set())
