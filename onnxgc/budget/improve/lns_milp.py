"""Large neighbourhood search: integer programs of retention for parts of a sequence within the budget.

Operators keep the order of their first runs. Before each first run others may be rerun, in the same
order: the *group* of that run. A storage has an *event* in each group in which it may be read or
rewritten. Its retention from one event to the next is a column of the program, and so is each run that is
not a first one; live bytes at each point of time make a row.

Only the outputs of some operators are free; the rest stays as in the sequence. So the program of a part
can be solved to optimality in a problem of any size. Where a row cannot count live bytes exactly it
overestimates them, so that every solution is within the budget.
"""

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
"""A run: its group and its operator's position, or for a first run the number of operators."""
_MAX_DEPTH = 40
"""Operators that may be rerun one after another, each for the next."""
_FIRST_SIZE = 400
_MIN_SIZE = 60
"""Possible reruns in the program of a part: at first, and at least."""
_LARGER, _SMALLER = 1.05, 0.85
"""Size of the next part relative to one that was solved to optimality, and to one that was not."""
_MAX_NODES = 10
_GAP = 1e-3
_MAX_SECONDS = 2.0
_MAX_FAILURES = 15
_INTERVALS = (1, 2, 4, 8)
"""Numbers of intervals of neighbouring operators that make a part."""


