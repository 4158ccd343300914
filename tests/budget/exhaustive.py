"""Least extra time under a budget, by a shortest path through all states of memory.

Independent of bounds, gaps and searches; for small problems only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from onnxgc.budget.operator_problem import OperatorProblem
from onnxgc.planning.order_choice import Order


class State(NamedTuple):
    ran: int
    live: int


@dataclass(frozen=True)
class Optimum:
    extra: int
    sequence: tuple[int, ...]


def least_extra(problem: OperatorProblem, budget: int, order: Order) -> Optimum | None:
    """A shortest sequence as a shortest path between states; None if no sequence is within the budget.

    A step either runs an operator or releases a storage, which takes no time. An operator may be rerun
    without limit.
    """
    everything = (1 << len(problem)) - 1
    kept = _bits(problem.kept)
    start = State(0, 0)
    times = {start: 0}
    came_from: dict[State, tuple[State, int | None]] = {}
    done: set[State] = set()
    queue = [(0, start)]
    while queue:
        time, state = heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state.ran == everything and kept & ~state.live == 0:
            return Optimum(time - problem.duration, _path(came_from, state))
        for operator, following in _steps(problem, budget, order, state):
            later = time + (0 if operator is None else problem.operators[operator].duration)
            if later < times.get(following, later + 1):
                times[following] = later
                came_from[following] = state, operator
                heappush(queue, (later, following))
    return None


def _path(came_from: dict[State, tuple[State, int | None]], state: State) -> tuple[int, ...]:
    backwards: list[int] = []
    while state in came_from:
        state, operator = came_from[state]
        if operator is not None:
            backwards.append(operator)
    return tuple(reversed(backwards))


def _steps(problem: OperatorProblem, budget: int, order: Order, state: State) -> Iterator[tuple[int | None, State]]:
    sizes = problem.sizes
    ran, live = state
    live_storages = [storage for storage in range(len(sizes)) if live >> storage & 1]
    memory = sum(sizes[storage] for storage in live_storages)
    for storage in live_storages:
        yield None, State(ran, live & ~(1 << storage))
    for index, operator in enumerate(problem.operators):
        if ran >> index & 1:
            if not operator.may_repeat:
                continue
        elif order is Order.FIXED and ran != (1 << index) - 1:
            continue
        if _bits(operator.reads) & ~live:
            continue
        if _bits(operator.writes) & live:
            # An older copy would never be read again: another path has released it before.
            continue
        for count in range(operator.min_writes, len(operator.writes) + 1):
            written = operator.writes[:count]
            peak = memory + sum(sizes[storage] for storage in written) + operator.workspace
            after = State(ran | 1 << index, live | _bits(written))
            if peak <= budget:
                yield index, after
            source = operator.in_place
            if source is not None and peak - sizes[operator.writes[0]] <= budget:
                yield index, State(after.ran, after.live & ~(1 << source))


@cache
def _bits(storages: tuple[int, ...] | frozenset[int]) -> int:
    return sum(1 << storage for storage in storages)
