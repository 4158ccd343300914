"""The paper's search for linear computation graphs: chains of tensors of any sizes.

Source: the paper, Algorithm 1. What differs from the printed text: the accessibility graph under a
cap is never built, since what may precede a tensor is a window that slides along the chain; and
not every cost of a pair is tried as the cap (`onnxgc.solvers.paper.segment_cap_search`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.paper.segment_cap_search import CappedOptimum, deadline_of, search_caps


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Algorithm 1: for each cap C worth trying, the shortest path in the accessibility graph."""
    vertices = problem.graph.vertices
    sizes = [problem.size_bytes(vertex) for vertex in vertices]
    before = list(accumulate(sizes, initial=0))

    def under(cap_bytes: int) -> CappedOptimum:
        stops = cheapest_stops(sizes, cap_bytes)
        return CappedOptimum(
            checkpoints=tuple(vertices[stop] for stop in stops[1:-1]),
            interior_bytes=sum(sizes[stop] for stop in stops[1:-1]),
            heaviest_segment_bytes=max((before[b] - before[a + 1] for a, b in pairwise(stops)), default=0),
        )

    return search_caps(problem, under, deadline_of(options))


def cheapest_stops(sizes: Sequence[int], cap_bytes: int) -> list[int]:
    """Places of the cheapest checkpoints of a chain with at most `cap_bytes` between neighbours.

    The first and the last place are always kept. Of equally cheap sets it takes one with fewest
    checkpoints. O(len(sizes)).
    """
    before = list(accumulate(sizes, initial=0))
    # Bytes and number of the cheapest checkpoints up to a place, and the one before it among them.
    paths: list[tuple[int, int]] = [(0, 0)]
    previous = [0]
    # Places from which the current one is accessible, best first. One that is no better than a later
    # one is never needed again: the later one stays accessible for longer.
    window: deque[int] = deque()
    for place in range(1, len(sizes)):
        while window and paths[window[-1]] >= paths[place - 1]:
            window.pop()
        window.append(place - 1)
        while before[place] - before[window[0] + 1] > cap_bytes:
            window.popleft()
        previous.append(window[0])
        kept, number = paths[window[0]]
        paths.append((kept + sizes[place], number + 1))

    stops = [len(sizes) - 1]
    while stops[-1]:
        stops.append(previous[stops[-1]])
    return stops[::-1]


LCG = Solver(
    name="lcg",
    summary="the paper's optimal search on chains of tensors of any sizes",
    search=search,
    exact_for=Objective.PAPER,
    exact_on=GraphFamily.CHAIN,
    family=GraphFamily.CHAIN,
)
