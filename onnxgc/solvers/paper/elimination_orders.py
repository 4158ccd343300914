"""Elimination orders with narrow frontiers, and parts of a graph that have one."""

import heapq
from collections.abc import Sequence

from onnxgc.solvers.paper.indexed_problem import IndexedProblem


def frontier_widths(problem: IndexedProblem, order: Sequence[int]) -> list[int]:
    undecided = [len(neighbours) for neighbours in problem.neighbours]
    decided = [False] * len(problem)
    width = 0
    widths = []
    for vertex in order:
        decided[vertex] = True
        width += undecided[vertex] > 0
        for neighbour in problem.neighbours[vertex]:
            undecided[neighbour] -= 1
            width -= decided[neighbour] and undecided[neighbour] == 0
        widths.append(width)
    return widths


def narrow_part(problem: IndexedProblem, order: Sequence[int], max_width: int) -> tuple[IndexedProblem, list[int]]:
    """A problem on some of the vertices, and an order of it with a frontier of up to `max_width` vertices.

    The optimum of the part is a lower bound on the whole problem: a valid set restricted to the part is
    valid there, and no component grows. Where the frontier would be too wide, the vertex with the most
    undecided neighbours is left out.
    """
    position = [0] * len(problem)
    for index, vertex in enumerate(order):
        position[vertex] = index
    undecided = [len(neighbours) for neighbours in problem.neighbours]
    taken = [False] * len(problem)
    frontier: set[int] = set()
    for vertex in order:
        taken[vertex] = True
        if undecided[vertex]:
            frontier.add(vertex)
        for neighbour in problem.neighbours[vertex]:
            undecided[neighbour] -= 1
            if undecided[neighbour] == 0:
                frontier.discard(neighbour)
        if len(frontier) > max_width:
            widest = max(frontier, key=lambda v: (undecided[v], -problem.sizes[v], position[v]))
            frontier.remove(widest)
            taken[widest] = False
    number = {vertex: index for index, vertex in enumerate(v for v in range(len(problem)) if taken[v])}
    part = IndexedProblem(
        sizes=[problem.sizes[v] for v in number],
        predecessors=[[number[n] for n in problem.predecessors[v] if taken[n]] for v in number],
        successors=[[number[n] for n in problem.successors[v] if taken[n]] for v in number],
        forced=[problem.forced[v] for v in number],
    )
    return part, [number[v] for v in order if taken[v]]


def narrow_order(problem: IndexedProblem) -> list[int]:
    """An elimination order with a small frontier; it ignores the direction of edges.

    Greedy: of the neighbours of the frontier, the next vertex is the one that leaves the smallest
    frontier, and the first of equals. O((vertices + edges) log(vertices)), apart from vertices with many
    neighbours.
    """
    count = len(problem)
    around = problem.neighbours
    undecided = [len(neighbours) for neighbours in around]
    decided = [False] * count
    # Growth of the frontier with a vertex: itself, less the vertices that have no other undecided neighbour.
    change = [1 if neighbours else 0 for neighbours in around]
    queue: list[tuple[int, int]] = []
    order: list[int] = []
    unseen = 0
    while len(order) < count:
        while queue:
            believed, vertex = heapq.heappop(queue)
            if not decided[vertex] and believed == change[vertex]:
                break
        else:
            while decided[unseen]:
                unseen += 1
            vertex = unseen
        decided[vertex] = True
        order.append(vertex)
        for neighbour in around[vertex]:
            undecided[neighbour] -= 1
            if not decided[neighbour]:
                change[neighbour] -= undecided[neighbour] == 0
                heapq.heappush(queue, (change[neighbour], neighbour))
        for one in (vertex, *around[vertex]):
            if decided[one] and undecided[one] == 1:
                last = next(v for v in around[one] if not decided[v])
                change[last] -= 1
                heapq.heappush(queue, (change[last], last))
    return order
