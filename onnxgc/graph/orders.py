"""A few good orders in which a graph can be computed.

What is alive between two steps depends on the order of the steps, and so does every search that
walks along one order. Each order here is found in near-linear time and depends on nothing but the
graph, the sizes and the graph's own order, which breaks all ties.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from onnxgc.graph.computation_graph import ComputationGraph, Vertex

Adjacency = Sequence[Sequence[int]]
"""Neighbours by topological index."""


def topological_orders(
    graph: ComputationGraph, size_of: Callable[[Vertex], int]
) -> tuple[tuple[Vertex, ...], ...]:
    """Distinct topological orders of all vertices; the graph's own is the first.

    The others keep the bytes small that are alive between two steps (greedily, from the sources
    down), finish a branch before they start the next one (depth first), and keep the bytes alive
    small from the sinks up, in this order.
    `size_of` gives a tensor's size in bytes.
    """
    index = graph.topological_index
    successors = [[index(head) for head in graph.successors(v)] for v in graph.vertices]
    predecessors = [[index(tail) for tail in graph.predecessors(v)] for v in graph.vertices]
    sizes = [size_of(vertex) for vertex in graph.vertices]
    upwards = _least_alive_upwards(successors, predecessors, sizes)
    found = (
        list(range(len(graph))),
        _least_alive(successors, predecessors, sizes),
        _depth_first(successors, predecessors),
        upwards[::-1],
    )
    return tuple(dict.fromkeys(tuple(graph.vertices[place] for place in order) for order in found))


def _depth_first(successors: Adjacency, predecessors: Adjacency) -> list[int]:
    """What has just become ready goes first, of several the one with the lowest index."""
    missing = [len(tails) for tails in predecessors]
    ready = [place for place in reversed(range(len(missing))) if missing[place] == 0]
    order = []
    while ready:
        place = ready.pop()
        order.append(place)
        for head in reversed(successors[place]):
            missing[head] -= 1
            if missing[head] == 0:
                ready.append(head)
    return order


def _least_alive(successors: Adjacency, predecessors: Adjacency, sizes: Sequence[int]) -> list[int]:
    """The ready vertex that adds least to the bytes alive, or frees most, goes first.

    A tensor is alive from its own step to that of its last reader.
    """
    missing = [len(tails) for tails in predecessors]
    readers_left = [len(heads) for heads in successors]
    # The sum of the readers that are left is the last reader where one is left.
    reader_sum = [sum(heads) for heads in successors]
    change = [
        (size if heads else 0) - sum(sizes[tail] for tail in tails if len(successors[tail]) == 1)
        for size, heads, tails in zip(sizes, successors, predecessors, strict=True)
    ]
    done = [False] * len(sizes)
    ready = [(change[place], place) for place in range(len(sizes)) if missing[place] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        believed, place = heapq.heappop(ready)
        if done[place] or believed != change[place]:
            continue  # A better entry was pushed later.
        done[place] = True
        order.append(place)
        for tail in predecessors[place]:
            readers_left[tail] -= 1
            reader_sum[tail] -= place
            if readers_left[tail] == 1:
                last = reader_sum[tail]
                change[last] -= sizes[tail]
                if missing[last] == 0:
                    heapq.heappush(ready, (change[last], last))
        for head in successors[place]:
            missing[head] -= 1
            if missing[head] == 0:
                heapq.heappush(ready, (change[head], head))
    return order


def _least_alive_upwards(successors: Adjacency, predecessors: Adjacency, sizes: Sequence[int]) -> list[int]:
    """A reverse order built from the sinks: what joins last, counted from below, adds least alive.

    From below a tensor becomes alive with its last reader and ends with its own step; so a step
    adds those of its inputs that are not alive yet.
    """
    waiting = [len(heads) for heads in successors]
    alive = [False] * len(sizes)
    change = [
        sum(sizes[tail] for tail in tails) - (size if heads else 0)
        for size, heads, tails in zip(sizes, successors, predecessors, strict=True)
    ]
    done = [False] * len(sizes)
    # From below the graph's own order runs backwards: the highest index goes first.
    ready = [(change[place], -place) for place in range(len(sizes)) if waiting[place] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        believed, negative = heapq.heappop(ready)
        place = -negative
        if done[place] or believed != change[place]:
            continue  # A better entry was pushed later.
        done[place] = True
        order.append(place)
        for tail in predecessors[place]:
            if not alive[tail]:
                alive[tail] = True
                for reader in successors[tail]:
                    if not done[reader]:
                        change[reader] -= sizes[tail]
                        if waiting[reader] == 0:
                            heapq.heappush(ready, (change[reader], -reader))
            waiting[tail] -= 1
            if waiting[tail] == 0:
                heapq.heappush(ready, (change[tail], -tail))
    return order
