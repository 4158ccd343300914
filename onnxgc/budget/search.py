"""Least extra time under a memory budget, with a bound that proves how far from the best a sequence can be.

First what needs no search: the bounds (`covering`) and the sequence that the fixed-order bound's own
choice of gaps stands for. Where that meets the bound it is optimal. Else a greedy repair, and from
the best of both a search of neighbourhoods: some recomputation is taken out and put in anew. In free
order runs are moved too. Effort is counted in rounds; a time limit only stops after one of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from onnxgc.budget.bounds.covering import CoveringBound, fixed_order_bound, free_order_bound
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.bounds.residency import MOST_OPERATORS, residency_bound
from onnxgc.budget.improve.gap_sequence import sequence_of_gaps
from onnxgc.budget.improve.lns_milp import Parts
from onnxgc.budget.improve.removable_runs import without_needless_repeats
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.planning.order import Order
from onnxgc.planning.plan import Status

if TYPE_CHECKING:
    from onnxgc.budget.improve.local_moves import LocalMoves

logger = logging.getLogger(__name__)

DEFAULT_TIME_LIMIT_SECONDS = 30.0
_BOUND_SHARE = 0.2
"""Of the time limit, what each bound may take."""
_ROUNDS_A_PART = 4
"""Rounds beside which one part's program is solved, where rounds are counted."""
_SECONDS_BESIDE_COMPILING = 0.5
"""What one part may take while the compiler is at work."""
_MOST_REPEATS = 4
"""A sequence has at most so many times as many runs as there are operators."""


COMPILING = "preparing the search, which is compiled once on a machine: that takes up to a minute"


def ignore_progress(stage: str) -> None:
    """For searches that nobody watches."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A sequence that was the best so far: when it was found, its extra time, and how."""

    seconds: float
    extra: int
    how: str


@dataclass(frozen=True, slots=True)
class BudgetedSequence:
    """A sequence within the budget, and how far from the best it can be.

    `extra` is its time beyond that of running every operator once, `lower_bound` what no sequence
    within the budget goes below, both in the problem's unit. `interrupted` says that a user ended the
    search (Ctrl-C).
    """

    sequence: tuple[int, ...]
    peak: int
    duration: int
    extra: int
    lower_bound: int
    seconds: float
    history: tuple[Improvement, ...] = ()
    interrupted: bool = False

    @property
    def status(self) -> Status:
        return Status.OPTIMAL if self.extra <= self.lower_bound else Status.FEASIBLE

    @property
    def gap(self) -> float:
        """What could still be saved, as a share of the total time."""
        return max(0, self.extra - self.lower_bound) / self.duration if self.duration else 0.0

    @property
    def gap_of_extra(self) -> float:
        """The same as a share of the extra time."""
        return max(0, self.extra - self.lower_bound) / self.extra if self.extra else 0.0


