from itertools import pairwise
from random import Random

import numpy as np

from onnxgc.budget.bounds.covering import Gap, sequence_of_gaps
from onnxgc.budget.improve.removable_runs import RemovableRuns, without_needless_repeats
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from tests.budget.random_problems import random_problem, random_sequence, tight_problems


def test_memory_equals_the_simulators_after_every_removal() -> None:
    random = Random(11)
    refused = removed = 0
    for _ in range(300):
        problem = random_problem(random, 9)
        runs = RemovableRuns(problem, random_sequence(random, problem, 25))
        limit = random.randint(0, simulate_sequence(problem, runs.sequence()).peak)
        places = list(range(len(runs.memory) - 1))
        repeats = runs.repeats()
        random.shuffle(repeats)
        for place in repeats:
            before = runs.memory.copy()
            if runs.remove(place, limit):
                places.remove(place)
                removed += 1
                assert np.all((runs.memory <= before) | (runs.memory <= limit))
            else:
                refused += 1
            assert runs.memory[places].tolist() == list(simulate_sequence(problem, runs.sequence()).timeline)
    assert min(refused, removed) > 100


def test_only_necessary_runs_remain() -> None:
    random = Random(12)
    needed = 0
    for problem, budget in tight_problems(13, 300, 9):
        sequence = random_sequence(random, problem, 25)
        before = simulate_sequence(problem, sequence).peak
        left = without_needless_repeats(problem, sequence, budget)
        assert simulate_sequence(problem, left).peak <= max(before, budget)
        if before > budget:
            continue
        seen: set[int] = set()
        for place, index in enumerate(left):
            if index in seen:
                needed += 1
                assert simulate_sequence(problem, [*left[:place], *left[place + 1 :]]).peak > budget
            seen.add(index)
    assert needed > 10


def gaps_of(problem: OperatorProblem) -> list[Gap]:
    gaps = []
    for storage, producer in enumerate(problem.producer):
        uses = [producer, *problem.readers[storage], *([len(problem)] if storage in problem.kept else [])]
        if problem.operators[producer].may_repeat:
            gaps += [Gap(storage, after, before) for after, before in pairwise(uses)]
    return gaps


def test_any_choice_of_gaps_gives_a_sequence_that_bridges_them() -> None:
    random = Random(14)
    bridged = 0
    for _ in range(300):
        problem = random_problem(random, 9)
        gaps = [gap for gap in gaps_of(problem) if random.random() < 0.4]
        sequence = sequence_of_gaps(problem, gaps)
        simulate_sequence(problem, sequence)
        assert list(dict.fromkeys(sequence)) == list(range(len(problem)))
        for gap in gaps:
            first = sequence.index(gap.after)
            last = sequence.index(gap.before) if gap.before < len(problem) else len(sequence)
            assert problem.producer[gap.storage] in sequence[first + 1 : last]
            bridged += 1
    assert bridged > 500
