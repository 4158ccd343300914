"""Reversal schedules: backward through a chain with few stored states and nested recomputation.

Here a step `n` computes state `n + 1` from state `n`, and its backward needs state `n`. A set of checkpoints
cannot express a reversal schedule, which stores further states while it recomputes; a sequence of operators
can (`onnxgc.solvers.baselines.reversal_plan`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import comb
from typing import TypeAlias


class ReversalObjective(Enum):
    """The objective of a reversal schedule."""

    FORWARD_STEPS = "forward-steps"
    """The number of forward steps, with a limit on the states stored at once."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Compute forward from the current state, `start`, to `stop`, without storing states."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """Store the current state in a free slot."""

    state: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Make a stored state the current one; it stays stored."""

    state: int


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """Free the slot of a stored state."""

    state: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Differentiate a step at the current state: recompute it, keep the tensors its gradient reads."""

    step: int


Action: TypeAlias = Advance | Store | Restore | ReleaseState | Backward

Split: TypeAlias = Callable[[int, int], int]
"""(steps, slots) -> the number of steps to advance before the next state is stored.

There are at least 2 steps and at least 2 slots, including the slot of the first state."""


def unroll(steps: int, slots: int, split: Split) -> tuple[Action, ...]:
    """The schedule that follows from a rule for splitting.

    To reverse a stretch whose first state is stored: advance to the split, store, reverse the second
    part with one slot less, release, and reverse the first part. O(forward steps).

    Raises:
        ValueError: `steps` is negative, or `slots` is less than 1.
    """
    check_sizes(steps, slots)
    if not steps:
        return ()
    actions: list[Action] = [Store(0)]
    pending: list[Action | _Stretch] = [ReleaseState(0), _Stretch(0, steps, slots)]
    while pending:
        part = pending.pop()
        if not isinstance(part, _Stretch):
            actions.append(part)
            continue
        start, stop = part.start, part.stop
        if part.slots == 1 or stop - start == 1:
            for step in range(stop - 1, start, -1):
                actions += [Advance(start, step), Backward(step), Restore(start)]
            actions.append(Backward(start))
            continue
        middle = start + split(stop - start, part.slots)
        actions += [Advance(start, middle), Store(middle)]
        pending += [
            _Stretch(start, middle, part.slots),
            Restore(start),
            ReleaseState(middle),
            _Stretch(middle, stop, part.slots - 1),
        ]
    return tuple(actions)


def first_sweep_states(schedule: Iterable[Action]) -> tuple[int, ...]:
    """The states that are stored before the first `Backward`, rising."""
    states: list[int] = []
    for action in schedule:
        if isinstance(action, Backward):
            break
        if isinstance(action, Store):
            states.append(action.state)
    return tuple(states)


def default_slots(steps: int) -> int:
    """The fewest slots with which each step advances at most twice: about sqrt(2 steps).

    That is one additional forward, as in the paper's training, and the one inside `Backward`.

    >>> default_slots(20)
    5

    Source: Griewank & Walther 2000: steps <= C(slots + r, r) for at most r advances of a step.
    """
    return next(slots for slots in count(1) if comb(slots + 2, 2) >= steps)


def check_sizes(steps: int, slots: int) -> None:
    """Raise a ValueError for fewer than 0 steps or fewer than 1 slot."""
    if steps < 0 or slots < 1:
        raise ValueError(f"{steps} steps with {slots} slots: give at least 0 steps and 1 slot")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps from `start` to before `stop`; state `start` is stored, in one of the slots, and current."""

    start: int
    stop: int
    slots: int
