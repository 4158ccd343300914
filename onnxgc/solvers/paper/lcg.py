"""The paper's search for linear computation graphs: chains of tensors of any sizes.

Source: Feng & Huang, CVPR 2021, Algorithm 1. The cap is found by bisection
(`onnxgc.solvers.paper.segment_cap_search`), not by trying the cost of every pair.
"""

from itertools import accumulate, pairwise

from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions, deadline_of
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.paper.segment_cap_search import CappedOptimum, cheapest_stops, search_caps


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
        stops = cheapest_stops(sizes, before, cap_bytes)
        return CappedOptimum(
            checkpoints=tuple(vertices[stop] for stop in stops[1:-1]),
            interior_bytes=sum(sizes[stop] for stop in stops[1:-1]),
            heaviest_segment_bytes=max((before[b] - before[a + 1] for a, b in pairwise(stops)), default=0),
        )

    return search_caps(problem, cheapest_under, deadline_of(options))


LCG = Solver(
    name="lcg",
    summary="the paper's optimal search on chains of tensors of any sizes",
    search=search,
    exact_for=Objective.PAPER,
    exact_on=GraphFamily.CHAIN,
    family=GraphFamily.CHAIN,
)
