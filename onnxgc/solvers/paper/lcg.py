"""The paper's search for linear computation graphs: chains of tensors of any sizes.

Source: Feng & Huang, CVPR 2021, Algorithm 1, with two deviations. The accessibility graph under a cap is not
built: the possible predecessors of a tensor form a window that slides along the chain. The cap is found by
bisection (`onnxgc.solvers.paper.segment_cap_search`), not by trying the cost of every pair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions, deadline_of
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.paper.segment_cap_search import CappedOptimum, search_caps


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise the paper's objective on a chain: for each cap, a shortest path in the accessibility graph.

    O(vertices) for each cap.

    Args:
        problem: a chain, sizes in bytes.
        options: `time_limit_seconds` is used; it gives the best plan found and a lower bound.

    Source: the paper, Algorithm 1.
    """
    vertices = problem.graph.vertices
    sizes = [problem.size_bytes(vertex) for vertex in vertices]
    before = list(accumulate(sizes, initial=0))

    def cheapest_under(cap_bytes: int) -> CappedOptimum:
        stops = cheapest_stops(sizes, cap_bytes)
        return CappedOptimum(
            checkpoints=tuple(vertices[stop] for stop in stops[1:-1]),
            interior_bytes=sum(sizes[stop] for stop in stops[1:-1]),
            heaviest_segment_bytes=max((before[b] - before[a + 1] for a, b in pairwise(stops)), default=0),
        )

    return search_caps(problem, cheapest_under, deadline_of(options))


def cheapest_stops(sizes: Sequence[int], cap_bytes: int) -> list[int]:
    """Positions of the cheapest checkpoints of a chain with at most `cap_bytes` between neighbours.

    The first and the last position are always kept. Among equally cheap sets, one with the fewest
    checkpoints is returned. O(len(sizes)).

    >>> cheapest_stops([1, 5, 1, 5, 1], cap_bytes=5)
    [0, 2, 4]
    """
    before = list(accumulate(sizes, initial=0))
    # By position: bytes and number of the cheapest checkpoints up to it, and the previous checkpoint.
    paths: list[tuple[int, int]] = [(0, 0)]
    previous = [0]
    # Positions from which the current one is accessible, best first. A position no better than a later
    # one is dropped, because the later one stays accessible for longer.
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
