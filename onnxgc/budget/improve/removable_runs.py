"""Removal of runs from a sequence, one by one, with its memory updated after each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgc.budget.operator_problem import OperatorProblem


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy of a storage that one run writes; `uses` are the positions of its readers, rising."""

    storage: int
    position: int
    rank: int
    uses: list[int] = field(default_factory=list)
    is_last: bool = False
    """Whether it is live to the end."""

    @property
    def is_read(self) -> bool:
        return bool(self.uses) or self.is_last


class RemovableRuns:
    """Memory of a sequence while runs are removed; a removed run leaves its position empty.

    Attributes:
        memory: live bytes by position, as `simulate_sequence` finds them for the runs that are left.
    """

    def __init__(self, problem: OperatorProblem, sequence: Sequence[int]) -> None:
        self._problem = problem
        self._runs: list[int | None] = list(sequence)
        self._writes: list[list[_Copy]] = []
        self._reads: list[list[_Copy]] = []
        self._copies_of: list[list[_Copy]] = [[] for _ in problem.sizes]
        for position, index in enumerate(sequence):
            operator = problem.operators[index]
            read = [self._copies_of[storage][-1] for storage in operator.reads]
            for copy in read:
                copy.uses.append(position)
            self._reads.append(read)
            written = [_Copy(storage, position, rank) for rank, storage in enumerate(operator.writes)]
            for copy in written:
                self._copies_of[copy.storage].append(copy)
            self._writes.append(written)
        for storage in problem.kept:
            self._copies_of[storage][-1].is_last = True
        self.memory = np.zeros(len(sequence) + 1, np.int64)
        for position, index in enumerate(sequence):
            self.memory[position] += problem.operators[index].workspace
            self._count(self._writes[position], 1)

    def sequence(self) -> list[int]:
        """The runs that are left."""
        return [index for index in self._runs if index is not None]

    def repeats(self) -> list[int]:
        """Places of runs that are not an operator's first."""
        seen: set[int] = set()
        positions = []
        for position, index in enumerate(self._runs):
            if index is None:
                continue
            if index in seen:
                positions.append(position)
            seen.add(index)
        return positions

    def operator_at(self, position: int) -> int:
        index = self._runs[position]
        assert index is not None, "the run at this position was removed"
        return index

    def remove(self, position: int, limit: int) -> bool:
        """Remove a run that is not its operator's first, if memory that rises stays within the limit."""
        index = self.operator_at(position)
        earlier = [self._before(copy) for copy in self._writes[position]]
        affected = self._with_siblings([*self._writes[position], *earlier, *self._reads[position]])
        before = self.memory.copy()
        uses = [(copy, list(copy.uses), copy.is_last) for copy in affected]
        self._count(affected, -1)
        self._runs[position] = None
        self.memory[position] -= self._problem.operators[index].workspace
        for copy, successor in zip(self._writes[position], earlier, strict=True):
            successor.uses.extend(copy.uses)
            successor.is_last |= copy.is_last
            copy.uses, copy.is_last = [], False
        for copy in self._reads[position]:
            copy.uses.remove(position)
        left = [copy for copy in affected if copy.position != position]
        self._count(left, 1)
        changed = self.memory[self.memory > before]
        if changed.size and int(changed.max()) > limit:
            self._runs[position] = index
            self.memory = before
            for copy, was, last in uses:
                copy.uses, copy.is_last = was, last
            return False
        for copy, successor in zip(self._writes[position], earlier, strict=True):
            for use in successor.uses:
                self._reads[use] = [successor if read is copy else read for read in self._reads[use]]
            self._copies_of[copy.storage].remove(copy)
        return True

    def _before(self, copy: _Copy) -> _Copy:
        copies = self._copies_of[copy.storage]
        return copies[copies.index(copy) - 1]

    def _with_siblings(self, copies: Iterable[_Copy]) -> list[_Copy]:
        """The copies plus siblings from the same run, if those affect which outputs are allocated."""
        affected: dict[int, _Copy] = {}
        for copy in copies:
            written = self._writes[copy.position]
            min_writes = self._problem.operators[self.operator_at(copy.position)].min_writes
            for sibling in written if len(written) > min_writes else (copy,):
                affected[id(sibling)] = sibling
        return list(affected.values())

    def _count(self, copies: Iterable[_Copy], sign: int) -> None:
        sizes, operators = self._problem.sizes, self._problem.operators
        for copy in copies:
            written = self._writes[copy.position]
            operator = operators[self.operator_at(copy.position)]
            if copy.rank >= operator.min_writes and not any(other.is_read for other in written[copy.rank :]):
                continue
            size = sign * sizes[copy.storage]
            if copy.is_last:
                self.memory[copy.position :] += size
                continue
            until = copy.uses[-1] if copy.uses else copy.position
            self.memory[copy.position : until + 1] += size
            last = operators[self.operator_at(until)]
            if copy.uses and last.in_place == copy.storage:
                self.memory[until] -= sign * sizes[last.writes[0]]


def without_needless_repeats(problem: OperatorProblem, sequence: Sequence[int], budget: int) -> list[int]:
    """The sequence without the runs that the budget does not need, the longest tried first.

    Memory that exceeds the budget before does not rise.
    """
    runs = RemovableRuns(problem, sequence)
    operators = problem.operators
    is_changed = True
    while is_changed:
        is_changed = False
        positions = sorted(runs.repeats(), key=lambda position: -operators[runs.operator_at(position)].duration)
        for position in positions:
            is_changed |= runs.remove(position, budget)
    return runs.sequence()