@dataclass(frozen=True, slots=True)
class NoSequence:
    """No sequence within the budget was found.

    `impossible` says that there is none: `operator` alone, with what every sequence has in memory
    beside it, takes `floor` bytes. Else `floor` is what is known to be needed.
    """

    floor: int
    operator: int
    impossible: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How long and how to search.

    `most_rounds` stops after so many rounds of the search of neighbourhoods: with it and without a
    time limit the result depends on the seed alone. `enough` is an extra time at which to stop: when
    a sequence takes no more, or when the bound says that none will. `tell` hears what is being done, and the
    best extra time and the bound.
    """

    order: Order = Order.FREE
    time_limit_seconds: float | None = DEFAULT_TIME_LIMIT_SECONDS
    most_rounds: int | None = None
    seed: int = 0
    enough: int | None = None
    tell: Callable[[str], None] = field(default=ignore_progress, repr=False)


def compile_loops(tell: Callable[[str], None] = ignore_progress) -> float:
    """Have the search's inner loops compiled where they are not yet; the seconds that it took now.

    A machine does so once and keeps the result on disk; no time limit counts it. `tell` hears of it first.
    """
    from onnxgc.budget.improve import local_moves

    if not local_moves.run_all_loops.cache_info().currsize:
        tell(COMPILING)
    started = time.perf_counter()
    local_moves.run_all_loops()
    return time.perf_counter() - started


def search_stage(extra: float | None, bound: float) -> str:
    """The best extra time and the bound in words, as shares of the time without recomputation."""
    best = "no plan yet" if extra is None else f"{100 * extra:.3f} % extra time"
    return f"planning: {best}, at least {100 * bound:.3f} %"


def within_budget(
    problem: OperatorProblem,
    budget: int,
    options: SearchOptions | None = None,
    starts: Iterable[Sequence[int]] = (),
) -> BudgetedSequence | NoSequence:
    """The sequence of least duration found whose peak is no more than the budget.

    `starts` are sequences worth trying, from neighbouring budgets or from other solvers; in a fixed
    order those in another are passed over.
    """
    return _Search(problem, budget, options or SearchOptions()).run(starts)


class _Search:
    def __init__(self, problem: OperatorProblem, budget: int, options: SearchOptions) -> None:
        self._problem = problem
        self._budget = budget
        self._options = options
        self._started = time.perf_counter()
        limit = options.time_limit_seconds
        self._deadline = math.inf if limit is None else self._started + limit
        self._best: tuple[int, ...] | None = None
        self._best_extra = 0
        self._bound = 0
        self._history: list[Improvement] = []

    def run(self, starts: Iterable[Sequence[int]]) -> BudgetedSequence | NoSequence:
        problem = self._problem
        floor = floor_of_problem(problem)
        if floor.size > self._budget:
            return self._none(floor.size, floor.operator, impossible=True)
        interrupted = False
        try:
            impossible_at = self._search(starts)
        except KeyboardInterrupt:
            # The best so far is what is wanted then.
            if self._best is None:
                raise
            impossible_at, interrupted = None, True
        if self._best is None:
            if impossible_at is not None:
                return self._none(self._budget + 1, impossible_at, impossible=True)
            return self._none(floor.size, floor.operator, impossible=False)
        profile = simulate_sequence(problem, self._best)
        assert profile.peak <= self._budget, "every sequence offered was judged"
        return BudgetedSequence(
            self._best,
            profile.peak,
            profile.duration,
            profile.duration - problem.duration,
            min(self._bound, self._best_extra),
            self._elapsed(),
            tuple(self._history),
            interrupted,
        )

    def _none(self, floor: int, operator: int, *, impossible: bool) -> NoSequence:
        return NoSequence(floor, operator, impossible, self._elapsed())

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _is_over(self) -> bool:
        return self._is_settled() or time.perf_counter() >= self._deadline

    def _is_settled(self) -> bool:
        """Whether more of a search would tell nothing that is asked for."""
        enough = self._options.enough
        if enough is not None and self._bound > enough:
            return True
        return self._best is not None and self._best_extra <= max(self._bound, enough or 0)

    def _is_enough(self) -> bool:
        """Whether the search may end: nothing more is to be told, or time is up and something was found."""
        return self._is_settled() or (self._best is not None and self._is_over())

    def _offer(self, sequence: Sequence[int], how: str) -> bool:
        """Take a sequence as the best so far if it is; whether it keeps to the budget."""
        profile = simulate_sequence(self._problem, sequence)
        if profile.peak > self._budget:
            return False
        extra = profile.duration - self._problem.duration
        if self._best is None or extra < self._best_extra:
            self._best, self._best_extra = tuple(sequence), extra
            self._history.append(Improvement(self._elapsed(), extra, how))
            self._tell()
        return True

    def _raise_bound(self, bound: CoveringBound) -> None:
        self._bound = max(self._bound, bound.extra)
        self._tell()

    def _tell(self) -> None:
        unit = self._problem.duration or 1
        best = None if self._best is None else self._best_extra / unit
        self._options.tell(search_stage(best, self._bound / unit))

    def _search(self, starts: Iterable[Sequence[int]]) -> int | None:
        """Look for sequences and bounds; an operator at which no sequence fits, if there is one."""
        problem, budget = self._problem, self._budget
        own_order = range(len(problem))
        if self._offer(own_order, "as given"):
            return None
        for start in starts:
            if self._options.order.allows(start):
                self._offer(start, "given")
        if self._best is not None:
            # One that was made for less memory runs more again than this budget needs.
            self._offer(without_needless_repeats(problem, self._best, budget), "given, thinned")
        if self._best is not None and time.perf_counter() >= self._deadline:
            return None
        limit = self._time_for_bounds()
        free = free_order_bound(problem, budget, limit)
        if free.impossible_at is not None:
            return free.impossible_at
        self._raise_bound(free)
        fixed = fixed_order_bound(problem, budget, limit)
        is_fixed = self._options.order is Order.FIXED
        if is_fixed:
            if fixed.impossible_at is not None:
                return fixed.impossible_at
            self._raise_bound(fixed)
        guided = self._guided(fixed)
        if not self._is_settled():
            self._improve([own_order, *([guided] if guided else [])])
        return None

    def _time_for_bounds(self) -> float:
        limit = self._options.time_limit_seconds
        return _BOUND_SHARE * (60.0 if limit is None else limit)

    def _guided(self, bound: CoveringBound) -> list[int] | None:
        """The sequence that a bound's gaps stand for, without what it does not need."""
        if not bound.gaps:
            return None
        sequence = sequence_of_gaps(self._problem, bound.gaps)
        if len(sequence) > _MOST_REPEATS * len(self._problem):
            return None
        sequence = without_needless_repeats(self._problem, sequence, self._budget)
        self._offer(sequence, "guided")
        return sequence

    def _improve(self, starts: Sequence[Sequence[int]]) -> None:
        problem, budget, seed = self._problem, self._budget, self._options.seed
        parts = Parts(problem, budget, seed)
        stop = Event()
        with ThreadPoolExecutor(2) as beside:
            try:
                self._deadline += self._compiled(parts, beside, stop)
                # Imported here: what needs no search needs no compiler.
                from onnxgc.budget.improve.local_moves import LocalMoves

                free_order = self._options.order is Order.FREE
                search = LocalMoves(problem, budget, free_order=free_order, seed=seed, is_over=self._is_over)
                for how, found in search.first(starts, self._is_enough):
                    self._offer(found, how)
                # From the best of all starts, and not from where the compiler interrupted.
                parts = Parts(problem, budget, seed)
                other = LocalMoves(problem, budget, free_order=free_order, seed=seed)
                parts.made_anew = other.made_anew
                self._search_beside(search, parts, beside, stop)
            finally:
                stop.set()

    def _compiled(self, parts: Parts, beside: Executor, stop: Event) -> float:
        """The seconds that compiling took; where it takes a while, parts of the best are solved meanwhile."""
        compiling = beside.submit(compile_loops, self._options.tell)
        while self._options.most_rounds is None and self._best is not None and not compiling.done():
            if self._is_settled():
                break
            found = parts.improved(self._best, _SECONDS_BESIDE_COMPILING, stop)
            if found is not None:
                self._offer(found, "program")
        seconds = compiling.result()
        self._tell()
        return seconds

    def _search_beside(self, search: LocalMoves, parts: Parts, beside: Executor, stop: Event) -> None:
        """Rounds of the search, and programs of parts beside them on a core of their own."""
        most = self._options.most_rounds
        solving: Future[list[int] | None] | None = None
        proving: Future[int] | None = None
        rounds = 0
        while not self._is_over() and (most is None or rounds < most):
            if solving is None and self._best is not None:
                limit = math.inf if most is not None else self._deadline - time.perf_counter()
                solving = beside.submit(parts.improved, self._best, limit, stop)
            if proving is None and self._best is not None and self._may_prove():
                limit = self._deadline - time.perf_counter()
                proving = beside.submit(
                    residency_bound, self._problem, self._budget, self._best_extra, limit, stop
                )
            improved = search.improved(self._best)
            if improved is not None:
                self._offer(improved, "neighbourhood")
            rounds += 1
            if proving is not None and proving.done():
                self._raise_bound(CoveringBound(proving.result()))
            # Where rounds are counted, what is found must not depend on which of both is faster.
            if solving is not None and (solving.done() if most is None else not rounds % _ROUNDS_A_PART):
                found, solving = solving.result(), None
                if found is not None:
                    self._offer(found, "program")

    def _may_prove(self) -> bool:
        """Whether the problem is small enough for the bound that knows more; it has no count of rounds."""
        is_fixed, most = self._options.order is Order.FIXED, self._options.most_rounds
        return is_fixed and most is None and len(self._problem) <= MOST_OPERATORS
