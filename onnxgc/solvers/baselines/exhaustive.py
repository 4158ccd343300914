"""Every set of checkpoints, by definition: ground truth for tests of other solvers.

On purpose it shares no code with them: neither segments nor division trees nor cuts.
"""

from collections.abc import Iterator
from functools import reduce

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions

MAX_VERTICES = 16
MAX_VERTICES_FOR_PEAK = 10
MAX_ORDERS = 200


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise an objective over all valid sets of checkpoints; for the peak, also over all orders.

    Among equally good sets, the one with the fewest checkpoints, then the first in the order of bits, is
    returned. O(2^vertices (vertices + edges)), times the number of orders for the peak.

    Args:
        problem: at most `MAX_VERTICES` vertices; for the peak, `MAX_VERTICES_FOR_PEAK` and
            `MAX_ORDERS` orders.
        options: `objective` is used.

    Raises:
        PlanError: there are too many sets or orders for the peak.
    """
    if options.objective is Objective.PEAK:
        return _least_peak(problem)
    neighbourhood = _Neighbourhood(problem.graph)
    sizes = [problem.size_bytes(vertex) for vertex in problem.graph.vertices]
    best: tuple[int, int, int] | None = None
    for kept in range(1 << len(sizes)):
        if kept & neighbourhood.forced != neighbourhood.forced:
            continue
        components = neighbourhood.components(kept)
        if options.objective is Objective.GENERAL:
            valid = neighbourhood.can_be_ordered(components)
        else:
            valid = all(map(neighbourhood.is_independent, components))
        if not valid:
            continue
        heaviest = max((_sum_of(sizes, component) for component in components), default=0)
        candidate = (_sum_of(sizes, kept) + heaviest, kept.bit_count(), kept)
        if best is None or candidate < best:
            best = candidate
    assert best is not None, "keeping everything is always valid"
    checkpoints = (v for index, v in enumerate(problem.graph.vertices) if best[2] >> index & 1)
    return Finding(CheckpointPlan(tuple(checkpoints)), Status.OPTIMAL, best[0])


def _least_peak(problem: CheckpointProblem) -> Finding:
    """The least simulated peak over all orders and all sets of the vertices."""
    vertices = problem.graph.vertices
    if len(vertices) > MAX_VERTICES_FOR_PEAK:
        raise PlanError(
            f"solver 'exhaustive' takes graphs of up to {MAX_VERTICES_FOR_PEAK} vertices for the peak, "
            f"this one has {len(vertices)}; use solver 'peak'"
        )
    joint = problem.joint()
    plans = (
        CheckpointPlan(
            tuple(v for index, v in enumerate(vertices) if kept >> index & 1), order, keeps_last_segment=False
        )
        for order in topological_sorts(problem.graph)
        for kept in range(1 << len(vertices))
    )
    peak, _, plan = min(
        ((joint.profile(plan).peak_bytes, len(plan.checkpoints), plan) for plan in plans), key=lambda item: item[:2]
    )
    return Finding(plan, Status.OPTIMAL, peak)


def topological_sorts(graph: ComputationGraph) -> Iterator[tuple[Vertex, ...]]:
    """All topological orders of the vertices.

    Raises:
        PlanError: there are more than `MAX_ORDERS`.
    """
    count = 0
    unfinished: list[tuple[Vertex, ...]] = [()]
    while unfinished:
        begun = unfinished.pop()
        if len(begun) == len(graph):
            count += 1
            if count > MAX_ORDERS:
                raise PlanError(
                    f"solver 'exhaustive' tries up to {MAX_ORDERS} orders for the peak, this graph has more; "
                    "use solver 'peak'"
                )
            yield begun
            continue
        ready = (v for v in graph.vertices if v not in begun and set(graph.predecessors(v)) <= set(begun))
        unfinished.extend([(*begun, vertex) for vertex in ready][::-1])


class _Neighbourhood:
    """A graph in bitsets: bit n is the vertex at topological index n.

    Several sources are connected to an additional bit for the virtual source; several targets likewise.
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

    def components(self, kept: int) -> list[int]:
        """The weakly connected components of the discarded vertices."""
        components = []
        left = self._all & ~kept
        while left:
            component = fresh = left & -left
            while fresh:
                vertex = fresh.bit_length() - 1
                reached = (self._feeding[vertex] | self._fed[vertex]) & left & ~component
                component |= reached
                fresh = fresh & ~(1 << vertex) | reached
            components.append(component)
            left &= ~component
        return components

    def is_independent(self, component: int) -> bool:
        """Whether a component has exactly one entry and one exit."""
        feeding = self._union(self._feeding, component) & ~component
        fed = self._union(self._fed, component) & ~component
        return feeding.bit_count() == 1 and fed.bit_count() == 1

    def can_be_ordered(self, components: list[int]) -> bool:
        """Whether the components, contracted to one vertex each, leave a graph without cycles."""
        waiting = [*components, *(1 << n for n in range(self._all.bit_length()))]
        waiting = [part for n, part in enumerate(waiting) if n < len(components) or part & ~sum(components)]
        done = 0
        while waiting:
            ready = [part for part in waiting if not self._union(self._feeding, part) & self._all & ~(done | part)]
            if not ready:
                return False
            done |= sum(ready)
            waiting = [part for part in waiting if part not in ready]
        return True

    def _union(self, neighbours: list[int], members: int) -> int:
        return reduce(
            lambda union, index: union | neighbours[index],
            (index for index in range(len(neighbours)) if members >> index & 1),
            0,
        )


def _sum_of(sizes: list[int], members: int) -> int:
    return sum(size for index, size in enumerate(sizes) if members >> index & 1)


EXHAUSTIVE = Solver(
    name="exhaustive",
    summary=f"every set of checkpoints, for graphs of up to {MAX_VERTICES} vertices",
    search=search,
    objectives=(Objective.PAPER, Objective.GENERAL, Objective.PEAK),
    exact_for=Objective.PAPER,
    max_vertices=MAX_VERTICES,
)
