"""What to keep and what to compute again, as an integer program around a sequence within the budget.

Operators keep the order of their first runs. In front of each first run others may run again, in the
same order: the *group* of that run. A storage has an *event* in each group where it may be read or
written again. Whether it is kept from one event to the next is a column of the program, and so is each
run that is not a first one; what is held at each point of time makes a row.

Only what some operators write is free, the rest stays as in the sequence, so that the program of a part
can be solved to the end however large the problem is. Where a row cannot say exactly what is held it
says more, and what is found keeps to the budget.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np

from onnxgc.budget.bounds.integer_programs import CoveringProgram
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator

Point = tuple[int, int]
"""A run by its group and its operator's position; that of a first run is the number of operators."""
_DEEPEST = 40
"""Operators that may run again behind one another, each for the next."""
_FIRST_SIZE = 400
_SMALLEST_SIZE = 60
"""Runs that the program of a part may choose from, to begin with and at least."""
_LARGER, _SMALLER = 1.05, 0.85
"""How much larger the next part is where one was solved to the end, and where one was not."""
_MOST_NODES = 10
_GAP = 1e-3
_MOST_SECONDS = 2.0
_MOST_IN_VAIN = 15
_STARTS = (1, 2, 4, 8)
"""Of how many runs of neighbouring operators a part may be made."""


class RetentionSearch:
    """A sequence in groups. Positions count operators in the order of their first runs.

    Attributes:
        repeats: the runs that are not first ones.
        uses: for each storage, the groups whose first run reads it; the number of operators stands for
            the end, to which some are kept.
    """

    def __init__(self, problem: OperatorProblem, sequence: Sequence[int]) -> None:
        self.problem = problem
        self.count = len(problem)
        self._order = list(dict.fromkeys(sequence))
        self._position = [0] * self.count
        for position, operator in enumerate(self._order):
            self._position[operator] = position
        self.repeats = frozenset(self._repeats_in(sequence))
        self.uses = [
            sorted(self._position[reader] for reader in readers)
            + ([self.count] if storage in problem.kept else [])
            for storage, readers in enumerate(problem.readers)
        ]
        longest = max((self.operation(position).duration for _, position in self.repeats), default=0)
        self.candidates = [
            position
            for position in range(self.count)
            if self.operation(position).may_repeat and self.operation(position).duration <= longest
        ]
        """Positions of operators that may come to run again: none that takes longer than those that do."""

    def operation(self, position: int) -> ProblemOperator:
        return self.problem.operations[self._order[position]]

    def operation_at(self, point: Point) -> ProblemOperator:
        group, position = point
        return self.operation(group if position == self.count else position)

    def producer(self, storage: int) -> int:
        """The position of the operator that writes a storage."""
        return self._position[self.problem.producer[storage]]

    def duration(self, repeats: Collection[Point]) -> int:
        return sum(self.operation(position).duration for _, position in repeats)

    def points(self, repeats: Collection[Point]) -> list[Point]:
        """All first runs and the repeats, in their order."""
        return sorted([*repeats, *((group, self.count) for group in range(self.count))])

    def sequence(self, repeats: Collection[Point]) -> list[int]:
        points = self.points(repeats)
        return [self._order[group if position == self.count else position] for group, position in points]

    def possible(self, free: Collection[int], most: int | None = None) -> set[Point]:
        """Repeats of the `free` positions: in front of later uses, and what such repeats need there.

        Those that are needed through more others are left out where there would be more than `most`;
        those of the sequence are always among them.
        """
        level: set[Point] = set()
        for position in free:
            for storage in self.operation(position).writes:
                last = position
                for use in self.uses[storage] if self.problem.sizes[storage] else ():
                    if use - last > 1:
                        level.add((use, position))
                    last = use
        allowed = set(free) & set(self.candidates)
        found = {repeat for repeat in self.repeats if repeat[1] in free}
        for _ in range(_DEEPEST):
            level = {repeat for repeat in level if repeat[1] in allowed} - found
            if not level or (most is not None and len(found) + len(level) > most):
                break
            found |= level
            level = {
                (group, self.producer(storage))
                for group, position in level
                for storage in self.operation(position).reads
            }
        return found

    def _repeats_in(self, sequence: Sequence[int]) -> Iterator[Point]:
        ran: set[int] = set()
        waiting: list[int] = []
        for operator in sequence:
            position = self._position[operator]
            if operator in ran:
                waiting.append(position)
                continue
            ran.add(operator)
            yield from ((position, other) for other in waiting)
            waiting = []


@dataclass(frozen=True, slots=True)
class _Holding:
    """A column that is worth `size` bytes at the places from `begin` up to `end`."""

    column: int
    begin: int
    end: int
    size: int


