"""Least extra time under a budget, by looking at every state that sequences pass through.

It knows nothing of bounds, gaps or searches, and is for small problems alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from onnxgc.budget.operator_problem import OperatorProblem
from onnxgc.planning.order import Order


class State(NamedTuple):
    """Between two runs: the operators that have run, and the storages that are in memory, as bits."""

    ran: int
    held: int


@dataclass(frozen=True)
class Optimum:
    """A sequence within the budget that no other is shorter than."""

    extra: int
    sequence: tuple[int, ...]


def least_extra(problem: OperatorProblem, budget: int, order: Order) -> Optimum | None:
    """A best sequence, found as a shortest path between states; None if no sequence keeps to the budget.

    A step either runs an operator or forgets a storage, which takes no time. An operator may run again
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
        if state.ran == everything and kept & ~state.held == 0:
            return Optimum(time - problem.duration, _path(came_from, state))
        for operator, following in _steps(problem, budget, order, state):
            later = time + (0 if operator is None else problem.operations[operator].duration)
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


def _steps(
    problem: OperatorProblem, budget: int, order: Order, state: State
) -> Iterator[tuple[int | None, State]]:
    """What can come next: an operator that runs, or None for a storage that is forgotten, and the state."""
    sizes = problem.sizes
    ran, held = state
    in_memory = [storage for storage in range(len(sizes)) if held >> storage & 1]
    memory = sum(sizes[storage] for storage in in_memory)
    for storage in in_memory:
        yield None, State(ran, held & ~(1 << storage))
    for index, operation in enumerate(problem.operations):
        if ran >> index & 1:
            if not operation.may_repeat:
                continue
        elif order is Order.FIXED and ran != (1 << index) - 1:
            continue
        if _bits(operation.reads) & ~held:
            continue
        if _bits(operation.writes) & held:
            # An older copy that is in memory now is never read again: it was forgotten before.
            continue
        for count in range(operation.fewest, len(operation.writes) + 1):
            written = operation.writes[:count]
            peak = memory + sum(sizes[storage] for storage in written) + operation.workspace
            after = State(ran | 1 << index, held | _bits(written))
            if peak <= budget:
                yield index, after
            taken = operation.in_place
            if taken is not None and peak - sizes[operation.writes[0]] <= budget:
                yield index, State(after.ran, after.held & ~(1 << taken))


@cache
def _bits(storages: tuple[int, ...] | frozenset[int]) -> int:
    return sum(1 << storage for storage in storages)
