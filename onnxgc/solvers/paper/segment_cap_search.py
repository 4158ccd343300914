"""The best cap on segments: the outer loop that the paper's Algorithms 1 and 6 have in common.

Both fix the most that a segment may weigh, C, and then look for the cheapest checkpoints under it.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.terminals import forced_checkpoints
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, SolverOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CappedOptimum:
    """The cheapest checkpoints under a cap on segments.

    `interior_bytes` and `checkpoints` leave out the graph's source and target.
    `heaviest_segment_bytes` may lie below the cap.
    """

    checkpoints: tuple[Vertex, ...]
    interior_bytes: int
    heaviest_segment_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.interior_bytes + self.heaviest_segment_bytes


UnderCap: TypeAlias = Callable[[int], CappedOptimum]
"""The optimum where each segment has at most the given bytes, which are at least 0."""


def deadline_of(options: SolverOptions) -> float:
    """When the search must end, on the clock of `time.perf_counter`."""
    limit = options.time_limit_seconds
    return math.inf if limit is None else time.perf_counter() + limit


def search_caps(problem: CheckpointProblem, under: UnderCap, deadline: float) -> Finding:
    """The best plan over all caps, or the best until `deadline`, with a lower bound.

    The paper tries every cost of every segment as the cap. But the cost f(C) of an optimal set
    never rises with C, so f(high) + low bounds every solution whose heaviest segment lies between
    low and high: intervals of C are halved, the most promising one first.
    """
    best = under(problem.total_bytes)
    # Heaviest segments low..high that are not explored, and what their checkpoints cost at least:
    # (lower bound, low, high, floor).
    unexplored = [(best.interior_bytes, 0, best.heaviest_segment_bytes - 1, best.interior_bytes)]
    asked = 1
    out_of_time = False
    while unexplored and unexplored[0][0] < best.total_bytes and not out_of_time:
        _, low, high, floor = heapq.heappop(unexplored)
        cap = (low + high) // 2
        found = under(cap)
        asked += 1
        best = min(best, found, key=lambda optimum: optimum.total_bytes)
        # From the heaviest segment found up to the cap, nothing is cheaper than what was found.
        below = (low, found.heaviest_segment_bytes - 1, found.interior_bytes)
        above = (cap + 1, high, floor)
        for least, most, cost in (below, above):
            if least <= most:
                heapq.heappush(unexplored, (cost + least, least, most, cost))
        out_of_time = time.perf_counter() >= deadline
    logger.debug("%d caps tried, best %d bytes beside the ends", asked, best.total_bytes)

    bound = min(best.total_bytes, unexplored[0][0]) if unexplored else best.total_bytes
    end_bytes = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
    return Finding(
        plan=CheckpointPlan.for_graph(problem.graph, best.checkpoints),
        status=Status.OPTIMAL if bound == best.total_bytes else Status.FEASIBLE,
        lower_bound_bytes=bound + end_bytes,
    )