class RetentionProgram:
    """The program for what the operators at the `free` positions write, from the `possible` repeats."""

    def __init__(
        self, retention: RetentionSearch, budget: int, free: Collection[int], possible: Collection[Point]
    ) -> None:
        self._retention = retention
        self._free = frozenset(free)
        self._fixed = {repeat for repeat in retention.repeats if repeat[1] not in self._free}
        self._points = retention.points({*self._fixed, *possible})
        self._place = {point: place for place, point in enumerate(self._points)}
        self._program = CoveringProgram()
        self._repeat = {
            repeat: self._program.column(retention.operation_at(repeat).duration)
            for repeat in sorted(possible)
        }
        self._readers: dict[Point, list[int]] = defaultdict(list)
        """By group and storage, the positions that may read it there and are not the group's first run."""
        for group, position in (*self._fixed, *self._repeat):
            for storage in retention.operation(position).reads:
                self._readers[group, storage].append(position)
        self._holdings: list[_Holding] = []
        self._start: dict[int, float] = {
            column: float(repeat in retention.repeats) for repeat, column in self._repeat.items()
        }
        fixed = _FixedMemory(retention, self._points, self._free)
        self._held = fixed.held
        for repeat in self._repeat:
            self._add_run(repeat, fixed)
        for position in sorted(self._free):
            for number, storage in enumerate(retention.operation(position).writes):
                self._add_storage(position, storage, number)
        self._add_memory(budget)

    def improved(
        self, seconds: float, most_nodes: int | None = None, stop: Event | None = None
    ) -> tuple[list[int] | None, bool]:
        """A sequence of less duration, if one was found, and whether there is no better one."""
        if not self._repeat:
            return None, True
        retention = self._retention
        start = [self._start[column] for column in range(len(self._program.costs))]
        solution = self._program.solved(seconds, start=start, most_nodes=most_nodes, gap=_GAP, stop=stop)
        if solution is None or solution.values is None:
            return None, False
        chosen = {repeat for repeat, column in self._repeat.items() if solution.values[column] > 0.5}
        found = self._fixed | chosen
        if retention.duration(found) >= retention.duration(retention.repeats):
            return None, solution.optimal
        return retention.sequence(found), solution.optimal

    def _add_run(self, repeat: Point, fixed: _FixedMemory) -> None:
        """The workspace of a repeat; it cannot be where the rest of the sequence does not have its inputs."""
        retention, place, column = self._retention, self._place[repeat], self._repeat[repeat]
        operation = retention.operation_at(repeat)
        if operation.workspace:
            self._holdings.append(_Holding(column, place, place + 1, operation.workspace))
        others = (read for read in operation.reads if retention.producer(read) not in self._free)
        if not all(fixed.has(storage, place) for storage in others):
            self._program.require([column], [-1.0], 0.0)

    def _add_storage(self, producer: int, storage: int, number: int) -> None:
        """Columns for keeping a storage from event to event, what they need, and what they hold."""
        retention, require = self._retention, self._program.require
        size, uses = retention.problem.sizes[storage], set(retention.uses[storage])
        operation = retention.operation(producer)
        first = self._place[producer, retention.count]
        if number < operation.fewest or any(retention.uses[later] for later in operation.writes[number:]):
            self._held[first] += size
        read_in = {group for group, one in self._readers if one == storage}
        events = sorted(read_in | uses | {group for group, position in self._repeat if position == producer})
        columns = [self._program.column(0.0) for _ in events]
        begin = first + 1
        for index, (group, kept) in enumerate(zip(events, columns, strict=True)):
            again = self._repeat.get((group, producer))
            readers = self._readers.get((group, storage), [])
            end = self._end_of_reads(storage, group, readers, begin)
            if again is not None:
                place = self._place[group, producer]
                end = max(end, place + 1)
                self._holdings.append(_Holding(again, place, end, size))
            self._holdings.append(_Holding(kept, begin, end, size))
            begin = end
            present = [kept] if again is None else [kept, again]
            ones = [1.0] * len(present)
            if group in uses or any((group, reader) in self._fixed for reader in readers):
                require(present, ones, 1.0)
            else:
                for reader in readers:
                    require([*present, self._repeat[group, reader]], [*ones, -1.0], 0.0)
            if index + 1 < len(columns):
                require([*present, columns[index + 1]], [*ones, -1.0], 0.0)
        needed = False
        for group, kept in zip(reversed(events), reversed(columns), strict=True):
            readers = self._readers.get((group, storage), [])
            needed = needed or group in uses or any((group, one) in retention.repeats for one in readers)
            needed = needed and (group, producer) not in retention.repeats
            self._start[kept] = float(needed)

    def _end_of_reads(self, storage: int, group: int, readers: Sequence[int], otherwise: int) -> int:
        """The place up to which a storage must be there for a group's reads.

        Where the last of them may work in its memory, that is for the output to count.
        """
        retention = self._retention
        if group == retention.count:
            return len(self._points)
        if group in retention.uses[storage]:
            last = (group, retention.count)
        elif readers:
            last = (group, max(readers))
        else:
            return otherwise
        return self._place[last] + (retention.operation_at(last).in_place != storage)

    def _add_memory(self, budget: int) -> None:
        """A row for all places between which no column begins or ends to hold anything."""
        count = len(self._points)
        ends = {bound for holding in self._holdings for bound in (holding.begin, holding.end)}
        bounds = [bound for bound in sorted({0} | ends) if bound < count]
        row_at = {bound: row for row, bound in enumerate(bounds)} | {count: len(bounds)}
        rows: list[dict[int, int]] = [{} for _ in bounds]
        for holding in self._holdings:
            for row in rows[row_at[holding.begin] : row_at[holding.end]]:
                row[holding.column] = row.get(holding.column, 0) + holding.size
        highest = np.maximum.reduceat(np.asarray(self._held), bounds).tolist()
        for held, row in zip(highest, rows, strict=True):
            room = budget - held
            if sum(row.values()) > room:
                unit = max(row.values(), default=1) or 1
                self._program.require(list(row), [-size / unit for size in row.values()], -room / unit)


