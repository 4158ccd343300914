"""The whole trade-off: least extra time for a row of budgets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.budget.search import (
    BudgetedSequence,
    NoSequence,
    SearchOptions,
    compile_loops,
    within_budget,
)


@dataclass(frozen=True, slots=True)
class Point:
    """A budget and the best sequence known for it."""

    budget: int
    found: BudgetedSequence


def trade_off(
    problem: OperatorProblem,
    budgets: Iterable[int],
    options: SearchOptions,
    starts: Iterable[Sequence[int]] = (),
) -> tuple[Point, ...]:
    """A point for each budget that a sequence was found for, from the highest budget down.

    Extra time never falls and bounds never fall as budgets do: a sequence serves every higher budget, a
    bound every lower one. Each search begins with what the budget above found, and the time limit is
    shared equally. After an interruption there is no time left for the rest.
    """
    compile_loops(options.tell)
    started = time.perf_counter()
    wanted = sorted(set(budgets), reverse=True)
    known = [tuple(start) for start in starts]
    points: list[Point] = []
    for number, budget in enumerate(wanted):
        limit = options.time_limit_seconds
        if limit is not None:
            limit = max(0.0, limit - (time.perf_counter() - started)) / (len(wanted) - number)
        found = within_budget(problem, budget, replace(options, time_limit_seconds=limit), known)
        if isinstance(found, NoSequence):
            break
        if found.interrupted:
            options = replace(options, time_limit_seconds=0.0)
        known.append(found.sequence)
        points.append(Point(budget, found))
    return _monotone(problem, points)


def _monotone(problem: OperatorProblem, points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, each with the best that any budget no higher found and the bound of any no lower."""
    bound = 0
    bounded: list[Point] = []
    for point in points:
        bound = max(bound, point.found.lower_bound)
        bounded.append(Point(point.budget, replace(point.found, lower_bound=bound)))
    best: BudgetedSequence | None = None
    served: list[Point] = []
    for point in reversed(bounded):
        found = point.found
        if best is not None and best.extra < found.extra:
            profile = simulate_sequence(problem, best.sequence)
            found = replace(
                found,
                sequence=best.sequence,
                peak=profile.peak,
                duration=profile.duration,
                extra=best.extra,
            )
        best = found
        served.append(Point(point.budget, replace(found, lower_bound=min(found.lower_bound, found.extra))))
    return tuple(reversed(served))
