"""The trade-off: least extra time for a row of budgets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onnxgc.budget.operator_problem import OperatorProblem
from onnxgc.budget.search import BudgetedSequence, NoSequence, SearchOptions, compile_loops, within_budget
from onnxgc.planning.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Point:
    """A budget and the best sequence known for it."""

    budget: int
    best: BudgetedSequence


def trade_off(
    problem: OperatorProblem, budgets: Iterable[int], options: SearchOptions, starts: Iterable[Sequence[int]] = ()
) -> tuple[Point, ...]:
    """A point for each budget for which a sequence was found, from the highest budget down.

    As budgets fall, neither extra time nor its lower bound falls: a sequence is valid for every higher
    budget, a bound for every lower one. Each search begins with the sequences of the budgets above, and
    the time limit is divided equally. After an interruption the rest has no time left.
    """
    compile_loops(options.progress)
    deadline = Deadline(options.time_limit_seconds)
    wanted = sorted(set(budgets), reverse=True)
    known = [tuple(start) for start in starts]
    points: list[Point] = []
    for number, budget in enumerate(wanted):
        left = deadline.left()
        limit = None if left is None else left / (len(wanted) - number)
        best = within_budget(problem, budget, replace(options, time_limit_seconds=limit), known)
        if isinstance(best, NoSequence):
            break
        if best.interrupted:
            deadline = Deadline(0.0)
        known.append(best.sequence)
        points.append(Point(budget, best))
    return _monotone(points)


def _monotone(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, each with the best sequence of all lower budgets and the best bound of all higher ones."""
    bound = 0
    bounded: list[Point] = []
    for point in points:
        bound = max(bound, point.best.lower_bound)
        bounded.append(Point(point.budget, replace(point.best, lower_bound=bound)))
    below: BudgetedSequence | None = None
    best_points: list[Point] = []
    for point in reversed(bounded):
        best = point.best
        if below is not None and below.extra < best.extra:
            best = replace(below, lower_bound=best.lower_bound, seconds=best.seconds, interrupted=best.interrupted)
        below = best
        best_points.append(Point(point.budget, replace(best, lower_bound=min(best.lower_bound, best.extra))))
    return tuple(reversed(best_points))
