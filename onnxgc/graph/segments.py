"""Segments between checkpoints, each recomputed as a unit.

The paper's "independent segment" has several readings. *Reading A*, for which the paper's algorithms are
exact: each weakly connected component of discarded vertices has exactly one checkpoint feeding it and
exactly one fed by it. *Reading G* allows components with any number of both. (*Reading B*, all branches
between two checkpoints as one segment, is not used.)
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from onnxgc.graph.components import connected_components
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.virtual_terminals import with_single_terminals


@dataclass(frozen=True, slots=True)
class IndependentSegment:
    """Tensors between two checkpoints that can be recomputed and differentiated independently.

    `interior` is in topological order, without the two ends.

    Source: the paper, Definition 1.
    """

    source: Vertex
    target: Vertex
    interior: tuple[Vertex, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A weakly connected component of discarded tensors (reading G).

    `entries` are the checkpoints that it reads, `exits` those computed from it. Either is empty if the
    component begins with the graph's sources or ends with its sinks. All three are in topological order.
    """

    entries: tuple[Vertex, ...]
    exits: tuple[Vertex, ...]
    interior: tuple[Vertex, ...]


def segments_between(graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> tuple[Segment, ...]:
    """The segments when exactly `checkpoints` are kept, each after the segments that it depends on.

    Among segments that depend on each other in both directions, the one with the earliest first tensor
    comes first. O(vertices + edges + segments^2) operations on bitsets of segments.

    >>> graph = ComputationGraph.from_unsorted(range(5), [(0, 1), (1, 2), (2, 3), (3, 4)])
    >>> segments_between(graph, [0, 2, 4])
    (Segment(entries=(0,), exits=(2,), interior=(1,)), Segment(entries=(2,), exits=(4,), interior=(3,)))
    """
    kept = set(checkpoints)
    discarded = [vertex for vertex in graph.vertices if vertex not in kept]
    interiors = connected_components(discarded, graph.neighbours)
    owner = {vertex: number for number, interior in enumerate(interiors) for vertex in interior}
    return tuple(
        Segment(
            entries=graph.in_order(e for v in interiors[n] for e in graph.predecessors(v) if e in kept),
            exits=graph.in_order(e for v in interiors[n] for e in graph.successors(v) if e in kept),
            interior=graph.in_order(interiors[n]),
        )
        for n in _dependency_order(graph, owner, len(interiors))
    )


def is_valid_reading_a(graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> bool:
    """Whether every segment has exactly one entry and one exit.

    A single source and a single target always count as checkpoints; several are represented by a virtual
    terminal, which counts as one.
    """
    closed = with_single_terminals(graph)
    kept = {*checkpoints, closed.sources[0], closed.sinks[0]}
    return all(len(segment.entries) == 1 and len(segment.exits) == 1 for segment in segments_between(closed, kept))


def _dependency_order(graph: ComputationGraph, owner: dict[Vertex, int], count: int) -> list[int]:
    """Segment numbers (rising with their first tensor), each after its dependencies."""
    upstream = _upstream_segments(graph, owner, count)
    waiting = [upstream[number].bit_count() for number in range(count)]
    ready = [number for number in range(count) if waiting[number] == 0]
    left = dict.fromkeys(range(count))
    order: list[int] = []
    while left:
        if not ready:  # Interleaved segments have no valid order.
            ready.append(next(iter(left)))
        number = heapq.heappop(ready)
        del left[number]
        order.append(number)
        for other in left:
            if upstream[other] >> number & 1:
                upstream[other] ^= 1 << number
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, other)
    return order


def _upstream_segments(graph: ComputationGraph, owner: dict[Vertex, int], count: int) -> list[int]:
    """For each segment, the bitset of the other segments with a path into it."""
    reaching: dict[Vertex, int] = {}
    upstream = [0] * count
    for vertex in graph.vertices:
        above = 0
        for predecessor in graph.predecessors(vertex):
            above |= reaching[predecessor]
        if vertex in owner:
            upstream[owner[vertex]] |= above
            above |= 1 << owner[vertex]
        reaching[vertex] = above
    return [bits & ~(1 << number) for number, bits in enumerate(upstream)]
