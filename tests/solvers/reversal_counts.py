"""Numbers of forward steps of reversal schedules."""

from collections.abc import Iterable
from itertools import count
from math import comb

from onnxgc.solvers.reversal_schedule import Action, Advance, check_sizes


def forward_steps(schedule: Iterable[Action]) -> int:
    return sum(action.stop - action.start for action in schedule if isinstance(action, Advance))


def optimal_forward_steps(steps: int, slots: int) -> int:
    """The fewest forward steps that reverse l steps with s slots: r l - C(s + r, r - 1).

    Here r is the largest number of times that any step advances: the least number with
    l <= C(s + r, r). Twenty steps with three slots take 45 forward steps.

    Source: Griewank & Walther 2000, Proposition 1.
    """
    check_sizes(steps, slots)
    if steps < 2:
        return 0
    repeats = next(number for number in count() if comb(slots + number, number) >= steps)
    return repeats * steps - comb(slots + repeats, repeats - 1)
