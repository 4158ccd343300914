"""Kinds of graphs that solvers are made for, and why a graph is not of a kind."""

from __future__ import annotations

from enum import Enum

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.terminals import VirtualTerminal
from onnxgc.planning.problem import CheckpointProblem


class GraphFamily(Enum):
    """Each family holds the next one."""

    ANY = "any graph"
    """Any directed acyclic graph: the paper's arbitrary computation graph (ACG)."""
    CHAIN = "chains"
    """One tensor after the other, at any costs: the paper's linear computation graph (LCG)."""
    EQUAL_CHAIN = "chains of equal states"
    """A chain whose tensors have one size; its source and target, always kept, may differ."""


def why_not_in(family: GraphFamily, problem: CheckpointProblem) -> str | None:
    """What keeps a problem out of a family, naming vertices; `None` if it belongs to it."""
    if family is GraphFamily.ANY:
        return None
    reason = _why_no_chain(problem.graph)
    if reason is None and family is GraphFamily.EQUAL_CHAIN:
        reason = _why_not_equal(problem)
    return reason


def splitting_vertices(problem: CheckpointProblem) -> tuple[Vertex, ...]:
    """The tensors that every path from source to target visits, without those two ends, in order.

    On a chain these are all inner tensors. In graph theory they are the articulation points
    between the ends.

    Source: the paper, Definition 2, for the whole graph.
    """
    graph = problem.closed_graph()
    index = graph.topological_index
    found: list[Vertex] = []
    # A vertex that no edge passes over in topological order lies on every path.
    farthest = 0
    for place, vertex in enumerate(graph.vertices[:-1]):
        if 0 < place == farthest and not isinstance(vertex, VirtualTerminal):
            found.append(vertex)
        farthest = max(farthest, index(graph.successors(vertex)[-1]))
    return tuple(found)


def _why_no_chain(graph: ComputationGraph) -> str | None:
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
