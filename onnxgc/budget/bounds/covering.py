"""Lower bounds on extra time: a storage that is not live at some moment must be recomputed for later uses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, gcd, isfinite

import numpy as np

from onnxgc.budget.bounds.forced_memory import ForcedMemory, IntArray, highest_of_parts
from onnxgc.budget.bounds.integer_programs import CoveringProgram, CoveringSolution
from onnxgc.budget.bounds.recompute_closure import RecomputeClosures, RerunCosts
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence

MAX_ROWS = 160
"""Maximum number of rows; with more candidates, the worst moment of each equal part of the step."""
SMALL_SHARE = 20_000
"""A storage smaller than the budget by this factor has no column."""
_MAX_EXACT = 1 << 52
"""Above it floating-point numbers skip integers."""


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval between two uses of a storage, operators `after` and `before`, in which it is not live.

    `before` is the number of operators if the storage is kept to the end.
    """

    storage: int
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class CoveringBound:
    """A lower bound on the extra time of every sequence within the budget.

    `gaps` is a set of gaps of about this cost, empty if none was found. `impossible_at` is an operator
    at which no sequence is within the budget.
    """

    extra: int
    gaps: tuple[Gap, ...] = ()
    impossible_at: int | None = None


def fixed_order_bound(problem: OperatorProblem, budget: int, time_limit: float) -> CoveringBound:
    """The bound for sequences whose first runs are in the given order (docs/rematerialisation.md)."""
    timeline = np.asarray(simulate_sequence(problem, range(len(problem))).timeline) - _idle_outputs(problem)
    over = np.flatnonzero(timeline > budget)
    if not len(over):
        return CoveringBound(0)
    program = CoveringProgram()
    unit = duration_unit(problem)
    runs = RerunCosts(problem, program, unit)
    closures = RecomputeClosures(problem)
    excess = timeline[over] - budget
    gaps: list[Gap] = []
    spans: list[tuple[int, int]] = []
    columns: list[int] = []
    last = [readers[-1] if readers else -1 for readers in problem.readers]
    for storage, producer in enumerate(problem.producer):
        if not problem.operators[producer].may_repeat:
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
            runs.require(storage, columns[-1], closures.needed_for(storage, partial(_ends_before, last, start)))
    runs.bind()
    low, high = np.asarray(spans, np.int64).reshape(-1, 2).T
    sizes = np.asarray([problem.sizes[gap.storage] for gap in gaps], np.int64)
    for row in _independent_rows(excess, set(low.tolist()), set(high.tolist())):
        covering = np.flatnonzero((low <= row) & (row < high))
        if sizes[covering].sum() < excess[row]:
            return CoveringBound(0, impossible_at=int(over[row]))
        weights = np.minimum(1.0, sizes[covering] / excess[row])
        program.require(np.asarray(columns)[covering], weights, 1.0)
    solution = program.solve(time_limit) if program.rows else None
    if solution is None:
        return CoveringBound(0)
    chosen: tuple[Gap, ...] = ()
    if solution.values is not None:
        chosen = tuple(gap for gap, column in zip(gaps, columns, strict=True) if solution.values[column] > 0.5)
    return CoveringBound(rounded_bound(solution, program, unit), chosen)


def _ends_before(last: Sequence[int], step: int, storage: int) -> bool:
    return bool(last[storage] < step)


def is_small(size: int, budget: int) -> bool:
    """Whether a size is negligible: bounds treat such storages as released for free."""
    return size * SMALL_SHARE < budget


def _idle_outputs(problem: OperatorProblem) -> IntArray:
    """For each operator the bytes of unread outputs that it writes only because a later output is read.

    A run that omits the later output omits these too.
    """
    idle = np.zeros(len(problem), np.int64)
    for index, operator in enumerate(problem.operators):
        waiting = 0
        for storage in operator.writes[operator.min_writes :]:
            if problem.readers[storage] or storage in problem.kept:
                idle[index] += waiting
                waiting = 0
            else:
                waiting += problem.sizes[storage]
    return idle


