"""The optimum of reading G by trying every set, without code shared with any solver.

`python -m tests.solvers.reading_g 10000` compares the solver `general` with it on 10,000 random graphs.
"""

import sys
from dataclasses import dataclass
from random import Random

from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.paper.orderable_segments import GENERAL
from tests.graph.random_graphs import random_problem


def optimum_bytes(problem: CheckpointProblem) -> int:
    """The least sum of kept tensors and heaviest component, over sets that contract without a cycle.

    Bit n is the vertex at topological index n. A single source and a single sink are kept.
    """
    graph = problem.graph
    count = len(graph)
    place = {vertex: n for n, vertex in enumerate(graph.vertices)}
    fed, adjacent = [0] * count, [0] * count
    for tail, head in graph.edges:
        fed[place[tail]] |= 1 << place[head]
        adjacent[place[tail]] |= 1 << place[head]
        adjacent[place[head]] |= 1 << place[tail]
    has_input = 0
    for heads in fed:
        has_input |= heads
    sources = [n for n in range(count) if not has_input >> n & 1]
    sinks = [n for n in range(count) if not fed[n]]
    everything = (1 << count) - 1
    free = everything
    for ends in (sources, sinks):
        if len(ends) == 1:
            free &= ~(1 << ends[0])

    weight = [0] * (1 << count)
    for members in range(1, 1 << count):
        lowest = members & -members
        weight[members] = weight[members ^ lowest] + problem.size_bytes(graph.vertices[lowest.bit_length() - 1])
    best = weight[everything]
    dropped = free
    while dropped:
        kept = everything & ~dropped
        if weight[kept] < best:
            pieces = components(adjacent, dropped)
            value = weight[kept] + max(weight[piece] for piece in pieces)
            if value < best and contracts_without_cycle(fed, kept, pieces):
                best = value
        dropped = (dropped - 1) & free
    return best


def components(adjacent: list[int], members: int) -> list[int]:
    pieces = []
    while members:
        piece = fresh = members & -members
        while fresh:
            lowest = fresh & -fresh
            reached = adjacent[lowest.bit_length() - 1] & members & ~piece
            piece |= reached
            fresh = fresh ^ lowest | reached
        pieces.append(piece)
        members &= ~piece
    return pieces


def contracts_without_cycle(fed: list[int], kept: int, pieces: list[int]) -> bool:
    """Whether pieces and kept vertices without remaining successors can be removed until none remain."""
    left = [*pieces, *(1 << n for n in range(len(fed)) if kept >> n & 1)]
    removed = 0
    while left:
        for piece in left:
            below = 0
            for n, heads in enumerate(fed):
                if piece >> n & 1:
                    below |= heads
            if not below & ~piece & ~removed:
                removed |= piece
                left.remove(piece)
                break
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class OptimalityCounts:
    """Numbers of graphs on which `general` equals the optimum, and proves it."""

    graphs: int
    equal: int
    proved: int
    false_bounds: int


def compare(seed: int, graphs: int, max_vertices: int) -> OptimalityCounts:
    random = Random(seed)
    equal = proved = false_bounds = 0
    for _ in range(graphs):
        problem = random_problem(random, max_vertices)
        solution, optimum = GENERAL.solve(problem), optimum_bytes(problem)
        equal += solution.objective_bytes == optimum
        proved += solution.lower_bound_bytes == optimum == solution.objective_bytes
        false_bounds += not solution.lower_bound_bytes <= optimum <= solution.objective_bytes
    return OptimalityCounts(graphs, equal, proved, false_bounds)


if __name__ == "__main__":
    print(compare(seed=1, graphs=int(sys.argv[1]), max_vertices=12))
