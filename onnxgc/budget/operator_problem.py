"""The rematerialisation problem: operators, the storages that they read and write, time and memory.

A *sequence* lists operators in the order in which they run; an operator may run any number of times.
Each run writes fresh copies of its outputs; a reader reads the latest copy, and a copy is live from the
run that writes it to its last reader. The problem is a sequence of least total duration whose peak stays
within a budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxgc.errors import GraphFileError


@dataclass(frozen=True, slots=True)
class ProblemOperator:
    """One operator. `reads` and `writes` are numbers of storages, without repeats.

    `duration` is in any unit. `workspace` is live only while it runs. `in_place` is a storage that it
    reads: if that storage's lifetime ends here, the first output, of the same size, reuses its memory.
    The first `min_writes` of `writes` are always written; the others are omitted, from the last on, if
    nothing reads them.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    duration: int
    workspace: int = 0
    in_place: int | None = None
    may_repeat: bool = True
    min_writes: int = 1


@dataclass(frozen=True, slots=True)
class OperatorProblem:
    """Operators in a topological order, and the sizes of the storages that they write.

    `kept` are storages whose latest copy is live to the end. `marks` are storages without memory: their
    readers replace a value that their producers read, and so run after the last run of those (`settled`).

    Attributes:
        producer: for each storage the operator that writes it.
        readers: for each storage the operators that read it, in rising order.

    Raises:
        GraphFileError: an operator reads a storage that no earlier operator writes; not exactly one operator
            writes a storage; an operator works in place on a storage that it does not read or that has
            another size than its first output; or a size or duration is negative.

    >>> chain = OperatorProblem(
    ...     (ProblemOperator("a", (), (0,), 1), ProblemOperator("b", (0,), (1,), 1)), (8, 2), frozenset({1})
    ... )
    >>> simulate_sequence(chain, [0, 1]).peak
    10
    """

    operators: tuple[ProblemOperator, ...]
    sizes: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    marks: frozenset[int] = frozenset()
    producer: tuple[int, ...] = field(init=False)
    readers: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        producer = [-1] * len(self.sizes)
        readers: list[list[int]] = [[] for _ in self.sizes]
        for index, operator in enumerate(self.operators):
            if operator.duration < 0 or operator.workspace < 0:
                raise GraphFileError(
                    f"operator {operator.name!r} has a negative duration or workspace; give at least 0"
                )
            for storage in operator.reads:
                if producer[storage] < 0:
                    raise GraphFileError(
                        f"operator {operator.name!r} reads a storage that no earlier operator writes; "
                        "list operators in topological order"
                    )
                readers[storage].append(index)
            for storage in operator.writes:
                if producer[storage] >= 0:
                    raise GraphFileError(
                        f"operator {operator.name!r} writes a storage that another operator writes; give each its own"
                    )
                producer[storage] = index
            source = operator.in_place
            if source is not None and not (
                source in operator.reads
                and operator.min_writes > 0
                and self.sizes[source] == self.sizes[operator.writes[0]]
            ):
                raise GraphFileError(
                    f"operator {operator.name!r} works in place on a storage that it does not read, or that "
                    "has another size than its first output"
                )
        if -1 in producer:
            raise GraphFileError(f"no operator writes storage {producer.index(-1)}")
        if any(size < 0 for size in self.sizes):
            raise GraphFileError("a size is negative; sizes are at least 0")
        object.__setattr__(self, "producer", tuple(producer))
        object.__setattr__(self, "readers", tuple(map(tuple, readers)))

    def __len__(self) -> int:
        return len(self.operators)

    @property
    def duration(self) -> int:
        """Time of the sequence that runs every operator once."""
        return sum(operator.duration for operator in self.operators)

    def working_set(self, index: int) -> int:
        """Bytes that an operator needs while it runs: a lower bound on the peak of every sequence."""
        operator = self.operators[index]
        written = operator.writes[: operator.min_writes]
        shared = 0 if operator.in_place is None else self.sizes[operator.in_place]
        return sum(self.sizes[s] for s in (*operator.reads, *written)) - shared + operator.workspace


@dataclass(frozen=True, slots=True)
class SequenceProfile:
    """Duration and peak of a sequence, and the live bytes while each of its runs takes place."""

    duration: int
    peak: int
    timeline: tuple[int, ...]


def settled(problem: OperatorProblem, sequence: Sequence[int]) -> Sequence[int]:
    """The sequence with each reader of marks after the last run of their producers, and its own readers."""
    if not problem.marks:
        return sequence
    last = {index: place for place, index in enumerate(sequence)}
    moved_to: dict[int, int] = {}
    late: dict[int, list[int]] = {}
    rest: list[tuple[int, int]] = []
    for place, index in enumerate(sequence):
        end = place
        for storage in problem.operators[index].reads:
            producer = problem.producer[storage]
            end = max(end, last[producer] if storage in problem.marks else moved_to.get(producer, place))
        if end > place:
            moved_to[index] = end
            late.setdefault(end, []).append(index)
        else:
            rest.append((place, index))
    return [moved for place, index in rest for moved in (index, *late.get(place, ()))]


def simulate_sequence(problem: OperatorProblem, sequence: Sequence[int]) -> SequenceProfile:
    """Memory and time of a sequence, with exact lifetimes.

    Linear in the reads and writes of all runs.

    Raises:
        ValueError: an operator runs before its inputs, runs twice though it must not, or never runs.
    """
    operators, sizes = problem.operators, problem.sizes
    latest = [-1] * len(sizes)
    """By storage: its latest copy, a number that counts all copies."""
    last_use: list[int] = []
    storage_of: list[int] = []
    copies: list[range] = []
    reusable: list[int] = []
    has_run = [False] * len(operators)
    for position, index in enumerate(sequence):
        operator = operators[index]
        if has_run[index] and not operator.may_repeat:
            raise ValueError(f"operator {operator.name!r} must not run twice")
        has_run[index] = True
        for storage in operator.reads:
            if latest[storage] < 0:
                raise ValueError(f"operator {operator.name!r} runs before its inputs at step {position}")
            last_use[latest[storage]] = position
        reusable.append(-1 if operator.in_place is None else latest[operator.in_place])
        copies.append(range(len(last_use), len(last_use) + len(operator.writes)))
        for storage in operator.writes:
            latest[storage] = len(last_use)
            last_use.append(position)
            storage_of.append(storage)
    if not all(has_run):
        raise ValueError(f"operator {operators[has_run.index(False)].name!r} never runs")
    for storage in problem.kept:
        last_use[latest[storage]] = len(sequence)
    change = [0] * (len(sequence) + 2)
    for position, index in enumerate(sequence):
        written = len(copies[position])
        while written > operators[index].min_writes and last_use[copies[position][written - 1]] == position:
            written -= 1
        for copy in copies[position][:written]:
            change[position] += sizes[storage_of[copy]]
            change[last_use[copy] + 1] -= sizes[storage_of[copy]]
    timeline: list[int] = []
    live = 0
    for position, index in enumerate(sequence):
        live += change[position]
        operator = operators[index]
        reuses = reusable[position] >= 0 and last_use[reusable[position]] == position
        timeline.append(live + operator.workspace - (sizes[operator.writes[0]] if reuses else 0))
    duration = sum(operators[index].duration for index in sequence)
    return SequenceProfile(duration, max(timeline, default=0), tuple(timeline))