def _gaps_of(problem: OperatorProblem, storage: int) -> Iterable[tuple[int, int, int]]:
    """Gaps of a storage in the given order: the use before, the first moment without it, the next use.

    The previous use itself is the first such position if it overwrites the storage, or is the producer and
    may omit this output.
    """
    producer = problem.producer[storage]
    uses = [producer, *problem.readers[storage]]
    if storage in problem.kept:
        uses.append(len(problem))
    for use, following in pairwise(uses):
        operator = problem.operators[use]
        is_without = operator.in_place == storage or (
            use == producer and storage in operator.writes[operator.min_writes :]
        )
        yield use, use if is_without else use + 1, following


def _independent_rows(excess: IntArray, starts: set[int], ends: set[int]) -> list[int]:
    """The rows of positive excess that do not follow from a neighbour; some of them, if there are many.

    A row follows from a neighbour with at least its excess and no other gaps. `starts` are the rows at
    which gaps begin, `ends` those before which they end.
    """
    asked = excess.tolist()
    count = len(asked)
    rows = [
        row
        for row in range(count)
        if asked[row] > 0 and not (row + 1 < count and row + 1 not in starts and asked[row + 1] >= asked[row])
    ]
    independent = np.zeros(count, np.int64)
    for before, row in zip([-1, *rows], rows, strict=False):
        if before < 0 or any(at in ends for at in range(before + 1, row + 1)) or asked[before] < asked[row]:
            independent[row] = asked[row]
    return highest_of_parts(independent, MAX_ROWS)


def sequence_of_gaps(problem: OperatorProblem, gaps: Iterable[Gap]) -> list[int]:
    """Operators in the given order, each after the recomputation that it needs.

    A storage is recomputed right before the use that ends its gap, together with those of its inputs that
    are not live then.
    """
    count = len(problem)
    ending: dict[int, list[int]] = {}
    absent: dict[int, list[tuple[int, int]]] = {}
    for gap in gaps:
        ending.setdefault(gap.before, []).append(gap.storage)
        absent.setdefault(gap.storage, []).append((gap.after, gap.before))
    last = [readers[-1] if readers else problem.producer[s] for s, readers in enumerate(problem.readers)]
    for storage in problem.kept:
        last[storage] = count

    def is_live(storage: int, step: int) -> bool:
        return last[storage] >= step and not any(a < step <= b for a, b in absent.get(storage, ()))

    sequence: list[int] = []
    for step in range(count + 1):
        rerun: set[int] = set()
        missing = list(ending.get(step, ()))
        while missing:
            index = problem.producer[missing.pop()]
            if index not in rerun and problem.operators[index].may_repeat:
                rerun.add(index)
                missing.extend(s for s in problem.operators[index].reads if not is_live(s, step))
        sequence.extend(sorted(rerun))
        if step < count:
            sequence.append(step)
    return sequence


def duration_unit(problem: OperatorProblem) -> int:
    """The greatest common divisor of all durations."""
    return gcd(*(operator.duration for operator in problem.operators)) or 1


def rounded_bound(solution: CoveringSolution, program: CoveringProgram, unit: int) -> int:
    """A bound in whole units of time, slightly lower if the solver's arithmetic is not exact."""
    if solution.optimal and solution.values is not None:
        exact = sum(cost * round(value) for cost, value in zip(program.costs, solution.values, strict=True) if cost)
        if exact < _MAX_EXACT and solution.bound >= exact * (1 - 1e-6) - 1e-6:
            return int(exact) * unit
    if not isfinite(solution.bound):
        return 0
    return max(0, ceil(solution.bound * (1 - 1e-6) - 1e-6)) * unit


