"""Least extra time under a memory budget, with a lower bound that limits the distance to the optimum.

The search begins with the bounds (`covering`) and the sequence that follows from the gaps of the
fixed-order bound; if that meets the bound it is optimal. Otherwise a greedy repair and a search of
neighbourhoods follow: some recomputation is removed and inserted again. In free order runs are moved too.
Effort is counted in rounds; a time limit only stops after one of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from onnxgc.budget.bounds.covering import CoveringBound, fixed_order_bound, free_order_bound, sequence_of_gaps
from onnxgc.budget.bounds.moments import MAX_OPERATORS, MomentBound, MomentFinding
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.improve.lns_milp import PartSearch
from onnxgc.budget.improve.removable_runs import without_needless_repeats
from onnxgc.budget.operator_problem import OperatorProblem, settled, simulate_sequence
from onnxgc.planning.deadline import BOUND_SHARE, Deadline
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import Status, TimeCost

if TYPE_CHECKING:
    from onnxgc.budget.improve.local_moves import LocalMoves

logger = logging.getLogger(__name__)

DEFAULT_TIME_LIMIT_SECONDS = 30.0
_BOUND_SECONDS = 12.0
"""Time of each bound if there is no time limit."""
_QUICK_PROOF_SECONDS = 2.0
"""Time of the moments' bound before the search, which a proof makes needless."""
_ROUNDS_PER_PART = 4
"""Rounds during which the program of one part is solved, if rounds are counted."""
_PART_SECONDS_DURING_COMPILATION = 0.5
_MAX_REPEATS = 4
"""The longest sequence, as a multiple of the number of operators."""


COMPILING = "compiling the search (first run on this machine only, up to a minute)"
COMPILING_REPAIRS = "compiling the search (first run on this machine only, about ten seconds)"


def ignore_progress(stage: str) -> None:
    """A progress callback for searches without an observer."""


@dataclass(frozen=True, slots=True)
class BudgetedSequence:
    """A sequence within the budget, and a bound on its distance to the optimum.

    `extra` is its time beyond the time of every operator once, `lower_bound` the least extra time of any
    sequence within the budget, both in the problem's unit. `interrupted`: a user ended the search (Ctrl-C).
    """

    sequence: tuple[int, ...]
    peak: int
    duration: int
    extra: int
    lower_bound: int
    seconds: float
    interrupted: bool = False

    @property
    def status(self) -> Status:
        return Status.OPTIMAL if self.extra <= self.lower_bound else Status.FEASIBLE

    @property
    def time(self) -> TimeCost:
        return TimeCost(self.duration - self.extra, self.extra, self.lower_bound)


