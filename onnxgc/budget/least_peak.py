"""The least peak, at any extra time or within a limit on it, by a descent of budgets."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onnxgc.budget.bounds.covering import fixed_order_bound, free_order_bound
from onnxgc.budget.improve.removable_runs import without_needless_repeats
from onnxgc.budget.operator_problem import OperatorProblem, settled, simulate_sequence
from onnxgc.budget.search import BudgetedSequence, NoSequence, SearchOptions, compile_loops, within_budget
from onnxgc.planning.deadline import DESCENT_END, QUICK_DESCENT_END, REFINEMENT_END, Deadline
from onnxgc.planning.order_choice import Order

_PRECISION = 200
"""The descent ends at an interval of one part in this number."""
_MAX_BUDGETS = 12
_ROUNDS_PER_BUDGET = 40
_ANY_TIME = 1 << 62
_MAX_BOUNDS = 8
_SECONDS_PER_BOUND = 2.0
_MAX_ROUNDS, _PATIENCE = 80, 16
"""Rounds of moves after each quick descent, and those in a row that may find nothing."""
_EVALUATIONS_PER_OPERATOR = 10
"""Effort of such a round."""


@dataclass(frozen=True, slots=True)
class LeastPeak:
    """A sequence of the lowest peak found, and a lower bound on the peak of every sequence.

    The bound on its extra time holds for its own peak as the budget.
    """

    best: BudgetedSequence
    floor: int


def least_peak(
    problem: OperatorProblem,
    floor: int,
    options: SearchOptions,
    starts: Iterable[Sequence[int]] = (),
    max_extra: int | None = None,
) -> LeastPeak:
    """The lowest peak found among sequences of at most `max_extra` time, then little extra time at it.

    `floor` is a lower bound on the peak at any extra time. Bisects the interval between the floor and the
    best peak; a budget is proved too low if the bound on its extra time exceeds `max_extra`.
    """
    compile_loops(options.progress)
    deadline = Deadline(options.time_limit_seconds)
    descent = _Descent(problem, options, deadline, starts, max_extra, floor)
    descent.run_quickly()
    descent.run()
    left = deadline.left(REFINEMENT_END)
    last = within_budget(
        problem, descent.peak, replace(options, time_limit_seconds=0.0 if descent.interrupted else left), descent.known
    )
    assert not isinstance(last, NoSequence), "the best is within its own peak"
    interrupted = descent.interrupted or last.interrupted
    floor = descent.floor
    if not interrupted:
        floor = _proved_floor(problem, floor, last.peak, descent.allowed, options.order, deadline.end)
    last = replace(last, seconds=deadline.elapsed(), interrupted=interrupted)
    return LeastPeak(last, min(floor, last.peak))


def quick_least_peak(
    problem: OperatorProblem,
    floor: int,
    options: SearchOptions,
    starts: Iterable[Sequence[int]] = (),
    max_extra: int | None = None,
) -> LeastPeak:
    """As `least_peak`, by repairs and few rounds of moves: within the time limit, and mostly far below it.

    Before the limit is reached the result depends on the seed alone.
    """
    deadline = Deadline(options.time_limit_seconds)
    descent = _Descent(problem, options, deadline, starts, max_extra, floor)
    peak = -1
    while descent.peak != peak and not descent.interrupted:
        peak = descent.peak
        descent.run_quickly()
        descent.refine(_MAX_ROUNDS if options.max_rounds is None else options.max_rounds)
    extra = descent.extra
    bound = 0 if descent.interrupted else _bound_on_extra(problem, descent.peak, options.order, deadline)
    best = BudgetedSequence(
        descent.best,
        descent.peak,
        problem.duration + extra,
        extra,
        min(bound, extra),
        deadline.elapsed(),
        descent.interrupted,
    )
    return LeastPeak(best, min(descent.floor, descent.peak))


def _bound_on_extra(problem: OperatorProblem, peak: int, order: Order, deadline: Deadline) -> int:
    """The least extra time of any sequence of this peak, as far as one bound shows."""
    left = deadline.left()
    seconds = _SECONDS_PER_BOUND if left is None else min(_SECONDS_PER_BOUND, left)
    if seconds <= 0:
        return 0
    bound = fixed_order_bound if order is Order.FIXED else free_order_bound
    try:
        return bound(problem, peak, seconds).extra
    except KeyboardInterrupt:
        return 0


def _allowed_starts(
    problem: OperatorProblem, order: Order, starts: Iterable[Sequence[int]], allowed: int
) -> list[tuple[int, ...]]:
    """The problem's own order, and those starts that are within the allowed time and order."""

    def is_allowed(sequence: Sequence[int]) -> bool:
        return simulate_sequence(problem, sequence).duration - problem.duration <= allowed

    own = tuple(range(len(problem)))
    others = (tuple(settled(problem, start)) for start in starts if order.allows(start))
    return [own, *filter(is_allowed, others)]


