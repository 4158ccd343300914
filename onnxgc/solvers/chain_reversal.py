"""Backward through a chain with few stored states: schedules that recompute inside recomputation.

Step `n` computes state `n + 1` from state `n`. To go backward through a step, its own state must be
at hand. A plain set of checkpoints cannot say what a reversal schedule says, since that stores
further states while it recomputes; its first sweep alone is such a set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import comb
from typing import TypeAlias


class ReversalObjective(Enum):
    """What a reversal schedule makes small."""

    FORWARD_STEPS = "forward-steps"
    """The number of forward steps, where so many states may be stored at once."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Compute forward from the current state, `start`, to `stop`, storing nothing on the way."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """Put the current state into a free slot."""

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
    """Differentiate a step at the current state: it runs once more, keeping what its gradient reads."""

    step: int


Action: TypeAlias = Advance | Store | Restore | ReleaseState | Backward

Split: TypeAlias = Callable[[int, int], int]
"""How many of so many steps, more than one, to advance before the next state is stored, given how
many slots, at least two, there are, the one of the first state included."""


def unroll(steps: int, slots: int, split: Split) -> tuple[Action, ...]:
    """The schedule that a rule for splitting stands for.

    To go back through a stretch whose first state is stored: advance to the split, store, go back
    through the second part with a slot less, release, and go back through the first part.

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


def forward_steps(schedule: Iterable[Action]) -> int:
    """Forward steps that a schedule takes, without the one inside each `Backward`."""
    return sum(action.stop - action.start for action in schedule if isinstance(action, Advance))


def first_sweep_states(schedule: Iterable[Action]) -> tuple[int, ...]:
    """The states that are stored when backward begins, rising."""
    states: list[int] = []
    for action in schedule:
        if isinstance(action, Backward):
            break
        if isinstance(action, Store):
            states.append(action.state)
    return tuple(states)


def default_slots(steps: int) -> int:
    """The fewest slots with which no step needs to advance more than twice: about sqrt(2 steps).

    That is one repeated forward, as in the paper's training, beside the one inside `Backward`.

    Source: Griewank & Walther 2000: steps <= C(slots + r, r) for at most r advances of a step.
    """
    return next(slots for slots in count(1) if comb(slots + 2, 2) >= steps)


def check_sizes(steps: int, slots: int) -> None:
    """Raise a ValueError unless there are no fewer than 0 steps and 1 slot."""
    if steps < 0 or slots < 1:
        raise ValueError(f"{steps} steps with {slots} slots: give at least 0 steps and 1 slot")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps from `start` to before `stop`; state `start` is stored, in one of the slots, and current."""

    start: int
    stop: int
    slots: int
