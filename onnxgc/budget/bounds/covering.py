"""Lower bounds on extra time: what must be out of memory at some moment must be computed again later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, gcd, isfinite

import numpy as np

from onnxgc.budget.bounds.forced_memory import ForcedMemory, IntArray, spread
from onnxgc.budget.bounds.integer_programs import CoveringProgram, CoveringSolution
from onnxgc.budget.bounds.recompute_closure import RecomputeClosures, Runs
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence

MOST_ROWS = 160
"""Moments that a bound looks at; of more, those are taken that ask most, part by part."""
SMALL_SHARE = 20_000
"""What is smaller than the budget by this factor has no columns of its own."""
_LARGEST_EXACT = 1 << 52
"""Above it floating-point numbers pass over whole ones."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A storage that is not in memory between two of its uses, operators `after` and `before`.

    `before` is the number of operators where the next use is the end.
    """

    storage: int
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class CoveringBound:
    """No sequence under the budget takes less extra time than `extra`.

    `gaps` is a set of gaps that costs about as much, empty where none was found. `impossible_at` is an
    operator at which no sequence fits.
    """

    extra: int
    gaps: tuple[Gap, ...] = ()
    impossible_at: int | None = None


def fixed_order_bound(problem: OperatorProblem, budget: int, time_limit: float) -> CoveringBound:
    """The bound for sequences whose first runs come in the given order (docs/rematerialisation.md)."""
    timeline = np.asarray(simulate_sequence(problem, range(len(problem))).timeline) - _idle_outputs(problem)
    over = np.flatnonzero(timeline > budget)
    if not len(over):
        return CoveringBound(0)
    program = CoveringProgram()
    unit = duration_unit(problem)
    runs = Runs(problem, program, unit)
    cones = RecomputeClosures(problem)
    excess = timeline[over] - budget
    gaps: list[Gap] = []
    spans: list[tuple[int, int]] = []
    columns: list[int] = []
    last = [readers[-1] if readers else -1 for readers in problem.readers]
    for storage, producer in enumerate(problem.producer):
        if not problem.operations[producer].may_repeat:
            continue
        for first, start, end in _gaps_of(problem, storage):
            low, high = np.searchsorted(over, (start, end))
            if low == high:
                continue
            if is_small(problem.sizes[storage], budget):
                excess[low:high] -= problem.sizes[storage]
                continue
            gaps.append(Gap(storage, first, end))
            spans.append((int(low), int(high)))
            columns.append(program.column(0.0))
            runs.require(storage, columns[-1], cones.of(storage, partial(_ends_before, last, start)))
    runs.bind()
    low, high = np.asarray(spans, np.int64).reshape(-1, 2).T
    sizes = np.asarray([problem.sizes[gap.storage] for gap in gaps], np.int64)
    for row in _telling_rows(excess, set(low.tolist()), set(high.tolist())):
        covering = np.flatnonzero((low <= row) & (row < high))
        if sizes[covering].sum() < excess[row]:
            return CoveringBound(0, impossible_at=int(over[row]))
        weights = np.minimum(1.0, sizes[covering] / excess[row])
        program.require(np.asarray(columns)[covering], weights, 1.0)
    found = program.solved(time_limit) if program.rows else None
    if found is None:
        return CoveringBound(0)
    chosen: tuple[Gap, ...] = ()
    if found.values is not None:
        chosen = tuple(gap for gap, column in zip(gaps, columns, strict=True) if found.values[column] > 0.5)
    return CoveringBound(rounded_bound(found, program, unit), chosen)


def _ends_before(last: Sequence[int], step: int, storage: int) -> bool:
    return bool(last[storage] < step)


def is_small(size: int, budget: int) -> bool:
    """Whether so much hardly matters: bounds take it as gone at no cost whenever it could be."""
    return size * SMALL_SHARE < budget


def _idle_outputs(problem: OperatorProblem) -> IntArray:
    """For each operator the bytes that it writes for nobody, only since a later output is read.

    A run that leaves the later one out leaves these out too.
    """
    idle = np.zeros(len(problem), np.int64)
    for index, operation in enumerate(problem.operations):
        waiting = 0
        for storage in operation.writes[operation.fewest :]:
            if problem.readers[storage] or storage in problem.kept:
                idle[index] += waiting
                waiting = 0
            else:
                waiting += problem.sizes[storage]
    return idle


def _gaps_of(problem: OperatorProblem, storage: int) -> Iterable[tuple[int, int, int]]:
    """Gaps of a storage in the given order: its use, the first step that is relieved, the next use.

    The use itself is relieved where it works in place on a storage that ends there, or where it
    may leave the output out.
    """
    producer = problem.producer[storage]
    uses = [producer, *problem.readers[storage]]
    if storage in problem.kept:
        uses.append(len(problem))
    for use, following in pairwise(uses):
        operation = problem.operations[use]
        relieved = operation.in_place == storage or (
            use == producer and storage in operation.writes[operation.fewest :]
        )
        yield use, use if relieved else use + 1, following


def _telling_rows(excess: IntArray, starts: set[int], ends: set[int]) -> list[int]:
    """The rows that ask for something, and that do not follow from the one beside them.

    That is one which asks as much, of no other gaps. `starts` and `ends` are the rows at which gaps
    begin, and before which they end. Of many rows some are taken.
    """
    asked = excess.tolist()
    count = len(asked)
    rows = [
        row
        for row in range(count)
        if asked[row] > 0 and not (row + 1 < count and row + 1 not in starts and asked[row + 1] >= asked[row])
    ]
    telling = np.zeros(count, np.int64)
    for before, row in zip([-1, *rows], rows, strict=False):
        if before < 0 or any(at in ends for at in range(before + 1, row + 1)) or asked[before] < asked[row]:
            telling[row] = asked[row]
    return spread(telling, MOST_ROWS)


def duration_unit(problem: OperatorProblem) -> int:
    """The largest number that divides all durations."""
    return gcd(*(operation.duration for operation in problem.operations)) or 1


def rounded_bound(found: CoveringSolution, program: CoveringProgram, unit: int) -> int:
    """A bound in whole units of time, a little lower where the solver's arithmetic is not exact."""
    if found.optimal and found.values is not None:
        exact = sum(
            cost * round(value) for cost, value in zip(program.costs, found.values, strict=True) if cost
        )
        if exact < _LARGEST_EXACT and found.bound >= exact * (1 - 1e-6) - 1e-6:
            return int(exact) * unit
    if not isfinite(found.bound):
        return 0
    return max(0, ceil(found.bound * (1 - 1e-6) - 1e-6)) * unit


