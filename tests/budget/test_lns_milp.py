from random import Random
from threading import Event, Timer
from time import perf_counter

from onnxgc.budget.improve.lns_milp import GroupedSequence, PartSearch, RetentionProgram
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.budget.search import BudgetedSequence, SearchOptions, within_budget
from onnxgc.planning.order_choice import Order
from tests.budget.exhaustive import least_extra
from tests.budget.random_problems import random_sequence, tight_problems

STEPS = {order: SearchOptions(order, time_limit_seconds=None, max_rounds=0) for order in Order}


def chains(count: int) -> OperatorProblem:
    operators = [ProblemOperator(f"f{k}", (k - 1,) if k else (), (k,), 1 + 9 * (k % 2)) for k in range(count)]
    for k in range(count):
        reads = (count - 1 - k, count + k - 1) if k else (count - 1,)
        operators.append(ProblemOperator(f"b{k}", reads, (count + k,), 2))
    return OperatorProblem(tuple(operators), tuple((4, 7, 5, 6)[k % 4] for k in range(2 * count)))


def test_a_grouped_sequence_is_no_longer():
    random = Random(41)
    for problem, _ in tight_problems(42, 300, 9):
        sequence = random_sequence(random, problem, 3 * len(problem))
        grouped = GroupedSequence(problem, sequence)
        in_groups = grouped.sequence(grouped.repeats)
        assert list(dict.fromkeys(in_groups)) == list(dict.fromkeys(sequence))
        assert simulate_sequence(problem, in_groups).duration <= simulate_sequence(problem, sequence).duration
        again = GroupedSequence(problem, in_groups)
        assert again.sequence(again.repeats) == in_groups
        assert again.repeats == grouped.repeats


def test_sequences_of_a_program_are_valid_within_the_budget_and_mostly_optimal():
    found_best = found_any = 0
    for problem, budget in tight_problems(43, 150, 7):
        first = within_budget(problem, budget, STEPS[Order.FIXED])
        if not isinstance(first, BudgetedSequence) or not first.extra:
            continue
        grouped = GroupedSequence(problem, first.sequence)
        everything = range(len(problem))
        program = RetentionProgram(grouped, budget, everything, grouped.possible(everything))
        found, _ = program.improve(60.0)
        extra = first.extra
        if found is not None:
            profile = simulate_sequence(problem, found)
            assert profile.peak <= budget
            assert list(dict.fromkeys(found)) == list(range(len(problem)))
            assert profile.duration < first.duration
            extra = profile.duration - problem.duration
        best = least_extra(problem, budget, Order.FIXED)
        assert best is not None
        assert extra >= best.extra
        found_any += 1
        found_best += extra == best.extra
    assert found_best > 0.95 * found_any > 30


def test_a_part_leaves_the_rest_unchanged():
    count = 20
    problem = chains(count)
    # The whole forward is recomputed before each operator of backward.
    naive = [*range(count), count]
    for k in range(1, count):
        naive += [*range(count - k), count + k]
    budget = simulate_sequence(problem, naive).peak + 10
    grouped = GroupedSequence(problem, naive)
    for begin in range(0, count, 4):
        free = range(begin, begin + 6)
        found, _ = RetentionProgram(grouped, budget, free, grouped.possible(free)).improve(60.0)
        assert found is not None
        profile, after = simulate_sequence(problem, found), GroupedSequence(problem, found)
        assert profile.peak <= budget
        assert profile.duration < simulate_sequence(problem, naive).duration
        kept, before = ({run for run in one.repeats if run[1] not in free} for one in (after, grouped))
        assert kept == before


def test_sequences_of_a_part_keep_to_a_budget_without_slack():
    random = Random(46)
    shorter = 0
    for problem, _ in tight_problems(47, 400, 9):
        sequence = random_sequence(random, problem, 3 * len(problem))
        grouped = GroupedSequence(problem, sequence)
        budget = simulate_sequence(problem, grouped.sequence(grouped.repeats)).peak
        free = set(random.sample(range(len(problem)), len(problem) // 2))
        found, _ = RetentionProgram(grouped, budget, free, grouped.possible(free)).improve(60.0)
        if found is not None:
            assert simulate_sequence(problem, found).peak <= budget
            shorter += 1
    assert shorter > 50


def test_a_repeat_needs_inputs_that_are_live_in_the_rest():
    problem = OperatorProblem(
        (
            ProblemOperator("input", (), (0,), 1, may_repeat=False),
            ProblemOperator("cheap", (0,), (1,), 1),
            ProblemOperator("slow", (), (2,), 9),
            ProblemOperator("heavy", (), (3,), 1, workspace=8),
            ProblemOperator("end", (1, 2, 3), (4,), 1),
        ),
        (6, 4, 4, 1, 0),
    )
    # `cheap` could be rerun in place of `slow`, if its input were kept.
    grouped = GroupedSequence(problem, [0, 1, 2, 3, 2, 4])
    found = {}
    for free in ((1, 2), (0, 1, 2)):
        program = RetentionProgram(grouped, 14, free, grouped.possible(free))
        found[free] = program.improve(60.0)
    assert found == {(1, 2): (None, True), (0, 1, 2): (None, True)}


def test_the_same_seed_gives_the_same_parts():
    problem = chains(40)
    budget = simulate_sequence(problem, range(len(problem))).peak // 3
    first = within_budget(problem, budget, SearchOptions(Order.FIXED, None, 0))
    assert isinstance(first, BudgetedSequence)

    def found() -> list[list[int] | None]:
        parts = PartSearch(problem, budget, seed=3)
        return [parts.improve(first.sequence, float("inf")) for _ in range(3)]

    assert found() == found()


def test_a_program_ends_once_stop_is_set():
    problem = chains(160)
    budget = simulate_sequence(problem, range(len(problem))).peak // 5
    first = within_budget(problem, budget, SearchOptions(Order.FIXED, None, 0))
    assert isinstance(first, BudgetedSequence)
    grouped = GroupedSequence(problem, first.sequence)
    everything = range(len(problem))
    program = RetentionProgram(grouped, budget, everything, grouped.possible(everything))
    stop = Event()
    Timer(0.1, stop.set).start()
    started = perf_counter()
    program.improve(600.0, None, stop)
    assert perf_counter() - started < 60
