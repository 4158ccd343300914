"""Search for the best cap on segments: the outer loop of the paper's Algorithms 1 and 6.

Both fix a cap C on the bytes of a segment and compute the cheapest checkpoints under it.
"""

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
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

Interval: TypeAlias = tuple[int, int, int, int]
"""(lower bound, low, high, floor): unexplored weights low..high of the heaviest segment, and the least
bytes that a set there keeps."""


def interval(low: int, high: int, floor: int) -> list[Interval]:
    """The interval as a list, empty if the interval is."""
    return [(floor + low, low, high, floor)] if low <= high else []


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
    unexplored = interval(0, best.heaviest_segment_bytes - 1, best.interior_bytes)
    tried = 1
    out_of_time = False
    while unexplored and unexplored[0][0] < best.total_bytes and not out_of_time:
        _, low, high, floor = heapq.heappop(unexplored)
        cap = (low + high) // 2
        optimum = cheapest_under(cap)
        tried += 1
        best = min(best, optimum, key=lambda candidate: candidate.total_bytes)
        # No set with a heaviest segment from there to the cap is cheaper.
        below = interval(low, optimum.heaviest_segment_bytes - 1, optimum.interior_bytes)
        for part in (*below, *interval(cap + 1, high, floor)):
            heapq.heappush(unexplored, part)
        out_of_time = time.perf_counter() >= deadline
    logger.debug("%d caps tried, best %d bytes without the ends", tried, best.total_bytes)

    bound = min(best.total_bytes, unexplored[0][0]) if unexplored else best.total_bytes
    end_bytes = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
    return Finding(
        plan=CheckpointPlan.for_graph(problem.graph, best.checkpoints),
        status=Status.OPTIMAL if bound == best.total_bytes else Status.FEASIBLE,
        lower_bound_bytes=bound + end_bytes,
    )


def cheapest_stops(sizes: Sequence[int], before: Sequence[int], cap_bytes: int) -> list[int]:
    """Algorithm 1: positions of the cheapest checkpoints in a row with segments of at most `cap_bytes`.

    The first and the last position are always kept. Neighbouring positions may both be kept, however heavy
    the segment between them. Among equally cheap sets, one with the fewest checkpoints is returned.
    The accessibility graph of the paper is not built: the possible predecessors of a position form a
    window that slides along the row. O(len(sizes)).

    Args:
        sizes: bytes of each position.
        before: bytes before each position, of positions and of what lies between them.
        cap_bytes: the limit on bytes between neighbouring checkpoints.

    >>> cheapest_stops([1, 5, 1, 5, 1], [0, 1, 6, 7, 12], cap_bytes=5)
    [0, 2, 4]
    """
    # By position: bytes and number of the cheapest checkpoints up to it, and the previous checkpoint.
    paths: list[tuple[int, int]] = [(0, 0)]
    previous = [0]
    # Positions from which the current one is accessible, best first. A position no better than a later
    # one is dropped, because the later one stays accessible for longer.
    window: deque[int] = deque()
    for stop in range(1, len(sizes)):
        while window and paths[window[-1]] >= paths[stop - 1]:
            window.pop()
        window.append(stop - 1)
        while window and before[stop] - before[window[0]] - sizes[window[0]] > cap_bytes:
            window.popleft()
        previous.append(window[0] if window else stop - 1)
        kept_bytes, number = paths[previous[stop]]
        paths.append((kept_bytes + sizes[stop], number + 1))

    stops = [len(sizes) - 1]
    while stops[-1]:
        stops.append(previous[stops[-1]])
    return stops[::-1]
