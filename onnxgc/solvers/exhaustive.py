"""Every set of checkpoints, by the definition: the truth that other solvers are tested against.

It shares no code with them on purpose: neither segments nor division trees.
"""

from __future__ import annotations

from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.objective import Objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions

MAX_VERTICES = 16


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise the paper's objective over all sets that are valid under reading A.

    Of equally good sets it takes one with fewest checkpoints, then the first in order of bits.
    """
    del options  # Nothing to choose.
    neighbourhood = _Neighbourhood(problem.graph)
    sizes = [problem.size_bytes(vertex) for vertex in problem.graph.vertices]
    best: tuple[int, int, int] | None = None
    for kept in range(1 << len(sizes)):
        if kept & neighbourhood.forced != neighbourhood.forced:
            continue
        components = neighbourhood.independent_components(kept)
        if components is None:
            continue
        heaviest = max((_sum_of(sizes, component) for component in components), default=0)
        candidate = (_sum_of(sizes, kept) + heaviest, kept.bit_count(), kept)
        if best is None or candidate < best:
            best = candidate
    assert best is not None, "keeping everything is always valid"
    checkpoints = (v for place, v in enumerate(problem.graph.vertices) if best[2] >> place & 1)
    return Finding(CheckpointPlan(tuple(checkpoints)), Status.OPTIMAL, best[0])


class _Neighbourhood:
    """A graph in bitsets: bit n is the vertex at topological index n.

    Where there are several sources, one more bit stands for the virtual source, and likewise for
    the target.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        count = len(graph)
        self._all = (1 << count) - 1
        self._feeding = [0] * count
        self._fed = [0] * count
        for tail, head in graph.edges:
            self._fed[graph.topological_index(tail)] |= 1 << graph.topological_index(head)
            self._feeding[graph.topological_index(head)] |= 1 << graph.topological_index(tail)

        sources = [n for n in range(count) if not self._feeding[n]]
        sinks = [n for n in range(count) if not self._fed[n]]
        self.forced = 0
        for ends, edges, virtual in ((sources, self._feeding, count), (sinks, self._fed, count + 1)):
            if len(ends) == 1:
                self.forced |= 1 << ends[0]
                continue
            for end in ends:
                edges[end] |= 1 << virtual

    def independent_components(self, kept: int) -> list[int] | None:
        """The components of what is not kept; `None` if one has not exactly one entry and one exit."""
        components = []
        left = self._all & ~kept
        while left:
            component, feeding, fed = self._flood(left & -left, left)
            if (feeding & ~component).bit_count() != 1 or (fed & ~component).bit_count() != 1:
                return None
            components.append(component)
            left &= ~component
        return components

    def _flood(self, start: int, within: int) -> tuple[int, int, int]:
        """The weakly connected component of `start`, all that feeds its vertices, all fed by them."""
        component = fresh = start
        feeding = fed = 0
        while fresh:
            vertex = fresh.bit_length() - 1
            feeding |= self._feeding[vertex]
            fed |= self._fed[vertex]
            reached = (self._feeding[vertex] | self._fed[vertex]) & within & ~component
            component |= reached
            fresh = fresh & ~(1 << vertex) | reached
        return component, feeding, fed


def _sum_of(sizes: list[int], members: int) -> int:
    return sum(size for place, size in enumerate(sizes) if members >> place & 1)


EXHAUSTIVE = Solver(
    name="exhaustive",
    summary=f"every set of checkpoints, for graphs of up to {MAX_VERTICES} vertices",
    search=search,
    exact_for=Objective.PAPER,
    max_vertices=MAX_VERTICES,
)
