"""Learning rates over a run: functions of the number of updates that were made before."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxgc.errors import OptimizerError

Schedule = Callable[[int], float]


def constant(rate: float) -> Schedule:
    """The same rate in every update."""
    return lambda _: rate


def step(rate: float, every: int, factor: float = 0.1) -> Schedule:
    """A rate that is multiplied by a factor after every so many updates."""
    _check(every=every)
    return lambda done: rate * float(factor ** (done // every))


def cosine(rate: float, total: int, least: float = 0.0) -> Schedule:
    """From the rate to the least along half a cosine, over so many updates; the least afterwards."""
    _check(total=total)

    def at(done: int) -> float:
        share = min(1.0, done / total)
        return least + (rate - least) * (1 + math.cos(math.pi * share)) / 2

    return at


def with_warm_up(schedule: Schedule, updates: int) -> Schedule:
    """Rates that rise linearly over the first updates, from a part of the schedule's to all of it."""
    _check(updates=updates + 1)
    return lambda done: schedule(done) * min(1.0, (done + 1) / updates) if updates else schedule(done)


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise OptimizerError(f"a learning rate's {name} is {value}; it must be at least 1")
