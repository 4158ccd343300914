"""The least peak that can be found: budgets are lowered until none is met."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnxgc.rematerialisation.problem import OperatorProblem, judge
from onnxgc.rematerialisation.search import BudgetedSequence, NoSequence, SearchOptions, within_budget

_PRECISION = 200
"""Budgets are lowered until they differ by one part in so many."""
_SHARE_OF_DESCENT = 0.6
"""Of the time limit; the rest is for little extra time at the least peak."""
_TRIES = 12


def least_peak(
    problem: OperatorProblem, floor: int, options: SearchOptions, starts: Iterable[Sequence[int]] = ()
) -> BudgetedSequence:
    """A sequence of the lowest peak found, and of little extra time among such.

    `floor` is what nothing goes below. What is said of its extra time (bound, gap) is for its own
    peak as the budget.
    """
    started = time.perf_counter()
    limit = options.time_limit_seconds
    known = [tuple(start) for start in starts]
    best = min((tuple(range(len(problem))), *known), key=lambda start: judge(problem, start).peak)
    high, low = judge(problem, best).peak, floor - 1
    for _ in range(_TRIES):
        left = None if limit is None else _SHARE_OF_DESCENT * limit - (time.perf_counter() - started)
        if high - low <= high // _PRECISION or (left is not None and left <= 0):
            break
        budget = (low + high) // 2
        tried = replace(
            options,
            stop_at_first=True,
            time_limit_seconds=None if left is None else left / 3,
            most_rounds=options.most_rounds if options.most_rounds is not None else 40,
        )
        found = within_budget(problem, budget, tried, [best])
        if isinstance(found, NoSequence):
            low = budget
        else:
            best, high = found.sequence, found.peak
            known.append(best)
    left = None if limit is None else max(0.0, limit - (time.perf_counter() - started))
    found = within_budget(problem, high, replace(options, time_limit_seconds=left), [best, *known])
    assert not isinstance(found, NoSequence), "the best is within its own peak"
    return replace(found, seconds=time.perf_counter() - started)
