"""Learning-rate schedules: functions of the number of previous updates."""

import math
from collections.abc import Callable

import numpy as np

from onnxgc.errors import OptimizerError, TrainingError

Schedule = Callable[[int], float]


def constant(rate: float) -> Schedule:
    """The same rate in every update.

    >>> constant(0.1)(500)
    0.1
    """
    return lambda _: rate


def step(rate: float, every: int, factor: float = 0.1) -> Schedule:
    """A rate that is multiplied by `factor` after every `every` updates.

    >>> [step(1.0, every=10)(done) for done in (0, 9, 10)]
    [1.0, 1.0, 0.1]
    """
    _check(every=every)
    return lambda done: rate * float(factor ** (done // every))


def cosine(rate: float, total: int, least: float = 0.0) -> Schedule:
    """From `rate` to `least` along half a cosine over `total` updates, then `least`.

    >>> [round(cosine(1.0, total=10)(done), 2) for done in (0, 5, 10, 20)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check(total=total)

    return lambda done: least + (rate - least) * _fall(done / total)


def _fall(share: float) -> float:
    """From 1 to 0 along half a cosine."""
    return (1 + math.cos(math.pi * min(1.0, share))) / 2


def linear(rate: float, total: int, least: float = 0.0) -> Schedule:
    """From `rate` to `least` along a line over `total` updates, then `least`.

    >>> [linear(1.0, total=10)(done) for done in (0, 5, 10, 20)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check(total=total)
    return lambda done: least + (rate - least) * max(0.0, 1 - done / total)


def one_cycle(rate: float, total: int) -> Schedule:
    """Up from a 25th of `rate` over the first 30% of `total` updates, then down to nearly 0, along half cosines.

    Source: Smith and Topin, Super-Convergence, 2018; `torch.optim.lr_scheduler.OneCycleLR` with its defaults.

    >>> [round(one_cycle(1.0, total=100)(done), 2) for done in (0, 29, 99)]
    [0.04, 1.0, 0.0]
    """
    _check(total=total)
    first, last = rate / 25, rate / 25e4
    peak = 0.3 * total - 1

    def at(done: int) -> float:
        if done <= peak:
            return rate + (first - rate) * _fall(done / peak)
        return last + (rate - last) * _fall((done - peak) / (total - 1 - peak))

    return at


def with_warm_up(schedule: Schedule, updates: int) -> Schedule:
    """A schedule whose rate rises linearly over the first `updates` updates.

    >>> [with_warm_up(constant(1.0), 4)(done) for done in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    _check(updates=updates + 1)
    return lambda done: schedule(done) * min(1.0, (done + 1) / updates) if updates else schedule(done)


def schedule_of(rate: float | Schedule) -> Schedule:
    """A schedule, or a constant rate as one.

    Raises:
        TrainingError: the rate is not a number, or not a valid one.
    """
    if callable(rate):
        return rate
    try:
        return constant(checked_rate(float(rate)))
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"the learning rate is {rate!r}; give a number or a function of the number of previous updates"
        ) from error


def checked_rate(value: float) -> float:
    if not 0 <= value < float(np.finfo(np.float32).max):
        raise TrainingError(f"the learning rate is {value}; it must be a finite number of at least 0")
    return value


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise OptimizerError(f"a learning rate's {name} is {value}; it must be at least 1")
