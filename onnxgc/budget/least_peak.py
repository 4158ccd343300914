"""The least peak, at any extra time or within a limit on it: budgets are lowered until none is met."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onnxgc.budget.bounds.covering import fixed_order_bound, free_order_bound
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.budget.search import BudgetedSequence, NoSequence, SearchOptions, compile_loops, within_budget
from onnxgc.planning.order import Order

_PRECISION = 200
"""Budgets are lowered until they differ by one part in so many."""
_SHARE_OF_DESCENT = 0.6
"""Of the time limit; the rest is for little extra time at the least peak, and for what proves it."""
_SHARE_OF_SEARCH = 0.8
"""Of the time limit, what descent and little extra time take together."""
_TRIES = 12
_ROUNDS_A_TRY = 40
_ANY_TIME = 1 << 62
_BOUNDS = 8
_SECONDS_A_BOUND = 2.0


@dataclass(frozen=True, slots=True)
class LeastPeak:
    """A sequence of the lowest peak found, and what no sequence goes below.

    The bound on its extra time is for its own peak as the budget.
    """

    found: BudgetedSequence
    floor: int


def least_peak(
    problem: OperatorProblem,
    floor: int,
    options: SearchOptions,
    starts: Iterable[Sequence[int]] = (),
    most_extra: int | None = None,
) -> LeastPeak:
    """The lowest peak found among sequences of no more than `most_extra` time, then little extra time.

    `floor` is what nothing goes below at any extra time. Halves the interval of peaks in question; where
    the bound on extra time at some budget is above `most_extra`, that budget is proved too low.
    """
    compile_loops(options.tell)
    started = time.perf_counter()
    limit = options.time_limit_seconds
    enough = _ANY_TIME if most_extra is None else most_extra

    def may_be_taken(sequence: Sequence[int]) -> bool:
        extra = simulate_sequence(problem, sequence).duration - problem.duration
        return extra <= enough and options.order.allows(sequence)

    known = [tuple(range(len(problem))), *(tuple(start) for start in starts if may_be_taken(start))]
    best = min(known, key=lambda start: simulate_sequence(problem, start).peak)
    high, low = simulate_sequence(problem, best).peak, floor - 1
    interrupted = False
    try:
        for _ in range(_TRIES):
            left = None if limit is None else _SHARE_OF_DESCENT * limit - (time.perf_counter() - started)
            if interrupted or high - low <= high // _PRECISION or (left is not None and left <= 0):
                break
            budget = (low + high) // 2
            tried = replace(
                options,
                enough=enough,
                time_limit_seconds=None if left is None else left / 3,
                most_rounds=_ROUNDS_A_TRY if options.most_rounds is None else options.most_rounds,
            )
            found = within_budget(problem, budget, tried, [best])
            interrupted = not isinstance(found, NoSequence) and found.interrupted
            is_met = not isinstance(found, NoSequence) and found.extra <= enough
            if is_met and not isinstance(found, NoSequence):
                best, high = found.sequence, found.peak
                known.append(best)
                continue
            low = budget
            if found.impossible if isinstance(found, NoSequence) else found.lower_bound > enough:
                floor = max(floor, budget + 1)
    except KeyboardInterrupt:
        # The best so far is what is wanted then.
        interrupted = True
    left = None if limit is None else max(0.0, _SHARE_OF_SEARCH * limit - (time.perf_counter() - started))
    last = within_budget(
        problem, high, replace(options, time_limit_seconds=0.0 if interrupted else left), known
    )
    assert not isinstance(last, NoSequence), "the best is within its own peak"
    interrupted = interrupted or last.interrupted
    if not interrupted:
        end = math.inf if limit is None else started + limit
        floor = _proved_floor(problem, floor, last.peak, enough, options.order, end)
    last = replace(last, seconds=time.perf_counter() - started, interrupted=interrupted)
    return LeastPeak(last, min(floor, last.peak))


def _proved_floor(
    problem: OperatorProblem, floor: int, peak: int, enough: int, order: Order, end: float
) -> int:
    """The highest peak that the bounds prove too low until the time `end`, and one more; at least `floor`."""
    low, high = floor - 1, peak
    for _ in range(_BOUNDS):
        seconds = min(_SECONDS_A_BOUND, end - time.perf_counter())
        if high - low <= 1 or seconds <= 0:
            break
        budget = (low + high) // 2
        try:
            bounds = [free_order_bound(problem, budget, seconds)]
            if order is Order.FIXED:
                bounds.append(fixed_order_bound(problem, budget, seconds))
        except KeyboardInterrupt:
            # What is proved so far holds.
            break
        if any(bound.impossible_at is not None or bound.extra > enough for bound in bounds):
            low = budget
        else:
            high = budget
    return low + 1
