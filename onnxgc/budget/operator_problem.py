"""The rematerialisation problem in general: operators, what they read and write, time and memory.

A *sequence* names operators in the order in which they run; an operator may run any number of times.
Each run writes fresh copies of its outputs; a reader reads the latest copy, and a copy lives from the
run that writes it to its last reader. The problem is to find a sequence of least total duration whose
memory never passes a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxgc.errors import GraphFileError


@dataclass(frozen=True, slots=True)
class ProblemOperator:
    """One operator. `reads` and `writes` are numbers of storages, without repeats.

    `duration` is in any unit. `workspace` is held only while it runs. `in_place` is a storage that it
    reads and whose memory its first output, of the same size, takes where that storage ends here. Of
    `writes` the first `fewest` cannot be left out; the others are, from the last on, where nobody reads
    them.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    duration: int
    workspace: int = 0
    in_place: int | None = None
    may_repeat: bool = True
    fewest: int = 1


@dataclass(frozen=True, slots=True)
class OperatorProblem:
    """Operators in an order that the data allows, and the sizes of the storages that they write.

    `kept` are storages whose latest copy lives to the end.

    Attributes:
        producer: for each storage the operator that writes it.
        readers: for each storage the operators that read it, in rising order.

    Raises:
        GraphFileError: an operator reads what is not written before it, a storage is not written by one
            operator, an operator works in place on what it does not read or what has another size, or a
            size is negative.
    """

    operations: tuple[ProblemOperator, ...]
    sizes: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    producer: tuple[int, ...] = field(init=False)
    readers: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        producer = [-1] * len(self.sizes)
        readers: list[list[int]] = [[] for _ in self.sizes]
        for index, operation in enumerate(self.operations):
            if operation.duration < 0 or operation.workspace < 0:
                raise GraphFileError(f"operator {operation.name!r} has a negative duration; give at least 0")
            for storage in operation.reads:
                if producer[storage] < 0:
                    raise GraphFileError(
                        f"operator {operation.name!r} reads what no operator before it writes"
                    )
                readers[storage].append(index)
            for storage in operation.writes:
                if producer[storage] >= 0:
                    raise GraphFileError(f"operator {operation.name!r} writes what another one writes")
                producer[storage] = index
            taken = operation.in_place
            if taken is not None and not (
                taken in operation.reads
                and operation.fewest > 0
                and self.sizes[taken] == self.sizes[operation.writes[0]]
            ):
                raise GraphFileError(
                    f"operator {operation.name!r} works in place on what it does not read, or what has "
                    "another size than its first output"
                )
        if -1 in producer:
            raise GraphFileError(f"no operator writes storage {producer.index(-1)}")
        if any(size < 0 for size in self.sizes):
            raise GraphFileError("a size is negative; sizes are at least 0")
        object.__setattr__(self, "producer", tuple(producer))
        object.__setattr__(self, "readers", tuple(map(tuple, readers)))

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def duration(self) -> int:
        """Time of the sequence that runs every operator once."""
        return sum(operation.duration for operation in self.operations)

    def is_sink(self, storage: int) -> bool:
        return storage in self.kept

    def working_set(self, index: int) -> int:
        """What is in memory while an operator runs, whatever else is: no sequence goes below it."""
        operation = self.operations[index]
        written = operation.writes[: operation.fewest]
        shared = 0
        if operation.in_place is not None:
            shared = self.sizes[operation.in_place]
        return sum(self.sizes[s] for s in (*operation.reads, *written)) - shared + operation.workspace


@dataclass(frozen=True, slots=True)
class SequenceProfile:
    """What a sequence costs: time, peak, and the memory held at each of its steps."""

    duration: int
    peak: int
    timeline: tuple[int, ...]


def simulate_sequence(problem: OperatorProblem, sequence: Sequence[int]) -> SequenceProfile:
    """Walk a sequence with exact lifetimes.

    Raises:
        ValueError: an operator runs before its inputs are there, runs twice though it must not, or
            never runs.
    """
    operations, sizes = problem.operations, problem.sizes
    current = [-1] * len(sizes)
    """By storage: its latest copy, a number that counts all copies."""
    until: list[int] = []
    storage_of: list[int] = []
    copies: list[range] = []
    taken: list[int] = []
    ran = [False] * len(operations)
    for step, index in enumerate(sequence):
        operation = operations[index]
        if ran[index] and not operation.may_repeat:
            raise ValueError(f"operator {operation.name!r} must not run twice")
        ran[index] = True
        for storage in operation.reads:
            if current[storage] < 0:
                raise ValueError(f"operator {operation.name!r} runs before its inputs at step {step}")
            until[current[storage]] = step
        taken.append(-1 if operation.in_place is None else current[operation.in_place])
        copies.append(range(len(until), len(until) + len(operation.writes)))
        for storage in operation.writes:
            current[storage] = len(until)
            until.append(step)
            storage_of.append(storage)
    if not all(ran):
        raise ValueError(f"operator {operations[ran.index(False)].name!r} never runs")
    for storage in problem.kept:
        until[current[storage]] = len(sequence)
    change = [0] * (len(sequence) + 2)
    for step, index in enumerate(sequence):
        operation = operations[index]
        written = len(copies[step])
        while written > operation.fewest and until[copies[step][written - 1]] == step:
            written -= 1
        for copy in copies[step][:written]:
            change[step] += sizes[storage_of[copy]]
            change[until[copy] + 1] -= sizes[storage_of[copy]]
    timeline: list[int] = []
    held = 0
    for step, index in enumerate(sequence):
        held += change[step]
        operation = operations[index]
        saved = sizes[operation.writes[0]] if taken[step] >= 0 and until[taken[step]] == step else 0
        timeline.append(held + operation.workspace - saved)
    duration = sum(operations[index].duration for index in sequence)
    return SequenceProfile(duration, max(timeline, default=0), tuple(timeline))
