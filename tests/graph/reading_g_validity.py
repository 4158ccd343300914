"""Validity of a set of checkpoints under reading G (`onnxgc.graph.segments`)."""

from collections.abc import Iterable

from onnxgc.graph.components import contracts_without_cycle
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.segments import segments_between
from onnxgc.graph.virtual_terminals import forced_checkpoints


def is_valid_reading_g(graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> bool:
    """Whether the segments can be ordered such that each is recomputed and differentiated as a unit.

    The condition: contracted to one vertex each, they leave a graph without cycles. Then no path leaves a
    segment and returns, and no two segments depend on each other. A single source and a single target
    always count as checkpoints. O(vertices + edges).
    """
    segments = segments_between(graph, (*checkpoints, *forced_checkpoints(graph)))
    group: dict[Vertex, Vertex] = {vertex: vertex for vertex in graph.vertices}
    group |= {vertex: segment.interior[0] for segment in segments for vertex in segment.interior}
    return contracts_without_cycle(group, graph.edges)
