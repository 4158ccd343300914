"""The least peak, at any extra time or within a limit on it, by a descent of budgets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onnxgc.budget.bounds.covering import fixed_order_bound, free_order_bound
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.budget.search import BudgetedSequence, NoSequence, SearchOptions, compile_loops, within_budget
from onnxgc.planning.deadline import DESCENT_END, REFINEMENT_END, Deadline
from onnxgc.planning.order_choice import Order

_PRECISION = 200
"""The descent ends at an interval of one part in this number."""
_MAX_BUDGETS = 12
_ROUNDS_PER_BUDGET = 40
_ANY_TIME = 1 << 62
_MAX_BOUNDS = 8
_SECONDS_PER_BOUND = 2.0


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
    allowed = _ANY_TIME if max_extra is None else max_extra

    def is_allowed(sequence: Sequence[int]) -> bool:
        extra = simulate_sequence(problem, sequence).duration - problem.duration
        return extra <= allowed and options.order.allows(sequence)

    known = [tuple(range(len(problem))), *(tuple(start) for start in starts if is_allowed(start))]
    descent = _Descent(problem, options, deadline, known, allowed, floor)
    descent.run()
    left = deadline.left(REFINEMENT_END)
    last = within_budget(
        problem,
        descent.peak,
        replace(options, time_limit_seconds=0.0 if descent.interrupted else left),
        known,
    )
    assert not isinstance(last, NoSequence), "the best is within its own peak"
    interrupted = descent.interrupted or last.interrupted
    floor = descent.floor
    if not interrupted:
        floor = _proved_floor(problem, floor, last.peak, allowed, options.order, deadline.end)
    last = replace(last, seconds=deadline.elapsed(), interrupted=interrupted)
    return LeastPeak(last, min(floor, last.peak))


class _Descent:
    """Bisection of budgets.

    Attributes:
        known: sequences to start from; it receives those that are found.
        peak: the lowest peak found.
        floor: a lower bound on the peak.
        interrupted: whether a user ended it (Ctrl-C).
    """

    def __init__(
        self,
        problem: OperatorProblem,
        options: SearchOptions,
        deadline: Deadline,
        known: list[tuple[int, ...]],
        allowed: int,
        floor: int,
    ) -> None:
        self._problem, self._options, self._deadline = problem, options, deadline
        self._allowed = allowed
        self.known = known
        self._best = min(known, key=lambda start: simulate_sequence(problem, start).peak)
        self.peak = simulate_sequence(problem, self._best).peak
        self.floor = floor
        self.interrupted = False

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
        options, allowed = self._options, self._allowed
        tried = replace(
            options,
            target_extra=allowed,
            time_limit_seconds=None if left is None else left / 3,
            max_rounds=_ROUNDS_PER_BUDGET if options.max_rounds is None else options.max_rounds,
        )
        best = within_budget(self._problem, budget, tried, [self._best])
        if isinstance(best, NoSequence):
            is_too_low = best.impossible
        else:
            self.interrupted = best.interrupted
            if best.extra <= allowed:
                self._best, self.peak = best.sequence, best.peak
                self.known.append(best.sequence)
                return True
            is_too_low = best.lower_bound > allowed
        if is_too_low:
            self.floor = max(self.floor, budget + 1)
        return False


def _proved_floor(
    problem: OperatorProblem, floor: int, peak: int, allowed: int, order: Order, end: float
) -> int:
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
