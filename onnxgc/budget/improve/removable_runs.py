"""A sequence of which runs can be taken out, one by one, while its memory is followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgc.budget.operator_problem import OperatorProblem


@dataclass(slots=True, eq=False)
class _Copy:
    """What one run writes into one storage; `uses` are the places of its readers, rising."""

    storage: int
    place: int
    rank: int
    uses: list[int] = field(default_factory=list)
    is_last: bool = False
    """Whether it is held to the end."""

    @property
    def is_read(self) -> bool:
        return bool(self.uses) or self.is_last


class RemovableRuns:
    """Memory of a sequence, kept up to date while runs are removed; a removed run leaves its place empty."""

    def __init__(self, problem: OperatorProblem, sequence: Sequence[int]) -> None:
        self._problem = problem
        self._runs: list[int | None] = list(sequence)
        self._writes: list[list[_Copy]] = []
        self._reads: list[list[_Copy]] = []
        self._copies_of: list[list[_Copy]] = [[] for _ in problem.sizes]
        for place, index in enumerate(sequence):
            operation = problem.operations[index]
            read = [self._copies_of[storage][-1] for storage in operation.reads]
            for copy in read:
                copy.uses.append(place)
            self._reads.append(read)
            written = [_Copy(storage, place, rank) for rank, storage in enumerate(operation.writes)]
            for copy in written:
                self._copies_of[copy.storage].append(copy)
            self._writes.append(written)
        for storage in problem.kept:
            self._copies_of[storage][-1].is_last = True
        self.memory = np.zeros(len(sequence) + 1, np.int64)
        for place, index in enumerate(sequence):
            self.memory[place] += problem.operations[index].workspace
            self._count(self._writes[place], 1)

    def sequence(self) -> list[int]:
        """The runs that are left."""
        return [index for index in self._runs if index is not None]

    def repeats(self) -> list[int]:
        """Places of runs that are not an operator's first."""
        seen: set[int] = set()
        places = []
        for place, index in enumerate(self._runs):
            if index is None:
                continue
            if index in seen:
                places.append(place)
            seen.add(index)
        return places

    def operator_at(self, place: int) -> int:
        index = self._runs[place]
        assert index is not None, "the run at this place was removed"
        return index

    def remove(self, place: int, limit: int) -> bool:
        """Take out a run that is not its operator's first, if what it raises stays within the limit."""
        index = self.operator_at(place)
        earlier = [self._before(copy) for copy in self._writes[place]]
        touched = self._with_siblings([*self._writes[place], *earlier, *self._reads[place]])
        before = self.memory.copy()
        uses = [(copy, list(copy.uses), copy.is_last) for copy in touched]
        self._count(touched, -1)
        self._runs[place] = None
        self.memory[place] -= self._problem.operations[index].workspace
        for copy, heir in zip(self._writes[place], earlier, strict=True):
            heir.uses.extend(copy.uses)
            heir.is_last |= copy.is_last
            copy.uses, copy.is_last = [], False
        for copy in self._reads[place]:
            copy.uses.remove(place)
        left = [copy for copy in touched if copy.place != place]
        self._count(left, 1)
        changed = self.memory[self.memory > before]
        if changed.size and int(changed.max()) > limit:
            self._runs[place] = index
            self.memory = before
            for copy, was, last in uses:
                copy.uses, copy.is_last = was, last
            return False
        for copy, heir in zip(self._writes[place], earlier, strict=True):
            for use in heir.uses:
                self._reads[use] = [heir if read is copy else read for read in self._reads[use]]
            self._copies_of[copy.storage].remove(copy)
        return True

    def _before(self, copy: _Copy) -> _Copy:
        copies = self._copies_of[copy.storage]
        return copies[copies.index(copy) - 1]

    def _with_siblings(self, copies: Iterable[_Copy]) -> list[_Copy]:
        """The copies, each with all of its run where it depends on the others what is written."""
        found: dict[int, _Copy] = {}
        for copy in copies:
            written = self._writes[copy.place]
            fewest = self._problem.operations[self.operator_at(copy.place)].fewest
            for sibling in written if len(written) > fewest else (copy,):
                found[id(sibling)] = sibling
        return list(found.values())

    def _count(self, copies: Iterable[_Copy], sign: int) -> None:
        sizes, operations = self._problem.sizes, self._problem.operations
        for copy in copies:
            written = self._writes[copy.place]
            operation = operations[self.operator_at(copy.place)]
            if copy.rank >= operation.fewest and not any(other.is_read for other in written[copy.rank :]):
                continue
            size = sign * sizes[copy.storage]
            if copy.is_last:
                self.memory[copy.place :] += size
                continue
            until = copy.uses[-1] if copy.uses else copy.place
            self.memory[copy.place : until + 1] += size
            last = operations[self.operator_at(until)]
            if copy.uses and last.in_place == copy.storage:
                self.memory[until] -= sign * sizes[last.writes[0]]


def without_needless_repeats(problem: OperatorProblem, sequence: Sequence[int], budget: int) -> list[int]:
    """The sequence without the runs that the budget does not need, the longest tried first.

    Memory that is over the budget before does not rise.
    """
    timeline = RemovableRuns(problem, sequence)
    operations = problem.operations
    tried = True
    while tried:
        tried = False
        places = sorted(
            timeline.repeats(), key=lambda place: -operations[timeline.operator_at(place)].duration
        )
        for place in places:
            tried |= timeline.remove(place, budget)
    return timeline.sequence()