@dataclass(frozen=True, slots=True)
class NoSequence:
    """The search found no sequence within the budget.

    `impossible`: none exists, since `operator` and the storages that are live with it in every sequence
    need `floor` bytes. Otherwise `floor` is a lower bound on the peak.
    """

    floor: int
    operator: int
    impossible: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search.

    `max_rounds` limits the rounds of the search of neighbourhoods: with it and without a time limit the
    result depends on the seed alone. `target_extra` is an extra time at which the search stops: when a
    sequence takes no more, or when the bound proves that every sequence takes more. `progress` is a progress
    callback: it receives the current stage, with the best extra time and the bound.
    """

    order: Order = Order.FREE
    time_limit_seconds: float | None = DEFAULT_TIME_LIMIT_SECONDS
    max_rounds: int | None = None
    seed: int = 0
    target_extra: int | None = None
    progress: Callable[[str], None] = field(default=ignore_progress, repr=False)


def compile_loops(progress: Callable[[str], None] = ignore_progress) -> float:
    """Compile the search's inner loops if necessary; return the seconds that it took.

    A machine compiles them once and caches them on disk; `progress` receives a message before. Callers do not
    count this time against a time limit.
    """
    from onnxgc.budget.improve import local_moves

    if not local_moves.run_all_loops.cache_info().currsize:
        progress(COMPILING)
    started = time.perf_counter()
    local_moves.run_all_loops()
    return time.perf_counter() - started


def compile_repairs(progress: Callable[[str], None] = ignore_progress) -> None:
    """The same for the loops that the search of `optimize` without options needs."""
    from onnxgc.budget.improve import local_moves

    if not local_moves.run_repairs.cache_info().currsize:
        progress(COMPILING_REPAIRS)
    local_moves.run_repairs()


def within_budget(
    problem: OperatorProblem, budget: int, options: SearchOptions | None = None, starts: Iterable[Sequence[int]] = ()
) -> BudgetedSequence | NoSequence:
    """The sequence of least duration found whose peak is within the budget.

    `starts` are sequences to begin with, from neighbouring budgets or from other solvers; in a fixed order
    those in another order are ignored. Duration is in the problem's unit, the budget in that of its sizes.

    >>> from onnxgc.budget.operator_problem import ProblemOperator
    >>> read_last = OperatorProblem(
    ...     (
    ...         ProblemOperator("small", (), (0,), 1),
    ...         ProblemOperator("large", (), (1,), 9),
    ...         ProblemOperator("heavy", (1,), (2,), 1, workspace=4),
    ...         ProblemOperator("end", (0, 2), (3,), 1),
    ...     ),
    ...     (2, 5, 1, 1),
    ... )
    >>> found = within_budget(read_last, 10, SearchOptions(Order.FIXED))
    >>> found.sequence, found.extra, found.lower_bound
    ((0, 1, 2, 0, 3), 1, 1)
    """
    return _Search(problem, budget, options or SearchOptions()).run(starts)


class _Search:
    def __init__(self, problem: OperatorProblem, budget: int, options: SearchOptions) -> None:
        self._problem = problem
        self._budget = budget
        self._options = options
        self._deadline = Deadline(options.time_limit_seconds)
        self._best: tuple[int, ...] | None = None
        self._best_extra = 0
        self._bound = 0
        self._moments: MomentBound | None = None
        self._findings: deque[MomentFinding] = deque()

    def run(self, starts: Iterable[Sequence[int]]) -> BudgetedSequence | NoSequence:
        problem = self._problem
        floor = floor_of_problem(problem)
        if floor.size > self._budget:
            return self._none(floor.size, floor.operator, impossible=True)
        interrupted = False
        try:
            impossible_at = self._search(starts)
        except KeyboardInterrupt:
            # The user wants the best so far.
            if self._best is None:
                raise
            impossible_at, interrupted = None, True
        if self._best is None:
            if impossible_at is not None:
                return self._none(self._budget + 1, impossible_at, impossible=True)
            return self._none(floor.size, floor.operator, impossible=False)
        profile = simulate_sequence(problem, self._best)
        assert profile.peak <= self._budget, "the peak of every sequence offered was simulated"
        return BudgetedSequence(
            self._best,
            profile.peak,
            profile.duration,
            profile.duration - problem.duration,
            min(self._bound, self._best_extra),
            self._deadline.elapsed(),
            interrupted,
        )

    def _none(self, floor: int, operator: int, *, impossible: bool) -> NoSequence:
        return NoSequence(floor, operator, impossible, self._deadline.elapsed())

    def _is_over(self) -> bool:
        return self._is_settled() or self._deadline.is_over()

    def _is_settled(self) -> bool:
        """Whether further search cannot change the answer."""
        target = self._options.target_extra
        if target is not None and self._bound > target:
            return True
        return self._best is not None and self._best_extra <= max(self._bound, target or 0)

    def _is_enough(self) -> bool:
        """Whether the search may end: it is settled, or time is up and it has found a sequence."""
        return self._is_settled() or (self._best is not None and self._is_over())

    def _offer(self, sequence: Sequence[int] | None, how: str) -> bool:
        """Take a sequence as the best so far if it is; return whether it is within the budget."""
        if sequence is None:
            return False
        sequence = settled(self._problem, sequence)
        profile = simulate_sequence(self._problem, sequence)
        if profile.peak > self._budget:
            return False
        extra = profile.duration - self._problem.duration
        if self._best is None or extra < self._best_extra:
            self._best, self._best_extra = tuple(sequence), extra
            logger.debug("%.2f s: extra time %d, %s", self._deadline.elapsed(), extra, how)
            self._report()
        return True

    def _raise_bound(self, bound: CoveringBound) -> None:
        self._bound = max(self._bound, bound.extra)
        self._report()

    def _report(self) -> None:
        unit = self._problem.duration or 1
        best = "no plan yet"
        if self._best is not None:
            best = f"{100 * (self._best_extra / unit):.3f} % extra time"
        self._options.progress(f"planning: {best}, lower bound {100 * (self._bound / unit):.3f} %")

    def _search(self, starts: Iterable[Sequence[int]]) -> int | None:
        """Find sequences and bounds; return an operator at which no sequence fits, if there is one."""
        problem, budget = self._problem, self._budget
        own_order = range(len(problem))
        if self._offer(own_order, "as given"):
            return None
        for start in starts:
            if self._options.order.allows(start):
                self._offer(start, "given")
        if self._best is not None:
            # A sequence for less memory recomputes more than this budget needs.
            self._offer(without_needless_repeats(problem, self._best, budget), "given, thinned")
        if self._best is not None and self._deadline.is_over():
            return None
        share = self._deadline.share(BOUND_SHARE)
        limit = _BOUND_SECONDS if share is None else share
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
        if self._may_prove() and not self._is_settled():
            self._moments = MomentBound(problem, budget, self._options.order)
            self._prove(min(limit, _QUICK_PROOF_SECONDS), Event())
            self._take_findings()
        if not self._is_settled():
            self._improve([own_order, *([guided] if guided else [])])
        return None

    def _guided(self, bound: CoveringBound) -> list[int] | None:
        """The sequence that follows from a bound's gaps, without needless runs."""
        if not bound.gaps:
            return None
        sequence = sequence_of_gaps(self._problem, bound.gaps)
        if len(sequence) > _MAX_REPEATS * len(self._problem):
            return None
        sequence = without_needless_repeats(self._problem, sequence, self._budget)
        self._offer(sequence, "guided")
        return sequence

    def _improve(self, starts: Sequence[Sequence[int]]) -> None:
        problem, budget, seed = self._problem, self._budget, self._options.seed
        parts = PartSearch(problem, budget, seed)
        stop = Event()
        proving: Future[None] | None = None
        with ThreadPoolExecutor(3) as threads:
            try:
                if self._moments is not None:
                    proving = threads.submit(self._prove, math.inf, stop)
                self._deadline = self._deadline.extended(self._compile(parts, threads, stop))
                # Imported here: problems without a search need no compiler.
                from onnxgc.budget.improve.local_moves import LocalMoves

                free_order = self._options.order is Order.FREE
                search = LocalMoves(problem, budget, free_order=free_order, seed=seed, is_over=self._is_over)
                for how, sequence in search.first_sequences(starts, self._is_enough):
                    self._offer(sequence, how)
                # Restarted from the best of all starts, independent of the compiler's time.
                parts = PartSearch(problem, budget, seed)
                other = LocalMoves(problem, budget, free_order=free_order, seed=seed)
                parts.make_start = other.evict_at_random
                self._search_neighbourhoods(search, parts, threads, stop)
            finally:
                stop.set()
        if proving is not None:
            proving.result()

    def _compile(self, parts: PartSearch, threads: Executor, stop: Event) -> float:
        """Compile, and solve parts of the best meanwhile; return the seconds that compilation took."""
        compiling = threads.submit(compile_loops, self._options.progress)
        while self._options.max_rounds is None and self._best is not None and not compiling.done():
            self._take_findings()
            if self._is_settled():
                break
            self._offer(parts.improve(self._best, _PART_SECONDS_DURING_COMPILATION, stop), "program")
        seconds = compiling.result()
        self._report()
        return seconds

    def _search_neighbourhoods(self, search: LocalMoves, parts: PartSearch, threads: Executor, stop: Event) -> None:
        """Run rounds of the search, and solve programs of parts and a stronger bound on other threads."""
        most = self._options.max_rounds
        solving: Future[list[int] | None] | None = None
        rounds = 0
        while not self._is_over() and (most is None or rounds < most):
            if solving is None and self._best is not None:
                limit = math.inf if most is not None else self._deadline.end - time.perf_counter()
                solving = threads.submit(parts.improve, self._best, limit, stop)
            self._take_findings()
            self._offer(search.improve(self._best), "neighbourhood")
            rounds += 1
            # Where rounds are counted, the result must not depend on the speed of either thread.
            if solving is not None and (solving.done() if most is None else not rounds % _ROUNDS_PER_PART):
                self._offer(solving.result(), "program")
                solving = None

    def _may_prove(self) -> bool:
        """Whether the moments' bound is sought: not where rounds are counted, since its time is not."""
        return self._options.max_rounds is None and len(self._problem) <= MAX_OPERATORS

    def _prove(self, seconds: float, stop: Event) -> None:
        """Collect findings of the moments' bound; on another thread than the one that takes them."""
        assert self._moments is not None, "may prove"
        most = self._problem.duration * _MAX_REPEATS if self._best is None else self._best_extra
        for finding in self._moments.findings(most, seconds, stop):
            self._findings.append(finding)

    def _take_findings(self) -> None:
        while self._findings:
            finding = self._findings.popleft()
            self._offer(finding.sequence, "moments")
            self._raise_bound(CoveringBound(finding.extra))
