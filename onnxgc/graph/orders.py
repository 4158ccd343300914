"""Topological orders with few live bytes.

The live tensors between two vertices depend on the order, and so does every search along one order.
Each order here takes O((vertices + edges) log(vertices)) and depends only on the graph, the sizes, and the
graph's own order, which breaks all ties.
"""

import heapq
from collections.abc import Callable, Sequence

from onnxgc.graph.computation_graph import ComputationGraph, Vertex

Adjacency = Sequence[Sequence[int]]
"""Neighbours by topological index."""


def topological_orders(graph: ComputationGraph, size_of: Callable[[Vertex], int]) -> tuple[tuple[Vertex, ...], ...]:
    """Distinct topological orders of all vertices, the graph's own first.

    The others are, in this order: the greedy order of least live bytes from the sources down, the
    depth-first order, which finishes a branch before it starts the next one, and the greedy order of least
    live bytes from the sinks up.

    Args:
        graph: any acyclic graph.
        size_of: a tensor's size in bytes.

    >>> graph = ComputationGraph.from_unsorted(range(6), [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)])
    >>> topological_orders(graph, lambda vertex: 1)
    ((0, 1, 2, 3, 4, 5), (0, 1, 3, 2, 4, 5))
    """
    predecessors, successors = graph.adjacency()
    sizes = [size_of(vertex) for vertex in graph.vertices]
    orders = (
        range(len(graph)),
        _least_live(successors, predecessors, sizes),
        _depth_first(successors, predecessors),
        _least_live_upwards(successors, predecessors, sizes)[::-1],
    )
    return tuple(dict.fromkeys(tuple(graph.vertices[index] for index in order) for order in orders))


def _depth_first(successors: Adjacency, predecessors: Adjacency) -> list[int]:
    """The vertex that became ready last comes first; among several, the one with the lowest index."""
    missing = [len(tails) for tails in predecessors]
    ready = [vertex for vertex in reversed(range(len(missing))) if missing[vertex] == 0]
    order = []
    while ready:
        vertex = ready.pop()
        order.append(vertex)
        for head in reversed(successors[vertex]):
            missing[head] -= 1
            if missing[head] == 0:
                ready.append(head)
    return order


def _least_live(successors: Adjacency, predecessors: Adjacency, sizes: Sequence[int]) -> list[int]:
    """Greedy: next comes the ready vertex that adds the fewest live bytes, or releases the most.

    A tensor is live from its own position to its last reader.
    """
    missing = [len(tails) for tails in predecessors]
    readers_left = [len(heads) for heads in successors]
    # With one reader left, the sum of the remaining readers is that reader.
    reader_sum = [sum(heads) for heads in successors]
    change = [
        (size if heads else 0) - sum(sizes[tail] for tail in tails if len(successors[tail]) == 1)
        for size, heads, tails in zip(sizes, successors, predecessors, strict=True)
    ]
    done = [False] * len(sizes)
    ready = [(change[vertex], vertex) for vertex in range(len(sizes)) if missing[vertex] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        entry_change, vertex = heapq.heappop(ready)
        if done[vertex] or entry_change != change[vertex]:
            continue  # A better entry was pushed later.
        done[vertex] = True
        order.append(vertex)
        for tail in predecessors[vertex]:
            readers_left[tail] -= 1
            reader_sum[tail] -= vertex
            if readers_left[tail] == 1:
                last = reader_sum[tail]
                change[last] -= sizes[tail]
                if missing[last] == 0:
                    heapq.heappush(ready, (change[last], last))
        for head in successors[vertex]:
            missing[head] -= 1
            if missing[head] == 0:
                heapq.heappush(ready, (change[head], head))
    return order


def _least_live_upwards(successors: Adjacency, predecessors: Adjacency, sizes: Sequence[int]) -> list[int]:
    """A reverse order, greedy from the sinks: next comes the vertex that adds the fewest live bytes.

    In reverse, a tensor becomes live at its last reader and ends at its own position. So a vertex adds
    those of its inputs that are not live yet.
    """
    waiting = [len(heads) for heads in successors]
    live = [False] * len(sizes)
    change = [
        sum(sizes[tail] for tail in tails) - (size if heads else 0)
        for size, heads, tails in zip(sizes, successors, predecessors, strict=True)
    ]
    done = [False] * len(sizes)
    # In reverse, the highest index comes first.
    ready = [(change[vertex], -vertex) for vertex in range(len(sizes)) if waiting[vertex] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        entry_change, negative = heapq.heappop(ready)
        vertex = -negative
        if done[vertex] or entry_change != change[vertex]:
            continue  # A better entry was pushed later.
        done[vertex] = True
        order.append(vertex)
        for tail in predecessors[vertex]:
            if not live[tail]:
                live[tail] = True
                for reader in successors[tail]:
                    if not done[reader]:
                        change[reader] -= sizes[tail]
                        if waiting[reader] == 0:
                            heapq.heappush(ready, (change[reader], -reader))
            waiting[tail] -= 1
            if waiting[tail] == 0:
                heapq.heappush(ready, (change[tail], -tail))
    return order
