"""Families of graphs that solvers accept."""

from enum import Enum

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.virtual_terminals import VirtualTerminal
from onnxgc.planning.problem import CheckpointProblem


class GraphFamily(Enum):
    """Each family contains the next one."""

    ANY = "any graph"
    """Any directed acyclic graph: the paper's arbitrary computation graph (ACG)."""
    CHAIN = "chains"
    """Tensors in a row, of any sizes: the paper's linear computation graph (LCG)."""
    EQUAL_CHAIN = "chains of equal states"
    """A chain of tensors of equal size; the source and the target, always kept, may differ."""


def why_not_in(family: GraphFamily, problem: CheckpointProblem) -> str | None:
    """The reason why a problem is outside of a family, with vertices; `None` if it belongs to it."""
    if family is GraphFamily.ANY:
        return None
    reason = _why_not_chain(problem.graph)
    if reason is None and family is GraphFamily.EQUAL_CHAIN:
        reason = _why_not_equal(problem)
    return reason


def splitting_vertices(problem: CheckpointProblem) -> tuple[Vertex, ...]:
    """The tensors on every path from source to target, without the two ends, in order.

    On a chain these are all inner tensors. In graph theory they are the articulation points between the
    ends. O(vertices + edges).

    Source: the paper, Definition 2, for the whole graph.
    """
    graph = problem.closed_graph()
    index = graph.topological_index
    splitting: list[Vertex] = []
    # A vertex that no edge passes over in topological order lies on every path.
    farthest = 0
    for position, vertex in enumerate(graph.vertices[:-1]):
        if 0 < position == farthest and not isinstance(vertex, VirtualTerminal):
            splitting.append(vertex)
        farthest = max(farthest, index(graph.successors(vertex)[-1]))
    return tuple(splitting)


def _why_not_chain(graph: ComputationGraph) -> str | None:
    for vertex in graph.vertices:
        heads, tails = graph.successors(vertex), graph.predecessors(vertex)
        if len(heads) > 1:
            return f"vertex {vertex!r} branches into {heads[0]!r} and {heads[1]!r}"
        if len(tails) > 1:
            return f"vertex {vertex!r} joins {tails[0]!r} and {tails[1]!r}"
    if len(graph.sources) > 1:
        return f"vertices {graph.sources[0]!r} and {graph.sources[1]!r} begin two separate chains"
    return None


def _why_not_equal(problem: CheckpointProblem) -> str | None:
    inner = problem.graph.vertices[1:-1]
    for vertex in inner:
        if problem.size_bytes(vertex) != problem.size_bytes(inner[0]):
            return f"vertices {inner[0]!r} and {vertex!r} differ in size"
    return None
