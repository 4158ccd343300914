"""What every order of first runs has in memory at some moment, if nothing is computed again later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnxgc.budget.operator_problem import OperatorProblem

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
BoolArray: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


def spread(excess: IntArray, most: int) -> list[int]:
    """Places where an excess is positive; of many the greatest of each of `most` parts of equal length."""
    over = np.flatnonzero(excess > 0)
    if len(over) <= most:
        return [int(place) for place in over]
    return [int(part[np.argmax(excess[part])]) for part in np.array_split(over, most)]


class ForcedMemory:
    """Memory at the first runs of some operators, the *moments*, in whatever order operators first run.

    A storage that is computed by then and read later is there. If what reads it later may as well
    have run before (a mask of it, a part of it), either it is there or all that was made from it and is
    needed later: at least the smaller of the two. What is made from several storages is counted for
    the largest of them alone, so that nothing is counted twice.

    Attributes:
        moments: operators.
        begun: row of an operator, column of a moment: whether it has begun by then in every order.
        later: the same: whether it runs later in every order.
        least_held: for each moment, bytes in memory at least.
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
            tuple(dict.fromkeys(problem.producer[s] for s in operation.reads))
            for operation in problem.operations
        ]
        for index in range(count):
            for producer in producers[index]:
                self.later[index] |= self.later[producer] | at_moment[producer]
        for index in reversed(range(count)):
            self.begun[index] |= at_moment[index]
            for producer in producers[index]:
                self.begun[producer] |= self.begun[index]
        self._held = self._held_for_storages()
        self.least_held = np.asarray(
            [
                problem.working_set(moment) + sum(held for _, held in self.items(row))
                for row, moment in enumerate(moments)
            ],
            np.int64,
        )
        self._chains: dict[int, list[int]] = {}
        self._ancestors: list[int] | None = None

    def items(self, row: int) -> Iterator[tuple[int, int]]:
        """Storages beside a moment's own, and the bytes that each, or what is made from it, must hold."""
        operation = self._problem.operations[self.moments[row]]
        own = {s for s in operation.reads if s != operation.in_place}
        own.update(operation.writes[: operation.fewest])
        for storage in np.flatnonzero(self._held[:, row]).tolist():
            if self.begun[self._problem.producer[storage], row] and storage not in own:
                yield storage, int(self._held[storage, row])

    def _held_for_storages(self) -> IntArray:
        problem = self._problem
        held = np.zeros((len(problem.sizes), len(self.moments)), np.int64)
        parts = np.zeros_like(held)
        """Of what is made from a storage by operators that may run before or after a moment."""
        for index in reversed(range(len(problem))):
            operation = problem.operations[index]
            unordered = ~(self.begun[index] | self.later[index])
            for storage in operation.writes:
                size = problem.sizes[storage]
                wanted = np.full(len(self.moments), storage in problem.kept)
                for reader in problem.readers[storage]:
                    wanted |= self.later[reader]
                held[storage] = np.where(wanted, size, np.minimum(size, parts[storage]))
                if operation.reads:
                    parent = max(operation.reads, key=lambda s: (problem.sizes[s], -s))
                    parts[parent] += np.where(unordered, held[storage], 0)
        return held

    def is_wanted(self, storage: int, row: int) -> bool:
        """Whether every order reads a storage after a moment, or keeps it to the end."""
        return storage in self._problem.kept or any(
            self.later[reader, row] for reader in self._problem.readers[storage]
        )

    def chain(self, storage: int) -> list[int]:
        """Uses of a storage that come one after the other in every order, the producer first."""
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
        """The operators that must have run before an operator, as bits."""
        if self._ancestors is None:
            self._ancestors = []
            for operation in self._problem.operations:
                bits = 0
                for storage in operation.reads:
                    producer = self._problem.producer[storage]
                    bits |= self._ancestors[producer] | 1 << producer
                self._ancestors.append(bits)
        return self._ancestors[index]