def free_order_bound(problem: OperatorProblem, budget: int, time_limit: float) -> CoveringBound:
    """The bound for any order of first runs (docs/rematerialisation.md).

    At the first run of an operator it counts only what every order has computed by then and needs later.
    """
    timeline = np.asarray(simulate_sequence(problem, range(len(problem))).timeline)
    forced = ForcedMemory(problem, spread(timeline - budget, 3 * MOST_ROWS))
    excess = forced.least_held - budget
    program = CoveringProgram()
    unit = duration_unit(problem)
    chains = _Chains(problem, program, forced, unit)
    for row in spread(excess, MOST_ROWS):
        if not chains.require(row, int(excess[row]), budget):
            return CoveringBound(0, impossible_at=forced.moments[row])
    if not program.rows:
        return CoveringBound(0)
    chains.runs.bind()
    found = program.solved(time_limit)
    return CoveringBound(0 if found is None else rounded_bound(found, program, unit))


class _Chains:
    """For each storage a chain of its uses, and a column for each gap in it.

    A storage that is out of memory at some moment must be computed again before the next use in the
    chain that is forced to come later; of those between the last use that has been and that one,
    nobody knows which gap it is. One that nothing is forced to read later may be computed again when
    all its readers have run, for what was made from it: that is the gap behind all others.
    """

    def __init__(
        self, problem: OperatorProblem, program: CoveringProgram, forced: ForcedMemory, unit: int
    ) -> None:
        self._problem, self._program, self._forced = problem, program, forced
        self.runs = Runs(problem, program, unit)
        self._cones = RecomputeClosures(problem)
        self._columns: dict[tuple[int, int], int] = {}
        """By storage and place in the chain."""
        self._either: dict[tuple[int, int, int], int] = {}
        """By storage and range of gaps: the column that says one of these is not bridged."""

    def require(self, row: int, excess: int, budget: int) -> bool:
        """At a moment, storages that hold `excess` or more are not in memory; False if there are none."""
        found: list[tuple[int, int]] = []
        for storage, held in self._forced.items(row):
            if not self._problem.operations[self._problem.producer[storage]].may_repeat:
                continue
            if is_small(held, budget):
                excess -= held
            else:
                found.append((storage, held))
        if sum(held for _, held in found) < excess:
            return False
        if excess > 0:
            columns = [self._column(storage, row) for storage, _ in found]
            self._program.require(columns, [min(1.0, held / excess) for _, held in found], 1.0)
        return True

    def _column(self, storage: int, row: int) -> int:
        """The column that says a storage is computed again after a moment."""
        chain = self._forced.chain(storage)
        begun, later = self._forced.begun, self._forced.later
        first = max((place for place, use in enumerate(chain) if begun[use, row]), default=0)
        everything = len(chain) if self._forced.is_wanted(storage, row) else len(chain) + 1
        end = next((place for place in range(first + 1, len(chain)) if later[chain[place], row]), everything)
        for place in range(first, end):
            if (storage, place) not in self._columns:
                column = self._program.column(0.0)
                self._columns[storage, place] = column
                cone = self._cones.of(storage, self._is_dead_with(storage))
                self.runs.require(storage, column, cone, is_dead=place == len(chain))
        if end == first + 1:
            return self._columns[storage, first]
        if (storage, first, end) not in self._either:
            either = self._program.column(0.0)
            gaps = [self._columns[storage, place] for place in range(first, end)]
            self._program.require([either, *gaps], [-1.0, *(1.0 for _ in gaps)], 0.0)
            self._either[storage, first, end] = either
        return self._either[storage, first, end]

    def _is_dead_with(self, storage: int) -> Callable[[int], bool]:
        """Whether all that reads another storage has run when this one is there, in every order."""
        producer = self._problem.producer[storage]
        operation = self._problem.operations[producer]
        before = self._forced.ancestors(producer) | 1 << producer
        if storage in operation.writes[operation.fewest :]:
            # It may be missing already while its operator runs, whose inputs are there.
            before = self._forced.ancestors(producer)
        return lambda read: all(before >> reader & 1 for reader in self._problem.readers[read])
