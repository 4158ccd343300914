"""Lower bounds on live memory that hold in every order of first runs, without recomputation."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnxgc.budget.operator_problem import OperatorProblem

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
BoolArray: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


def highest_of_parts(excess: IntArray, max_count: int) -> list[int]:
    """Positions with positive excess, at most `max_count`: the maximum of each equal part of the step."""
    over = np.flatnonzero(excess > 0)
    if len(over) <= max_count:
        return [int(index) for index in over]
    return [int(part[np.argmax(excess[part])]) for part in np.array_split(over, max_count)]


def ancestors_of(problem: OperatorProblem) -> list[int]:
    """For each operator those that must run before it, as bits."""
    ancestors: list[int] = []
    for operator in problem.operators:
        bits = 0
        for storage in operator.reads:
            producer = problem.producer[storage]
            bits |= ancestors[producer] | 1 << producer
        ancestors.append(bits)
    return ancestors


class ForcedMemory:
    """Memory at the first runs of some operators, the *moments*, in any order of first runs.

    A storage that is computed before a moment and read later is live. If every later reader could also run
    before the moment, either the storage is live or everything computed from it that is read later is; the
    smaller size counts. A value computed from several storages is counted
    for the largest of them alone, so that nothing is counted twice.

    Attributes:
        moments: operators.
        begun: row of an operator, column of a moment: whether it has begun before in every order.
        later: the same: whether it runs later in every order.
        min_bytes: for each moment, a lower bound on live bytes.
    """

    def __init__(self, problem: OperatorProblem, moments: Sequence[int]) -> None:
        self._problem = problem
        self.moments = tuple(moments)
        count = len(problem)
        self.begun = np.zeros((count, len(moments)), bool)
        self.later = np.zeros((count, len(moments)), bool)
        at_moment = np.zeros((count, len(moments)), bool)
        at_moment[list(moments), np.arange(len(moments))] = True
        producers = [
            tuple(dict.fromkeys(problem.producer[s] for s in operator.reads)) for operator in problem.operators
        ]
        for index in range(count):
            for producer in producers[index]:
                self.later[index] |= self.later[producer] | at_moment[producer]
        for index in reversed(range(count)):
            self.begun[index] |= at_moment[index]
            for producer in producers[index]:
                self.begun[producer] |= self.begun[index]
        self._bytes = self._bytes_for_storages()
        self._producer = np.asarray(problem.producer, np.int64)
        own = [problem.working_set(moment) + int(self.live(row).sum()) for row, moment in enumerate(moments)]
        self.min_bytes = np.asarray(own, np.int64)
        self._chains: dict[int, list[int]] = {}
        self._ancestors: list[int] | None = None

    def live(self, row: int) -> IntArray:
        """By storage: its live bytes or those of values computed from it; 0 for a moment's own storages."""
        operator = self._problem.operators[self.moments[row]]
        live = np.where(self.begun[self._producer, row], self._bytes[:, row], 0)
        live[[s for s in operator.reads if s != operator.in_place]] = 0
        live[list(operator.writes[: operator.min_writes])] = 0
        return live

    def items(self, row: int) -> Iterator[tuple[int, int]]:
        """The storages with live bytes."""
        live = self.live(row)
        for storage in np.flatnonzero(live).tolist():
            yield storage, int(live[storage])

    def _bytes_for_storages(self) -> IntArray:
        problem = self._problem
        live = np.zeros((len(problem.sizes), len(self.moments)), np.int64)
        derived = np.zeros_like(live)
        """Bytes of values that operators compute from a storage, before or after a moment."""
        for index in reversed(range(len(problem))):
            operator = problem.operators[index]
            unordered = ~(self.begun[index] | self.later[index])
            for storage in operator.writes:
                size = problem.sizes[storage]
                wanted = np.full(len(self.moments), storage in problem.kept)
                for reader in problem.readers[storage]:
                    wanted |= self.later[reader]
                live[storage] = np.where(wanted, size, np.minimum(size, derived[storage]))
                if operator.reads:
                    parent = max(operator.reads, key=lambda s: (problem.sizes[s], -s))
                    derived[parent] += np.where(unordered, live[storage], 0)
        return live

    def is_wanted(self, storage: int, row: int) -> bool:
        """Whether every order reads a storage after a moment, or keeps it to the end."""
        return storage in self._problem.kept or any(
            self.later[reader, row] for reader in self._problem.readers[storage]
        )

    def chain(self, storage: int) -> list[int]:
        """The longest chain of uses whose relative order is fixed, starting with the producer."""
        if storage not in self._chains:
            length: dict[int, int] = {}
            previous: dict[int, int | None] = {}
            readers = self._problem.readers[storage]
            for reader in readers:
                before = [other for other in length if self.ancestors(reader) >> other & 1]
                best = max(before, key=lambda other: (length[other], -other), default=None)
                length[reader] = 1 + (length[best] if best is not None else 0)
                previous[reader] = best
            at = max(readers, key=lambda reader: (length[reader], -reader), default=None)
            chain: list[int] = []
            while at is not None:
                chain.append(at)
                at = previous[at]
            self._chains[storage] = [self._problem.producer[storage], *reversed(chain)]
        return self._chains[storage]

    def ancestors(self, index: int) -> int:
        """The operators that must run before an operator, as bits."""
        if self._ancestors is None:
            self._ancestors = ancestors_of(self._problem)
        return self._ancestors[index]
