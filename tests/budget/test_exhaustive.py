from itertools import product
from random import Random

from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_problem, tight_problems

MAX_RUNS = 7


def test_its_sequences_have_the_time_and_the_peak_that_it_reports() -> None:
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


def test_no_enumerated_sequence_is_better() -> None:
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
