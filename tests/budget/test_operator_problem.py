from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from onnxgc.budget.bounds.covering import Gap, sequence_of_gaps
from onnxgc.budget.improve.removable_runs import RemovableRuns, without_needless_repeats
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.errors import GraphFileError
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_problem, random_sequence, tight_problems

MAKE = ProblemOperator("make", (), (0,), 1)


def test_a_copy_is_live_from_its_run_to_its_last_reader():
    problem = OperatorProblem(
        (MAKE, ProblemOperator("use", (0,), (1,), 2, workspace=3), ProblemOperator("end", (0, 1), (2,), 4)),
        (10, 5, 1),
        frozenset({2}),
    )
    assert simulate_sequence(problem, [0, 1, 2]).timeline == (10, 18, 16)
    profile = simulate_sequence(problem, [0, 1, 0, 2, 1])
    assert profile.timeline == (10, 18, 15, 16, 19), "the last run reads the second copy too"
    assert (profile.duration, profile.peak) == (10, 19)


def test_an_operator_in_place_reuses_memory_where_the_inputs_lifetime_ends():
    problem = OperatorProblem(
        (MAKE, ProblemOperator("over", (0,), (1,), 1, in_place=0), ProblemOperator("again", (0,), (2,), 1, in_place=0)),
        (10, 10, 10),
    )
    assert simulate_sequence(problem, [0, 1, 2]).timeline == (10, 20, 10)
    assert simulate_sequence(problem, [0, 1, 0, 2]).timeline == (10, 10, 10, 10)


def test_trailing_outputs_are_omitted_where_nothing_reads_them():
    problem = OperatorProblem(
        (ProblemOperator("three", (), (0, 1, 2), 1, min_writes=1), ProblemOperator("use", (2,), (3,), 1)),
        (1, 10, 100, 0),
        frozenset({0}),
    )
    assert simulate_sequence(problem, [0, 1]).timeline == (111, 101)
    assert simulate_sequence(problem, [0, 0, 1, 0]).timeline == (1, 111, 100, 1)


def test_the_latest_copy_of_a_kept_storage_is_live_to_the_end():
    problem = OperatorProblem((MAKE, ProblemOperator("other", (), (1,), 1)), (10, 1), frozenset({0}))
    assert simulate_sequence(problem, [0, 1]).timeline == (10, 11)
    assert simulate_sequence(problem, [0, 1, 0]).timeline == (10, 1, 10)


@pytest.mark.parametrize(
    "operators, sizes, message",
    [
        ((ProblemOperator("a", (0,), (1,), 1),), (1, 1), "'a' reads a storage that no earlier operator writes"),
        ((MAKE, ProblemOperator("a", (), (0,), 1)), (1,), "'a' writes a storage that another operator writes"),
        ((MAKE,), (1, 1), "no operator writes storage 1"),
        ((ProblemOperator("a", (), (0,), -1),), (1,), "'a' has a negative duration"),
        ((MAKE,), (-1,), "a size is negative"),
        (
            (MAKE, ProblemOperator("a", (), (1,), 1, in_place=0)),
            (1, 1),
            "'a' works in place on a storage that it does not",
        ),
        ((MAKE, ProblemOperator("a", (0,), (1,), 1, in_place=0)), (1, 2), "another size"),
    ],
)
def test_malformed_problems_raise(operators: tuple[ProblemOperator, ...], sizes: tuple[int, ...], message: str):
    with pytest.raises(GraphFileError, match=message):
        OperatorProblem(operators, sizes)


@pytest.mark.parametrize(
    "sequence, message",
    [
        ([1, 0], "'once' runs before its inputs at step 0"),
        ([0, 1, 1], "'once' must not run twice"),
        ([0], "'once' never runs"),
    ],
)
def test_invalid_sequences_raise(sequence: list[int], message: str):
    problem = OperatorProblem((MAKE, ProblemOperator("once", (0,), (1,), 1, may_repeat=False)), (1, 1))
    with pytest.raises(ValueError, match=message):
        simulate_sequence(problem, sequence)


MAX_RUNS = 7


def test_its_sequences_have_the_time_and_the_peak_that_it_reports():
    for problem, budget in tight_problems(1, 150, 7):
        extras = []
        for order in Order:
            found = least_extra(problem, budget, order)
            if found is None:
                continue
            profile = simulate_sequence(problem, found.sequence)
            assert profile.peak <= budget
            assert profile.duration - problem.duration == found.extra
            first_runs = list(dict.fromkeys(found.sequence))
            assert order is Order.FREE or first_runs == sorted(first_runs)
            extras.append(found.extra)
        assert extras == sorted(extras), "a free order includes the fixed one"


def test_no_enumerated_sequence_is_better():
    random = Random(2)
    for _ in range(40):
        problem = random_problem(random, 4)
        best: dict[tuple[Order, int], int] = {}
        for length in range(len(problem), MAX_RUNS + 1):
            for sequence in product(range(len(problem)), repeat=length):
                try:
                    profile = simulate_sequence(problem, sequence)
                except ValueError:
                    continue
                first_runs = list(dict.fromkeys(sequence))
                orders = list(Order) if first_runs == sorted(first_runs) else [Order.FREE]
                for order in orders:
                    extra = profile.duration - problem.duration
                    known = best.get((order, profile.peak), extra)
                    best[order, profile.peak] = min(known, extra)
        for order, budget in best:
            enumerated = min(extra for (o, peak), extra in best.items() if o is order and peak <= budget)
            found = least_extra(problem, budget, order)
            assert found is not None
            assert found.extra <= enumerated
            if len(found.sequence) <= MAX_RUNS:
                assert found.extra == enumerated


def test_memory_equals_the_simulators_after_every_removal():
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


def test_only_necessary_runs_remain():
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


def test_any_choice_of_gaps_gives_a_sequence_that_bridges_them():
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
