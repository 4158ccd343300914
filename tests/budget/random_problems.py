"""Small random problems of many shapes, and budgets that need recomputation."""

from collections.abc import Iterator
from random import Random

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence

MAX_STORAGES = 10


def random_problem(random: Random, max_operators: int) -> OperatorProblem:
    """A problem with several outputs, operators in place, workspaces, optional outputs and kept storages."""
    possible_sizes = random.choice([(1,), (0, 1, 2, 3), (1, 1, 1, 8), tuple(range(1, 10)), (0, 1, 2, 4, 8)])
    durations = random.choice([(1,), (0, 1), (1, 10, 100), tuple(range(6)), tuple(range(1, 21))])
    reading = random.choice(["chain", "shared", "unread", "forward and backward", "any"])
    several_outputs, optional_outputs = random.choice([0, 0.2, 0.5]), random.choice([0, 0.3, 0.8])
    in_place_share, workspace, once = (random.choice(c) for c in ([0, 0.3, 0.9], [0, 0.3, 0.6], [0, 0, 0.15, 0.3]))
    kept_ends, kept_share = random.choice([0, 0.5, 1]), random.choice([0, 0, 0.15])
    count = random.randint(3, max_operators)
    sizes: list[int] = []
    read: set[int] = set()
    operators: list[ProblemOperator] = []
    for index in range(count):
        reads = _reads(random, reading, len(sizes), read, index / count)
        read.update(reads)
        room = MAX_STORAGES - len(sizes) - (count - index)
        outputs = 1 + sum(random.random() < several_outputs for _ in range(max(0, min(2, room))))
        writes = tuple(range(len(sizes), len(sizes) + outputs))
        sizes.extend(random.choice(possible_sizes) for _ in writes)
        in_place = random.choice(reads) if reads and random.random() < in_place_share else None
        if in_place is not None:
            sizes[writes[0]] = sizes[in_place]
        operators.append(
            ProblemOperator(
                f"o{index}",
                reads,
                writes,
                random.choice(durations),
                random.randint(1, 9) if random.random() < workspace else 0,
                in_place,
                may_repeat=random.random() >= once,
                min_writes=random.randint(1, outputs) if random.random() < optional_outputs else outputs,
            )
        )
    kept = [s for s in range(len(sizes)) if random.random() < (kept_share if s in read else kept_ends)]
    return OperatorProblem(tuple(operators), tuple(sizes), frozenset(kept))


def _reads(random: Random, reading: str, count: int, read: set[int], passed: float) -> tuple[int, ...]:
    """The reads of an operator among `count` storages; `passed` is the share of the operators before it."""
    if not count:
        return ()
    found = [count - 1]
    if reading == "chain" and random.random() < 0.4:
        found.append(random.randrange(count))
    if reading == "shared":
        found = [random.randrange(min(3, count))]
        found += [random.randrange(count)] if random.random() < 0.5 else []
    if reading == "forward and backward" and passed >= 0.5:
        found.append(max(0, round(2 * (1 - passed) * count) - random.randint(0, 1)))
    if reading == "unread":
        unread = [storage for storage in range(count) if storage not in read]
        found = random.sample(unread, min(len(unread), random.randint(1, 2)))
        found += [random.randrange(count)] if random.random() < 0.5 else []
    if reading == "any":
        found = random.sample(range(count), min(count, random.randint(0, 3)))
    return tuple(dict.fromkeys(min(storage, count - 1) for storage in found))


def tight_problems(seed: int, count: int, max_operators: int) -> Iterator[tuple[OperatorProblem, int]]:
    """`count` problems, each with a budget below the peak of its order and above every working set."""
    random = Random(seed)
    while count:
        problem = random_problem(random, max_operators)
        least = max(problem.working_set(index) for index in range(len(problem)))
        peak = simulate_sequence(problem, range(len(problem))).peak
        if least < peak:
            count -= 1
            yield problem, random.randrange(least, peak)


def random_sequence(random: Random, problem: OperatorProblem, max_runs: int) -> list[int]:
    waiting = list(range(len(problem)))
    made: set[int] = set()
    sequence: list[int] = []
    while waiting:
        ready = [index for index in waiting if made.issuperset(problem.operators[index].reads)]
        repeatable = [index for index in set(sequence) if problem.operators[index].may_repeat]
        if repeatable and len(sequence) + len(waiting) < max_runs and random.random() < 0.4:
            sequence.append(random.choice(sorted(repeatable)))
            continue
        index = random.choice(ready[:2])
        waiting.remove(index)
        sequence.append(index)
        made.update(problem.operators[index].writes)
    return sequence
