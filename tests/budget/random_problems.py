"""Small random problems of many shapes, and budgets at which something must run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence

MOST_STORAGES = 10


@dataclass(frozen=True)
class _Habits:
    """What the operators of one problem have in common: shares, and lists to draw from."""

    sizes: tuple[int, ...]
    durations: tuple[int, ...]
    reading: str
    several_outputs: float
    optional_outputs: float
    in_place: float
    workspace: float
    once: float
    kept_ends: float
    kept: float


def _habits(random: Random) -> _Habits:
    return _Habits(
        sizes=random.choice([(1,), (0, 1, 2, 3), (1, 1, 1, 8), tuple(range(1, 10)), (0, 1, 2, 4, 8)]),
        durations=random.choice([(1,), (0, 1), (1, 10, 100), tuple(range(6)), tuple(range(1, 21))]),
        reading=random.choice(["chain", "shared", "unread", "there and back", "any"]),
        several_outputs=random.choice([0, 0.2, 0.5]),
        optional_outputs=random.choice([0, 0.3, 0.8]),
        in_place=random.choice([0, 0.3, 0.9]),
        workspace=random.choice([0, 0.3, 0.6]),
        once=random.choice([0, 0, 0.15, 0.3]),
        kept_ends=random.choice([0, 0.5, 1]),
        kept=random.choice([0, 0, 0.15]),
    )


def random_problem(random: Random, most_operators: int) -> OperatorProblem:
    """A problem with several outputs, operators in place, workspaces, optional outputs and kept storages."""
    habits = _habits(random)
    count = random.randint(3, most_operators)
    sizes: list[int] = []
    read: set[int] = set()
    operations: list[ProblemOperator] = []
    for index in range(count):
        reads = _reads(random, habits.reading, len(sizes), read, index / count)
        read.update(reads)
        room = MOST_STORAGES - len(sizes) - (count - index)
        outputs = 1 + sum(random.random() < habits.several_outputs for _ in range(max(0, min(2, room))))
        writes = tuple(range(len(sizes), len(sizes) + outputs))
        sizes.extend(random.choice(habits.sizes) for _ in writes)
        in_place = random.choice(reads) if reads and random.random() < habits.in_place else None
        if in_place is not None:
            sizes[writes[0]] = sizes[in_place]
        operations.append(
            ProblemOperator(
                f"o{index}",
                reads,
                writes,
                random.choice(habits.durations),
                random.randint(1, 9) if random.random() < habits.workspace else 0,
                in_place,
                may_repeat=random.random() >= habits.once,
                fewest=random.randint(1, outputs) if random.random() < habits.optional_outputs else outputs,
            )
        )
    kept = [
        s for s in range(len(sizes)) if random.random() < (habits.kept if s in read else habits.kept_ends)
    ]
    return OperatorProblem(tuple(operations), tuple(sizes), frozenset(kept))


def _reads(random: Random, reading: str, there: int, read: set[int], passed: float) -> tuple[int, ...]:
    """What an operator reads of so many storages; `passed` is the share of the operators before it."""
    if not there:
        return ()
    found = [there - 1]
    if reading == "chain" and random.random() < 0.4:
        found.append(random.randrange(there))
    if reading == "shared":
        found = [random.randrange(min(3, there))]
        found += [random.randrange(there)] if random.random() < 0.5 else []
    if reading == "there and back" and passed >= 0.5:
        found.append(max(0, round(2 * (1 - passed) * there) - random.randint(0, 1)))
    if reading == "unread":
        unread = [storage for storage in range(there) if storage not in read]
        found = random.sample(unread, min(len(unread), random.randint(1, 2)))
        found += [random.randrange(there)] if random.random() < 0.5 else []
    if reading == "any":
        found = random.sample(range(there), min(there, random.randint(0, 3)))
    return tuple(dict.fromkeys(min(storage, there - 1) for storage in found))


def tight_problems(seed: int, count: int, most_operators: int) -> Iterator[tuple[OperatorProblem, int]]:
    """So many problems, each with a budget below the peak of its own order and not below any operator."""
    random = Random(seed)
    while count:
        problem = random_problem(random, most_operators)
        least = max(problem.working_set(index) for index in range(len(problem)))
        peak = simulate_sequence(problem, range(len(problem))).peak
        if least < peak:
            count -= 1
            yield problem, random.randrange(least, peak)


def random_sequence(random: Random, problem: OperatorProblem, most_runs: int) -> list[int]:
    """Operators in a random order that the data allows, and some again."""
    waiting = list(range(len(problem)))
    made: set[int] = set()
    sequence: list[int] = []
    while waiting:
        ready = [index for index in waiting if made.issuperset(problem.operations[index].reads)]
        again = [index for index in set(sequence) if problem.operations[index].may_repeat]
        if again and len(sequence) + len(waiting) < most_runs and random.random() < 0.4:
            sequence.append(random.choice(sorted(again)))
            continue
        index = random.choice(ready[:2])
        waiting.remove(index)
        sequence.append(index)
        made.update(problem.operations[index].writes)
    return sequence
