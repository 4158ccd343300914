"""What a set of checkpoints leaves over: segments that are computed again as one piece.

Three readings of the paper's "independent segment" are told apart in this project. *Reading A*,
for which the paper's algorithms are exact: each weakly connected component of what is not kept
has exactly one checkpoint feeding it and exactly one fed by it. *Reading G* takes any component,
whatever feeds it. (*Reading B*, all branches between two checkpoints as one segment, is not used.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.terminals import forced_checkpoints, with_single_terminals


@dataclass(frozen=True, slots=True)
class IndependentSegment:
    """Tensors between two checkpoints that can be computed again, and differentiated, on their own.

    Source: the paper, Definition 1. `interior` is in topological order, without the two ends.
    """

    source: Vertex
    target: Vertex
    interior: tuple[Vertex, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A weakly connected component of the tensors that are not kept (reading G).

    `entries` are the checkpoints that it reads, `exits` those that are computed from it; either is
    empty where the component begins with the graph's sources or ends with its sinks. All three
    are in topological order.
    """

    entries: tuple[Vertex, ...]
    exits: tuple[Vertex, ...]
    interior: tuple[Vertex, ...]


def segments_between(graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> tuple[Segment, ...]:
    """The segments that remain when exactly `checkpoints` are kept, each after those it depends on.

    Where segments depend on each other both ways (none of them is convex), the one whose first
    tensor comes first goes first.
    """
    kept = set(checkpoints)
    owner: dict[Vertex, int] = {}
    interiors: list[list[Vertex]] = []
    for start in graph.vertices:
        if start in kept or start in owner:
            continue
        number = len(interiors)
        owner[start] = number
        found = [start]
        for vertex in found:  # grows while it is walked
            for neighbour in (*graph.predecessors(vertex), *graph.successors(vertex)):
                if neighbour not in kept and neighbour not in owner:
                    owner[neighbour] = number
                    found.append(neighbour)
        interiors.append(found)
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

    The single source and target always count as checkpoints; where there are several, the virtual
    terminal that stands for them does.
    """
    closed = with_single_terminals(graph)
    kept = {*checkpoints, closed.sources[0], closed.sinks[0]}
    return all(
        len(segment.entries) == 1 and len(segment.exits) == 1 for segment in segments_between(closed, kept)
    )


def is_valid_reading_g(graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> bool:
    """Whether the segments can be put in a row, each computed, and differentiated, as one piece.

    That is: contracted to one vertex each, they leave a graph without cycles. Then no path leaves a
    segment and comes back, nor do two segments wait for each other. The single source and target
    always count as checkpoints.
    """
    segments = segments_between(graph, (*checkpoints, *forced_checkpoints(graph)))
    group: dict[Vertex, Vertex] = {vertex: vertex for vertex in graph.vertices}
    group |= {vertex: segment.interior[0] for segment in segments for vertex in segment.interior}
    heads: dict[Vertex, list[Vertex]] = {first: [] for first in group.values()}
    waiting = dict.fromkeys(heads, 0)
    for tail, head in graph.edges:
        if group[tail] != group[head]:
            heads[group[tail]].append(group[head])
            waiting[group[head]] += 1
    ready = [first for first, count in waiting.items() if count == 0]
    for first in ready:  # grows while it is walked
        for head in heads[first]:
            waiting[head] -= 1
            if waiting[head] == 0:
                ready.append(head)
    return len(ready) == len(heads)


def _dependency_order(graph: ComputationGraph, owner: dict[Vertex, int], count: int) -> list[int]:
    """Segment numbers (rising with their first tensor), each after those that it waits for."""
    upstream = _upstream_segments(graph, owner, count)
    waiting = [upstream[number].bit_count() for number in range(count)]
    ready = [number for number in range(count) if waiting[number] == 0]
    left = dict.fromkeys(range(count))
    order: list[int] = []
    while left:
        if not ready:  # Interleaved segments: no order serves all of them.
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