class _FixedMemory:
    """What the sequence holds, by place, of storages that operators outside `free` write.

    Workspaces of all runs but free repeats are in it.
    """

    def __init__(self, retention: RetentionSearch, points: Sequence[Point], free: frozenset[int]) -> None:
        problem = retention.problem
        copies: dict[int, list[list[int]]] = defaultdict(list)
        """By storage, the first and the last place of each copy."""
        change = [0] * (len(points) + 2)
        taken: list[tuple[int, int, list[int]]] = []
        for place, point in enumerate(points):
            is_first = point[1] == retention.count
            if not is_first and point not in retention.repeats:
                continue
            operation = retention.operation_at(point)
            for storage in operation.reads:
                if copies[storage]:
                    copies[storage][-1][1] = place
            if operation.in_place is not None and copies[operation.in_place]:
                taken.append((place, problem.sizes[operation.in_place], copies[operation.in_place][-1]))
            is_free = point[0 if is_first else 1] in free
            if is_first or not is_free:
                change[place] += operation.workspace
                change[place + 1] -= operation.workspace
            for storage in () if is_free else operation.writes:
                copies[storage].append([place, place])
        for storage in problem.kept:
            if copies[storage]:
                copies[storage][-1][1] = len(points)
        for storage, intervals in copies.items():
            for first, last in intervals:
                change[first] += problem.sizes[storage]
                change[last + 1] -= problem.sizes[storage]
        for place, size, copy in taken:
            if copy[1] == place:
                change[place] -= size
                change[place + 1] += size
        self.held = np.cumsum(change[: len(points)]).tolist()
        self._copies = copies

    def has(self, storage: int, place: int) -> bool:
        return any(first < place <= last for first, last in self._copies[storage])


class Parts:
    """Programs of one part after another; the same seed and calls give the same results.

    Attributes:
        made_anew: makes a sequence within the budget to begin from, if it can.
    """

    def __init__(self, problem: OperatorProblem, budget: int, seed: int) -> None:
        self.made_anew: Callable[[Sequence[int]], list[int] | None] = lambda best: None
        self._problem = problem
        self._budget = budget
        self._random = random.Random(seed)
        self._size = _FIRST_SIZE
        self._current: list[int] | None = None
        self._in_vain = 0
        self._starts = 0

    def improved(self, best: Sequence[int], seconds: float, stop: Event | None = None) -> list[int] | None:
        """A sequence of less duration by another choice in one part, if there is one.

        It begins from the best and goes on from what it found itself; after many parts in vain it begins
        anew, from a sequence made for it and from the best in turn. It stops after so many seconds;
        where they are infinite, after as many nodes as always; or once `stop` is set.
        """
        if self._current is None or self._in_vain == _MOST_IN_VAIN:
            self._in_vain = 0
            self._current = (self.made_anew(best) if self._starts % 2 else None) or list(best)
            self._starts += 1
        retention = RetentionSearch(self._problem, self._current)
        if not retention.candidates:
            self._in_vain = _MOST_IN_VAIN
            return None
        free = self._part(retention)
        program = RetentionProgram(retention, self._budget, free, retention.possible(free, self._size))
        limit = min(seconds, _MOST_SECONDS) if math.isfinite(seconds) else seconds
        found, is_best = program.improved(limit, _MOST_NODES, stop)
        self._size = max(_SMALLEST_SIZE, round(self._size * (_LARGER if is_best else _SMALLER)))
        self._in_vain = self._in_vain + 1 if found is None else 0
        self._current = found or self._current
        return found

    def _part(self, retention: RetentionSearch) -> set[int]:
        """Some runs of neighbouring candidates, with about as many repeats as a part should have."""
        candidates = retention.candidates
        starts = [self._random.randrange(len(candidates)) for _ in range(self._random.choice(_STARTS))]

        def of_width(width: int) -> set[int]:
            return {candidates[(start + k) % len(candidates)] for start in starts for k in range(width)}

        low, high = 1, len(candidates) // len(starts) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if len(retention.possible(of_width(middle))) <= self._size:
                low = middle
            else:
                high = middle - 1
        return of_width(low)
