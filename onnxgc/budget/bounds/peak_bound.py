"""A lower bound on the peak of every sequence, from one operator at a time."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from onnxgc.budget.bounds.forced_memory import ForcedMemory
from onnxgc.budget.operator_problem import OperatorProblem

MAX_MOMENTS = 480
"""Operators for which storages besides their own that must be live are counted."""
_MAX_ENTRIES = 1 << 24
"""Operators times moments: a large problem has fewer moments."""


@dataclass(frozen=True, slots=True)
class PeakBound:
    """A lower bound, `size`, on the peak of every sequence.

    While `operator` runs, its own inputs, outputs and workspace take `own_size`; the rest must be live
    too, since later operators read it and it must not be recomputed. Storages kept to the end take
    `kept_size`, which sets the bound if it equals `size`.
    """

    size: int
    operator: int
    own_size: int
    kept_size: int = 0


@lru_cache(maxsize=4)
def floor_of_problem(problem: OperatorProblem) -> PeakBound:
    """The greatest need of an operator and storages that cannot be discarded meanwhile, or the kept bytes."""
    own = np.asarray([problem.working_set(index) for index in range(len(problem))], np.int64)
    kept = np.zeros(len(problem), np.int64)
    for storage in problem.kept:
        kept[problem.producer[storage]] += problem.sizes[storage]
    count = min(MAX_MOMENTS, max(_MAX_ENTRIES // len(problem), 1))
    likely = np.argsort(-(own + np.cumsum(kept)), kind="stable")[:count]
    forced = ForcedMemory(problem, sorted(likely.tolist()))
    best = int(np.argmax(own))
    floor = PeakBound(int(own[best]), best, int(own[best]))
    runs_once = np.asarray([not problem.operators[producer].may_repeat for producer in problem.producer], bool)
    for row, moment in enumerate(forced.moments):
        size = int(own[moment]) + int(forced.live(row)[runs_once].sum())
        if size > floor.size:
            floor = PeakBound(size, moment, int(own[moment]))
    kept_size = int(kept.sum())
    return replace(floor, size=max(floor.size, kept_size), kept_size=kept_size)