def free_order_bound(problem: OperatorProblem, budget: int, time_limit: float) -> CoveringBound:
    """The bound for any order of first runs (docs/rematerialisation.md).

    At the first run of an operator it counts only storages that every order computes before and reads later.
    """
    timeline = np.asarray(simulate_sequence(problem, range(len(problem))).timeline)
    forced = ForcedMemory(problem, highest_of_parts(timeline - budget, 3 * MAX_ROWS))
    excess = forced.min_bytes - budget
    program = CoveringProgram()
    unit = duration_unit(problem)
    chains = _Chains(problem, program, forced, unit)
    for row in highest_of_parts(excess, MAX_ROWS):
        if not chains.require(row, int(excess[row]), budget):
            return CoveringBound(0, impossible_at=forced.moments[row])
    if not program.rows:
        return CoveringBound(0)
    chains.runs.bind()
    solution = program.solve(time_limit)
    return CoveringBound(0 if solution is None else rounded_bound(solution, program, unit))


class _Chains:
    """For each storage a chain of its uses, and a column for each gap in it.

    A storage that is not live at some moment must be recomputed before the next use in the chain that is
    forced to come later. Any gap between the last use that has certainly run and that next use may contain
    the moment. A storage without a forced later reader may be recomputed after all its readers, to rerun
    operators that depend on it: the last gap of the chain.
    """

    def __init__(self, problem: OperatorProblem, program: CoveringProgram, forced: ForcedMemory, unit: int) -> None:
        self._problem, self._program, self._forced = problem, program, forced
        self.runs = RerunCosts(problem, program, unit)
        self._closures = RecomputeClosures(problem)
        self._columns: dict[tuple[int, int], int] = {}
        """By storage and index in the chain."""
        self._either: dict[tuple[int, int, int], int] = {}
        """(storage, first gap, end): the column that is 1 if any gap in the range is chosen."""

    def require(self, row: int, excess: int, budget: int) -> bool:
        """Require that storages of `excess` bytes are not live at a moment; False if that is impossible."""
        wanted: list[tuple[int, int]] = []
        for storage, size in self._forced.items(row):
            if not self._problem.operators[self._problem.producer[storage]].may_repeat:
                continue
            if is_small(size, budget):
                excess -= size
            else:
                wanted.append((storage, size))
        if sum(size for _, size in wanted) < excess:
            return False
        if excess > 0:
            columns = [self._column(storage, row) for storage, _ in wanted]
            self._program.require(columns, [min(1.0, size / excess) for _, size in wanted], 1.0)
        return True

    def _column(self, storage: int, row: int) -> int:
        """The column of a recomputation of a storage after a moment."""
        chain = self._forced.chain(storage)
        begun, later = self._forced.begun, self._forced.later
        first = max((index for index, use in enumerate(chain) if begun[use, row]), default=0)
        last = len(chain) if self._forced.is_wanted(storage, row) else len(chain) + 1
        end = next((index for index in range(first + 1, len(chain)) if later[chain[index], row]), last)
        for index in range(first, end):
            if (storage, index) not in self._columns:
                column = self._program.column(0.0)
                self._columns[storage, index] = column
                closure = self._closures.needed_for(storage, self._is_dead_with(storage))
                self.runs.require(storage, column, closure, is_dead=index == len(chain))
        if end == first + 1:
            return self._columns[storage, first]
        if (storage, first, end) not in self._either:
            either = self._program.column(0.0)
            gaps = [self._columns[storage, index] for index in range(first, end)]
            self._program.require([either, *gaps], [-1.0, *(1.0 for _ in gaps)], 0.0)
            self._either[storage, first, end] = either
        return self._either[storage, first, end]

    def _is_dead_with(self, storage: int) -> Callable[[int], bool]:
        """A predicate: whether every order has run all readers of a storage when this one is live."""
        producer = self._problem.producer[storage]
        operator = self._problem.operators[producer]
        before = self._forced.ancestors(producer) | 1 << producer
        if storage in operator.writes[operator.min_writes :]:
            # Its operator may omit it, and the operator's inputs are live then.
            before = self._forced.ancestors(producer)
        return lambda read: all(before >> reader & 1 for reader in self._problem.readers[read])
