"""Virtual terminals: one source and one target for any graph.

The paper's graphs have one source and one target. Several inputs get a virtual source before them, several
outputs a virtual target after them. Virtual terminals cost nothing and are never in a plan.
"""

from enum import Enum

from onnxgc.graph.computation_graph import ComputationGraph, Edge, Vertex


class VirtualTerminal(Enum):
    """A vertex without a tensor."""

    SOURCE = "virtual source"
    TARGET = "virtual target"


def with_single_terminals(graph: ComputationGraph) -> ComputationGraph:
    """The graph with exactly one source and one sink; the graph itself if it has them.

    Every vertex of the result lies on a path from its source to its sink. In a graph of one vertex,
    that vertex is both.
    """
    vertices: tuple[Vertex, ...] = graph.vertices
    edges: tuple[Edge, ...] = graph.edges
    if len(graph.sources) > 1:
        vertices = (VirtualTerminal.SOURCE, *vertices)
        edges = (*((VirtualTerminal.SOURCE, source) for source in graph.sources), *edges)
    if len(graph.sinks) > 1:
        vertices = (*vertices, VirtualTerminal.TARGET)
        edges = (*edges, *((sink, VirtualTerminal.TARGET) for sink in graph.sinks))
    if vertices is graph.vertices:
        return graph
    return ComputationGraph(vertices, edges)


def forced_checkpoints(graph: ComputationGraph) -> tuple[Vertex, ...]:
    """The tensors that every plan keeps: a single source and a single target, in topological order.

    Several sources or targets are not forced; the virtual terminal is in their place.
    """
    sources, sinks = graph.sources, graph.sinks
    ends = (*(sources if len(sources) == 1 else ()), *(sinks if len(sinks) == 1 else ()))
    return graph.in_order(ends)
