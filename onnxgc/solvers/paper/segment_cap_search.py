"""Search for the best cap on segments: the outer loop of the paper's Algorithms 1 and 6.

Both fix a cap C on the bytes of a segment and compute the cheapest checkpoints under it.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.virtual_terminals import forced_checkpoints
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CappedOptimum:
    """The cheapest checkpoints under a cap on segments.

    `interior_bytes` and `checkpoints` exclude the graph's source and target. `heaviest_segment_bytes` may be
    below the cap.
    """

    checkpoints: tuple[Vertex, ...]
    interior_bytes: int
    heaviest_segment_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.interior_bytes + self.heaviest_segment_bytes


UnderCap: TypeAlias = Callable[[int], CappedOptimum]
"""The optimum under a cap in bytes, at least 0."""


def search_caps(problem: CheckpointProblem, cheapest_under: UnderCap, deadline: float) -> Finding:
    """The best plan over all caps, or the best found until `deadline`, with a lower bound.

    The paper tries the weight of every segment as the cap. The cost f(C) of an optimal set, however, never
    rises with C, so f(high) + low is a lower bound on every solution with a heaviest segment between low
    and high: intervals of C are bisected, the one with the least lower bound first.

    Args:
        problem: graph and sizes in bytes.
        cheapest_under: the optimum for a given cap.
        deadline: end of the search on the clock of `time.perf_counter`.
    """
    best = cheapest_under(problem.total_bytes)
    # (lower bound, low, high, floor): unexplored weights low..high of the heaviest segment, and the least
    # bytes of checkpoints there.
    unexplored = [(best.interior_bytes, 0, best.heaviest_segment_bytes - 1, best.interior_bytes)]
    tried = 1
    out_of_time = False
    while unexplored and unexplored[0][0] < best.total_bytes and not out_of_time:
        _, low, high, floor = heapq.heappop(unexplored)
        cap = (low + high) // 2
        found = cheapest_under(cap)
        tried += 1
        best = min(best, found, key=lambda optimum: optimum.total_bytes)
        # No set with a heaviest segment between the one found and the cap is cheaper.
        below = (low, found.heaviest_segment_bytes - 1, found.interior_bytes)
        above = (cap + 1, high, floor)
        for least, most, cost in (below, above):
            if least <= most:
                heapq.heappush(unexplored, (cost + least, least, most, cost))
        out_of_time = time.perf_counter() >= deadline
    logger.debug("%d caps tried, best %d bytes without the ends", tried, best.total_bytes)

    bound = min(best.total_bytes, unexplored[0][0]) if unexplored else best.total_bytes
    end_bytes = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
    return Finding(
        plan=CheckpointPlan.for_graph(problem.graph, best.checkpoints),
        status=Status.OPTIMAL if bound == best.total_bytes else Status.FEASIBLE,
        lower_bound_bytes=bound + end_bytes,
    )