class _Descent:
    """Bisection of budgets.

    Attributes:
        known: sequences to start from; it receives those that are found.
        allowed: the most extra time.
        best: the known sequence of the lowest peak.
        peak: its peak.
        floor: a lower bound on the peak.
        interrupted: whether a user ended it (Ctrl-C).
    """

    def __init__(
        self,
        problem: OperatorProblem,
        options: SearchOptions,
        deadline: Deadline,
        starts: Iterable[Sequence[int]],
        max_extra: int | None,
        floor: int,
    ) -> None:
        self._problem, self._options, self._deadline = problem, options, deadline
        self.allowed = _ANY_TIME if max_extra is None else max_extra
        self.known = _allowed_starts(problem, options.order, starts, self.allowed)
        self.best = min(self.known, key=lambda start: simulate_sequence(problem, start).peak)
        self.peak = simulate_sequence(problem, self.best).peak
        self.floor = floor
        self.interrupted = False

    def run_quickly(self) -> None:
        """Bisects with repairs alone, which take a small part of a search's time. Proves no bound."""
        # Imported here, since it imports the compiler.
        from onnxgc.budget.improve.local_moves import LocalMoves

        free_order, seed = self._options.order is Order.FREE, self._options.seed
        low = self.floor - 1
        try:
            while self.peak - low > max(1, self.peak // _PRECISION) and self._deadline.left(QUICK_DESCENT_END) != 0.0:
                budget = (low + self.peak) // 2
                moves = LocalMoves(self._problem, budget, free_order=free_order, seed=seed)
                starts = [range(len(self._problem)), self.best]
                if not any(self._take(sequence) for sequence in moves.quick_sequences(starts)):
                    low = budget
        except KeyboardInterrupt:
            self.interrupted = True

    @property
    def extra(self) -> int:
        """Extra time of the best sequence."""
        return simulate_sequence(self._problem, self.best).duration - self._problem.duration

    def refine(self, rounds: int) -> None:
        """Reduces the best sequence's time at its peak, until `_PATIENCE` rounds have found nothing."""
        from onnxgc.budget.improve.local_moves import LocalMoves

        problem, least, idle = self._problem, self.extra, 0
        moves = LocalMoves(
            problem,
            self.peak,
            free_order=self._options.order is Order.FREE,
            seed=self._options.seed,
            effort=_EVALUATIONS_PER_OPERATOR * len(problem),
        )
        try:
            self._keep_faster(without_needless_repeats(problem, self.best, self.peak))
            for _ in range(rounds):
                if idle == _PATIENCE or least == 0 or self._deadline.left(REFINEMENT_END) == 0.0:
                    break
                self._keep_faster(moves.improve(self.best))
                least, idle = min(least, self.extra), 0 if self.extra < least else idle + 1
        except KeyboardInterrupt:
            self.interrupted = True

    def _keep_faster(self, sequence: Sequence[int] | None) -> None:
        if sequence is None:
            return
        sequence = settled(self._problem, sequence)
        found = simulate_sequence(self._problem, sequence)
        if found.peak <= self.peak and found.duration - self._problem.duration < self.extra:
            self.best, self.peak = tuple(sequence), found.peak
            self.known.append(self.best)

    def _take(self, sequence: Sequence[int]) -> bool:
        """Whether a sequence has a lower peak within the allowed time; it is then the best."""
        sequence = settled(self._problem, sequence)
        found = simulate_sequence(self._problem, sequence)
        if found.peak >= self.peak or found.duration - self._problem.duration > self.allowed:
            return False
        self.best, self.peak = tuple(sequence), found.peak
        self.known.append(self.best)
        return True

    def run(self) -> None:
        low = self.floor - 1
        try:
            for _ in range(_MAX_BUDGETS):
                left = self._deadline.left(DESCENT_END)
                if self.interrupted or self.peak - low <= self.peak // _PRECISION or left == 0.0:
                    break
                budget = (low + self.peak) // 2
                if not self._meets(budget, left):
                    low = budget
        except KeyboardInterrupt:
            # The user wants the best so far.
            self.interrupted = True

    def _meets(self, budget: int, left: float | None) -> bool:
        """Whether a search finds a sequence within a budget and the allowed time."""
        options, allowed = self._options, self.allowed
        tried = replace(
            options,
            target_extra=allowed,
            time_limit_seconds=None if left is None else left / 3,
            max_rounds=_ROUNDS_PER_BUDGET if options.max_rounds is None else options.max_rounds,
        )
        best = within_budget(self._problem, budget, tried, [self.best])
        if isinstance(best, NoSequence):
            is_too_low = best.impossible
        else:
            self.interrupted = best.interrupted
            if best.extra <= allowed:
                self.best, self.peak = best.sequence, best.peak
                self.known.append(best.sequence)
                return True
            is_too_low = best.lower_bound > allowed
        if is_too_low:
            self.floor = max(self.floor, budget + 1)
        return False


def _proved_floor(problem: OperatorProblem, floor: int, peak: int, allowed: int, order: Order, end: float) -> int:
    """The lowest peak that the bounds leave possible, by bisection until the moment `end`."""
    low, high = floor - 1, peak
    for _ in range(_MAX_BOUNDS):
        seconds = min(_SECONDS_PER_BOUND, end - time.perf_counter())
        if high - low <= 1 or seconds <= 0:
            break
        budget = (low + high) // 2
        try:
            bounds = [free_order_bound(problem, budget, seconds)]
            if order is Order.FIXED:
                bounds.append(fixed_order_bound(problem, budget, seconds))
        except KeyboardInterrupt:
            # Proofs up to here stay valid.
            break
        if any(bound.impossible_at is not None or bound.extra > allowed for bound in bounds):
            low = budget
        else:
            high = budget
    return low + 1