class GroupedSequence:
    """A sequence in groups. Positions count operators in the order of their first runs.

    Attributes:
        repeats: the runs that are not first ones.
        uses: for each storage, the groups whose first run reads it, and the number of operators if
            it is kept to the end.
        candidates: positions of operators that may be rerun: none that takes longer than those that are.
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
            sorted(self._position[reader] for reader in readers) + ([self.count] if storage in problem.kept else [])
            for storage, readers in enumerate(problem.readers)
        ]
        longest = max((self.operator(position).duration for _, position in self.repeats), default=0)
        self.candidates = [
            position
            for position in range(self.count)
            if self.operator(position).may_repeat and self.operator(position).duration <= longest
        ]

    def operator(self, position: int) -> ProblemOperator:
        return self.problem.operators[self._order[position]]

    def operator_at(self, point: Point) -> ProblemOperator:
        group, position = point
        return self.operator(group if position == self.count else position)

    def producer(self, storage: int) -> int:
        """The position of the operator that writes a storage."""
        return self._position[self.problem.producer[storage]]

    def duration(self, repeats: Collection[Point]) -> int:
        return sum(self.operator(position).duration for _, position in repeats)

    def points(self, repeats: Collection[Point]) -> list[Point]:
        """All first runs and the repeats, in order."""
        return sorted([*repeats, *((group, self.count) for group in range(self.count))])

    def sequence(self, repeats: Collection[Point]) -> list[int]:
        points = self.points(repeats)
        return [self._order[group if position == self.count else position] for group, position in points]

    def possible(self, free: Collection[int], max_count: int | None = None) -> set[Point]:
        """Repeats of the `free` positions: before later uses, and before other repeats that read them.

        If there are more than `max_count`, those needed only through long chains of other repeats are
        omitted. The
        repeats of the sequence are always included.
        """
        level: set[Point] = set()
        for position in free:
            for storage in self.operator(position).writes:
                last = position
                for use in self.uses[storage] if self.problem.sizes[storage] else ():
                    if use - last > 1:
                        level.add((use, position))
                    last = use
        allowed = set(free) & set(self.candidates)
        repeats = {repeat for repeat in self.repeats if repeat[1] in free}
        for _ in range(_MAX_DEPTH):
            level = {repeat for repeat in level if repeat[1] in allowed} - repeats
            if not level or (max_count is not None and len(repeats) + len(level) > max_count):
                break
            repeats |= level
            level = {
                (group, self.producer(storage))
                for group, position in level
                for storage in self.operator(position).reads
            }
        return repeats

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
class _Retention:
    """A column with `size` live bytes at the indices from `begin` to before `end`."""

    column: int
    begin: int
    end: int
    size: int


class RetentionProgram:
    """The program for the outputs of the operators at the `free` positions, with the `possible` repeats."""

    def __init__(
        self, grouped: GroupedSequence, budget: int, free: Collection[int], possible: Collection[Point]
    ) -> None:
        self._grouped = grouped
        self._free = frozenset(free)
        self._fixed = {repeat for repeat in grouped.repeats if repeat[1] not in self._free}
        self._points = grouped.points({*self._fixed, *possible})
        self._index = {point: index for index, point in enumerate(self._points)}
        self._program = CoveringProgram()
        self._repeat = {
            repeat: self._program.column(grouped.operator_at(repeat).duration) for repeat in sorted(possible)
        }
        self._readers: dict[Point, list[int]] = defaultdict(list)
        """By group and storage, the positions of repeats that may read it there."""
        for group, position in (*self._fixed, *self._repeat):
            for storage in grouped.operator(position).reads:
                self._readers[group, storage].append(position)
        self._retentions: list[_Retention] = []
        self._start: dict[int, float] = {
            column: float(repeat in grouped.repeats) for repeat, column in self._repeat.items()
        }
        fixed = _FixedMemory(grouped, self._points, self._free)
        self._fixed_bytes = fixed.bytes
        for repeat in self._repeat:
            self._add_run(repeat, fixed)
        for position in sorted(self._free):
            for number, storage in enumerate(grouped.operator(position).writes):
                self._add_storage(position, storage, number)
        self._add_memory(budget)

    def improve(
        self, seconds: float, max_nodes: int | None = None, stop: Event | None = None
    ) -> tuple[list[int] | None, bool]:
        """A sequence of less duration, if there is one, and whether no better one exists."""
        if not self._repeat:
            return None, True
        grouped = self._grouped
        start = [self._start[column] for column in range(len(self._program.costs))]
        solution = self._program.solve(seconds, start=start, max_nodes=max_nodes, gap=_GAP, stop=stop)
        if solution is None or solution.values is None:
            return None, False
        chosen = {repeat for repeat, column in self._repeat.items() if solution.values[column] > 0.5}
        repeats = self._fixed | chosen
        if grouped.duration(repeats) >= grouped.duration(grouped.repeats):
            return None, solution.optimal
        return grouped.sequence(repeats), solution.optimal

    def _add_run(self, repeat: Point, fixed: "_FixedMemory") -> None:
        """Add the workspace of a repeat; exclude the repeat if an input that is not free is not live."""
        grouped, index, column = self._grouped, self._index[repeat], self._repeat[repeat]
        operator = grouped.operator_at(repeat)
        if operator.workspace:
            self._retentions.append(_Retention(column, index, index + 1, operator.workspace))
        others = (read for read in operator.reads if grouped.producer(read) not in self._free)
        if not all(fixed.is_live(storage, index) for storage in others):
            self._program.require([column], [-1.0], 0.0)

    def _add_storage(self, producer: int, storage: int, number: int) -> None:
        """Add columns for the retention of a storage from event to event, with their conditions and bytes."""
        grouped, require = self._grouped, self._program.require
        size, uses = grouped.problem.sizes[storage], set(grouped.uses[storage])
        operator = grouped.operator(producer)
        first = self._index[producer, grouped.count]
        if number < operator.min_writes or any(grouped.uses[later] for later in operator.writes[number:]):
            self._fixed_bytes[first] += size
        read_in = {group for group, one in self._readers if one == storage}
        events = sorted(read_in | uses | {group for group, position in self._repeat if position == producer})
        columns = [self._program.column(0.0) for _ in events]
        begin = first + 1
        for event, (group, kept) in enumerate(zip(events, columns, strict=True)):
            rerun = self._repeat.get((group, producer))
            readers = self._readers.get((group, storage), [])
            end = self._end_of_reads(storage, group, readers, begin)
            if rerun is not None:
                index = self._index[group, producer]
                end = max(end, index + 1)
                self._retentions.append(_Retention(rerun, index, end, size))
            self._retentions.append(_Retention(kept, begin, end, size))
            begin = end
            present = [kept] if rerun is None else [kept, rerun]
            ones = [1.0] * len(present)
            if group in uses or any((group, reader) in self._fixed for reader in readers):
                require(present, ones, 1.0)
            else:
                for reader in readers:
                    require([*present, self._repeat[group, reader]], [*ones, -1.0], 0.0)
            if event + 1 < len(columns):
                require([*present, columns[event + 1]], [*ones, -1.0], 0.0)
        needed = False
        for group, kept in zip(reversed(events), reversed(columns), strict=True):
            readers = self._readers.get((group, storage), [])
            needed = needed or group in uses or any((group, one) in grouped.repeats for one in readers)
            needed = needed and (group, producer) not in grouped.repeats
            self._start[kept] = float(needed)

    def _end_of_reads(self, storage: int, group: int, readers: Sequence[int], otherwise: int) -> int:
        """The index before which a storage must be live for a group's reads.

        It excludes the last read if it may overwrite the storage in place: its output accounts for the
        memory.
        """
        grouped = self._grouped
        if group == grouped.count:
            return len(self._points)
        if group in grouped.uses[storage]:
            last = (group, grouped.count)
        elif readers:
            last = (group, max(readers))
        else:
            return otherwise
        return self._index[last] + (grouped.operator_at(last).in_place != storage)

    def _add_memory(self, budget: int) -> None:
        """Add a row for each interval of indices within which no column begins or ends."""
        count = len(self._points)
        ends = {bound for retention in self._retentions for bound in (retention.begin, retention.end)}
        bounds = [bound for bound in sorted({0} | ends) if bound < count]
        row_at = {bound: row for row, bound in enumerate(bounds)} | {count: len(bounds)}
        rows: list[dict[int, int]] = [{} for _ in bounds]
        for retention in self._retentions:
            for row in rows[row_at[retention.begin] : row_at[retention.end]]:
                row[retention.column] = row.get(retention.column, 0) + retention.size
        highest = np.maximum.reduceat(np.asarray(self._fixed_bytes), bounds).tolist()
        for fixed, row in zip(highest, rows, strict=True):
            room = budget - fixed
            if sum(row.values()) > room:
                unit = max(row.values(), default=1) or 1
                self._program.require(list(row), [-size / unit for size in row.values()], -room / unit)


class _FixedMemory:
    """Live bytes of a sequence, by index, of storages that operators outside `free` write.

    They include workspaces, except those of free repeats.
    """

    def __init__(self, grouped: GroupedSequence, points: Sequence[Point], free: frozenset[int]) -> None:
        problem = grouped.problem
        copies: dict[int, list[list[int]]] = defaultdict(list)
        """By storage, the first and the last index of each copy."""
        change = [0] * (len(points) + 2)
        reused: list[tuple[int, int, list[int]]] = []
        for index, point in enumerate(points):
            is_first = point[1] == grouped.count
            if not is_first and point not in grouped.repeats:
                continue
            operator = grouped.operator_at(point)
            for storage in operator.reads:
                if copies[storage]:
                    copies[storage][-1][1] = index
            if operator.in_place is not None and copies[operator.in_place]:
                reused.append((index, problem.sizes[operator.in_place], copies[operator.in_place][-1]))
            is_free = point[0 if is_first else 1] in free
            if is_first or not is_free:
                change[index] += operator.workspace
                change[index + 1] -= operator.workspace
            for storage in () if is_free else operator.writes:
                copies[storage].append([index, index])
        for storage in problem.kept:
            if copies[storage]:
                copies[storage][-1][1] = len(points)
        for storage, intervals in copies.items():
            for first, last in intervals:
                change[first] += problem.sizes[storage]
                change[last + 1] -= problem.sizes[storage]
        for index, size, copy in reused:
            if copy[1] == index:
                change[index] -= size
                change[index + 1] += size
        self.bytes = np.cumsum(change[: len(points)]).tolist()
        self._copies = copies

    def is_live(self, storage: int, index: int) -> bool:
        return any(first < index <= last for first, last in self._copies[storage])


class PartSearch:
    """Solves the program of one part after another; the same seed and calls give the same results.

    Attributes:
        make_start: finds another sequence within the budget to begin from; None if it fails.
    """

    def __init__(self, problem: OperatorProblem, budget: int, seed: int) -> None:
        self.make_start: Callable[[Sequence[int]], list[int] | None] = lambda best: None
        self._problem = problem
        self._budget = budget
        self._random = random.Random(seed)
        self._size = _FIRST_SIZE
        self._current: list[int] | None = None
        self._failures = 0
        self._starts = 0

    def improve(self, best: Sequence[int], seconds: float, stop: Event | None = None) -> list[int] | None:
        """A sequence of less duration by another choice in one part, if it finds one.

        It begins from the best sequence and continues from its own results; after many failures it restarts,
        alternately from a new sequence and from the best. It stops after the given seconds, or, if these are
        infinite, after a constant number of nodes; or once `stop` is set.
        """
        if self._current is None or self._failures == _MAX_FAILURES:
            self._failures = 0
            self._current = (self.make_start(best) if self._starts % 2 else None) or list(best)
            self._starts += 1
        grouped = GroupedSequence(self._problem, self._current)
        if not grouped.candidates:
            self._failures = _MAX_FAILURES
            return None
        free = self._part(grouped)
        program = RetentionProgram(grouped, self._budget, free, grouped.possible(free, self._size))
        limit = min(seconds, _MAX_SECONDS) if math.isfinite(seconds) else seconds
        better, is_best = program.improve(limit, _MAX_NODES, stop)
        self._size = max(_MIN_SIZE, round(self._size * (_LARGER if is_best else _SMALLER)))
        self._failures = self._failures + 1 if better is None else 0
        self._current = better or self._current
        return better

    def _part(self, grouped: GroupedSequence) -> set[int]:
        """Random intervals of candidates, with about as many possible repeats as a part should have."""
        candidates = grouped.candidates
        starts = [self._random.randrange(len(candidates)) for _ in range(self._random.choice(_INTERVALS))]

        def of_width(width: int) -> set[int]:
            return {candidates[(start + k) % len(candidates)] for start in starts for k in range(width)}

        low, high = 1, len(candidates) // len(starts) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if len(grouped.possible(of_width(middle))) <= self._size:
                low = middle
            else:
                high = middle - 1
        return of_width(low)
