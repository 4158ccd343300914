"""A lower bound by the live storages at a few moments, and sequences that meet it.

The moments are first runs of operators whose relative order is certain. An integer program decides which
storages are live at each of them, and which operators run in between (docs/rematerialisation.md). Its
cheapest solution becomes a sequence: if that is within the budget, it is optimal; else the first run with
the most memory in it becomes a moment too.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event

import numpy as np
from numpy.typing import NDArray

from onnxgc.budget.bounds.covering import duration_unit, is_small, rounded_bound
from onnxgc.budget.bounds.forced_memory import ancestors_of
from onnxgc.budget.bounds.integer_programs import CoveringProgram
from onnxgc.budget.operator_problem import OperatorProblem, settled, simulate_sequence
from onnxgc.planning.order_choice import Order

MAX_OPERATORS = 1_500
MAX_COLUMNS = 200_000
_MAX_WEIGHTS = 2_000_000
_CANDIDATES = 8
"""First runs that are compared before one becomes a moment."""
_LEAST_GAIN = 1.001
"""The factor by which a relaxed bound must exceed another to count as greater."""


@dataclass(frozen=True, slots=True)
class MomentFinding:
    """A lower bound on extra time, and a sequence that may exceed the budget, or None.

    `optimal`: the sequence is within the budget, and none has less extra time.
    """

    extra: int
    sequence: tuple[int, ...] | None
    optimal: bool = False


class MomentBound:
    """Bounds for more and more moments.

    In free order an operator becomes a moment only if it is an ancestor or a descendant of all others. In
    fixed order operators that wait for readers of a value which they replace (`settled`) are no moments.
    """

    def __init__(self, problem: OperatorProblem, budget: int, order: Order) -> None:
        self._problem, self._budget, self._order = problem, budget, order
        self._ancestors = ancestors_of(problem)
        self._waiting = 0
        for index, operator in enumerate(problem.operators):
            if self._ancestors[index] & self._waiting or not problem.marks.isdisjoint(operator.reads):
                self._waiting |= 1 << index
        self.moments: list[int] = []
        self._add_moment(range(len(problem)), 0.0, None)

    def findings(self, best_extra: int, seconds: float, stop: Event | None = None) -> Iterator[MomentFinding]:
        """A finding for each number of moments, until time is up or nothing more is to be found.

        `best_extra` is the extra time of a sequence within the budget, which limits the bounds. Stopped
        early, the last bound is the one proved so far.
        """
        end = time.perf_counter() + seconds
        while self.moments and (stop is None or not stop.is_set()) and time.perf_counter() < end:
            program = self._program(self.moments)
            if len(program.covering.costs) > MAX_COLUMNS:
                return
            finding = program.solved(best_extra, end - time.perf_counter(), stop)
            if finding is None:
                return
            yield finding
            if finding.sequence is None or finding.optimal:
                return
            if not self._add_moment(finding.sequence, end, stop):
                return

    def _windows(self, moments: Sequence[int]) -> tuple[list[int], list[int]]:
        """For each operator the first and the last interval in which its first run may be.

        Interval `k` ends right before the first run of moment `k`; the last one, at the end of the step.
        """
        last = len(moments)
        if self._order is Order.FIXED:
            early = [bisect_right(moments, index) for index in range(len(self._problem))]
            return early, [last if self._waiting >> index & 1 else place for index, place in enumerate(early)]
        early, late = [0] * len(self._problem), [last] * len(self._problem)
        for index, ancestors in enumerate(self._ancestors):
            for place, moment in enumerate(moments):
                if moment == index or ancestors >> moment & 1:
                    early[index] = place + 1
                if moment == index:
                    late[index] = place + 1
                elif self._ancestors[moment] >> index & 1:
                    late[index] = min(late[index], place)
        return early, late

    def _add_moment(self, sequence: Sequence[int], end: float, stop: Event | None) -> bool:
        """Make a first run with memory above the budget a moment; False if none can be.

        Of the worst in each part of the sequence, the one with the greatest relaxed bound.
        """
        timeline = simulate_sequence(self._problem, sequence).timeline
        first: dict[int, int] = {}
        for position, index in enumerate(sequence):
            first.setdefault(index, timeline[position])
        over = [index for index, size in first.items() if size > self._budget and self._may_be_moment(index)]
        if not over:
            return False
        worst = max(over, key=lambda index: (first[index], -index))
        chosen, best = worst, 0.0
        if self.moments:
            size = -(-len(over) // _CANDIDATES)
            parts = [over[start : start + size] for start in range(0, len(over), size)]
            candidates = [max(part, key=lambda index: (first[index], -index)) for part in parts]
            for candidate in dict.fromkeys([worst, *candidates]):
                value = self._program(sorted([*self.moments, candidate])).relaxed(end - time.perf_counter(), stop)
                if value > best * _LEAST_GAIN:
                    chosen, best = candidate, value
        insort(self.moments, chosen)
        return True

    def _program(self, moments: Sequence[int]) -> _MomentProgram:
        return _MomentProgram(self._problem, self._budget, moments, *self._windows(moments))

    def _may_be_moment(self, index: int) -> bool:
        if index in self.moments:
            return False
        if self._order is Order.FIXED:
            return not self._waiting >> index & 1
        return all(self._ancestors[max(index, other)] >> min(index, other) & 1 for other in self.moments)


@dataclass(slots=True)
class _MomentProgram:
    """The program of some moments.

    A column for each storage and moment: whether it is live there; and one for each operator and interval:
    whether it runs in it, besides a first run that is certain to be in it.
    """

    problem: OperatorProblem
    budget: int
    moments: Sequence[int]
    early: Sequence[int]
    late: Sequence[int]
    covering: CoveringProgram = field(default_factory=CoveringProgram)
    _runs: dict[tuple[int, int], int] = field(default_factory=dict)
    _live: dict[tuple[int, int], int] = field(default_factory=dict)
    _unit: int = 1
    _decided_later: int = 0
    """Time of the operators whose first run may be in several intervals, which is a cost of the program."""

    def __post_init__(self) -> None:
        self._unit = duration_unit(self.problem)
        for index in range(len(self.problem)):
            self._add_operator(index)
        for place in range(len(self.moments) + 1):
            self._add_memory(place)
        for (storage, place), column in self._live.items():
            self._need(storage, place, column)
        runs: list[tuple[int, int, int | None]] = [(*run, column) for run, column in self._runs.items()]
        runs += [(index, place, None) for index, place in enumerate(self.early) if self.late[index] == place]
        for index, place, first_column in runs:
            for storage in self.problem.operators[index].reads:
                self._need(storage, place, first_column)

    def _add_operator(self, index: int) -> None:
        operator, early, late = self.problem.operators[index], self.early[index], self.late[index]
        is_decided = early == late
        end = len(self.moments) + 1
        for place in range(early + is_decided, end if operator.may_repeat else late + 1 - is_decided):
            self._runs[index, place] = self.covering.column(operator.duration / self._unit)
        if not is_decided:
            self._decided_later += operator.duration
            places = [self._runs[index, place] for place in range(early, late + 1)]
            self.covering.require(places, [1.0] * len(places), 1.0)
        for storage in operator.writes:
            if not (is_decided and is_small(self.problem.sizes[storage], self.budget)):
                for place in range(early, end):
                    self._live[storage, place] = self.covering.column(0.0)

    def _add_memory(self, place: int) -> None:
        """Storages that a moment reads are live there; all live ones fit beside what it writes."""
        problem, room = self.problem, self.budget
        if place < len(self.moments):
            operator = problem.operators[self.moments[place]]
            reads: Sequence[int] = operator.reads
            room -= sum(problem.sizes[storage] for storage in operator.writes[: operator.min_writes])
            room -= operator.workspace
            if operator.in_place is not None:
                room += problem.sizes[operator.in_place]
        else:
            reads = tuple(problem.kept)
        for storage in reads:
            if (storage, place) in self._live:
                self.covering.require([self._live[storage, place]], [1.0], 1.0)
        live = [
            (column, problem.sizes[storage])
            for storage in range(len(problem.sizes))
            if (column := self._live.get((storage, place))) is not None and problem.sizes[storage]
        ]
        if sum(size for _, size in live) > room:
            unit = max(size for _, size in live)
            columns, sizes = zip(*live, strict=True)
            self.covering.require(columns, [-size / unit for size in sizes], -room / unit)

    def _need(self, storage: int, place: int, column: int | None) -> None:
        """If a column is 1 (None: always), a storage was live before an interval, or is written in it."""
        producer = self.problem.producer[storage]
        if self.early[producer] == self.late[producer]:
            is_free = is_small(self.problem.sizes[storage], self.budget)
            if place == self.early[producer] or is_free:
                return
        sources = [self._live.get((storage, place - 1)), self._runs.get((producer, place))]
        columns = [source for source in sources if source is not None]
        weights = [1.0] * len(columns)
        if column is None:
            self.covering.require(columns, weights, 1.0)
        else:
            self.covering.require([*columns, column], [*weights, -1.0], 0.0)

    def relaxed(self, seconds: float, stop: Event | None) -> float:
        """The value of the program with free columns; 0 if there was no time."""
        solution = self.covering.solve(seconds, stop=stop, max_presolved=_MAX_WEIGHTS, relaxed=True)
        return solution.bound - self._decided_later / self._unit if solution is not None and solution.optimal else 0.0

    def solved(self, best_extra: int, seconds: float, stop: Event | None) -> MomentFinding | None:
        costs = [(column, cost) for column, cost in enumerate(self.covering.costs) if cost]
        if not costs:
            return None
        limit = (best_extra + self._decided_later) / self._unit + 0.5
        columns, weights = zip(*costs, strict=True)
        self.covering.require(columns, [-weight for weight in weights], -limit)
        solution = self.covering.solve(seconds, stop=stop, max_presolved=_MAX_WEIGHTS)
        if solution is None:
            return None
        extra = rounded_bound(solution, self.covering, self._unit) - self._decided_later
        sequence = None if solution.values is None else self._sequence(solution.values)
        is_optimal = False
        if sequence is not None:
            profile = simulate_sequence(self.problem, settled(self.problem, sequence))
            is_optimal = profile.peak <= self.budget and profile.duration - self.problem.duration <= extra
        return MomentFinding(min(best_extra, max(extra, 0)), sequence, is_optimal)

    def _sequence(self, values: NDArray[np.float64]) -> tuple[int, ...] | None:
        """Operators in the given order within each interval, each after the reruns that it needs."""
        problem = self.problem
        first = list(self.early)
        again: list[set[int]] = [set() for _ in range(len(self.moments) + 1)]
        for index, place in enumerate(self.early):
            places = range(place, self.late[index] + 1)
            if len(places) > 1:
                first[index] = next(k for k in places if values[self._runs[index, k]] > 0.5)
        for (index, place), column in self._runs.items():
            if place > first[index] and values[column] > 0.5 and problem.operators[index].may_repeat:
                again[place].add(index)
        sequence: list[int] = []

        def run(index: int, rerun: set[int]) -> None:
            for storage in problem.operators[index].reads:
                if problem.producer[storage] in rerun:
                    rerun.discard(problem.producer[storage])
                    run(problem.producer[storage], rerun)
            sequence.append(index)

        for place, rerun in enumerate(again):
            for index in range(len(problem)):
                if first[index] == place:
                    run(index, rerun)
            while rerun:
                run(rerun.pop(), rerun)
        return tuple(sequence)
