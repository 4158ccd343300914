"""The least memory that any sequence needs, as far as one operator at a time tells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from onnxgc.budget.bounds.forced_memory import ForcedMemory
from onnxgc.budget.operator_problem import OperatorProblem

MOST_MOMENTS = 480
"""Operators that are looked at with all that must be in memory beside them."""


@dataclass(frozen=True, slots=True)
class PeakBound:
    """No sequence has a lower peak than `size`.

    While `operator` runs, its own inputs, outputs and workspace take `own_size`; the rest must be
    there too, since it is needed later and cannot be computed again. What is kept to the end takes
    `kept_size`, which may be all of it.
    """

    size: int
    operator: int
    own_size: int
    kept_size: int = 0


@lru_cache(maxsize=4)
def floor_of_problem(problem: OperatorProblem) -> PeakBound:
    """The most that an operator and what nothing can drop meanwhile need, or what is kept to the end."""
    own = np.asarray([problem.working_set(index) for index in range(len(problem))], np.int64)
    kept = np.zeros(len(problem), np.int64)
    for storage in problem.kept:
        kept[problem.producer[storage]] += problem.sizes[storage]
    likely = np.argsort(-(own + np.cumsum(kept)), kind="stable")[:MOST_MOMENTS]
    forced = ForcedMemory(problem, sorted(likely.tolist()))
    best = int(np.argmax(own))
    floor = PeakBound(int(own[best]), best, int(own[best]))
    for row, moment in enumerate(forced.moments):
        size = int(own[moment]) + sum(
            held
            for storage, held in forced.items(row)
            if not problem.operations[problem.producer[storage]].may_repeat
        )
        if size > floor.size:
            floor = PeakBound(size, moment, int(own[moment]))
    kept_size = int(kept.sum())
    return replace(floor, size=max(floor.size, kept_size), kept_size=kept_size)
