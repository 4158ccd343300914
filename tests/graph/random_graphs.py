"""Random graphs for laws that hold for every graph, drawn from a given generator only."""

from itertools import pairwise
from random import Random

from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.problem import CheckpointProblem, TensorCost


def random_graph(random: Random, max_vertices: int) -> ComputationGraph:
    """A graph of one of four families, its vertices 0, 1, ... not always in topological order."""
    count = random.randint(1, max_vertices)
    family = random.choice([_any_edges, _one_source_and_sink, _nested, _layered])
    edges = family(random, max(count, 2)) if count > 1 else []
    count = max(count, 1 + max((head for _, head in edges), default=0))
    names = list(range(count))
    if random.random() < 0.3:
        random.shuffle(names)
    return ComputationGraph.from_unsorted(range(count), ((names[tail], names[head]) for tail, head in edges))


def random_problem(random: Random, max_vertices: int) -> CheckpointProblem:
    """Sizes from 0 up, a third of them 0 where the largest is drawn small."""
    graph = random_graph(random, max_vertices)
    largest = random.choice([1, 3, 10, 1000])
    sizes = [random.choice([0, random.randint(0, largest), random.randint(1, largest)]) for _ in graph.vertices]
    costs = {vertex: TensorCost(size) for vertex, size in zip(graph.vertices, sizes, strict=True)}
    return CheckpointProblem(graph, costs)


def problem_of(edges: list[tuple[int, int]], sizes: list[int]) -> CheckpointProblem:
    """Vertices 0, 1, ... of the given sizes in bytes."""
    graph = ComputationGraph.from_unsorted(range(len(sizes)), edges)
    return CheckpointProblem(graph, {vertex: TensorCost(size) for vertex, size in enumerate(sizes)})


def chain(sizes: list[int]) -> CheckpointProblem:
    return problem_of([(vertex, vertex + 1) for vertex in range(len(sizes) - 1)], sizes)


def _any_edges(random: Random, count: int) -> list[tuple[int, int]]:
    """Any number of sources and sinks, and of pieces."""
    density = random.choice([0.1, 0.2, 0.35, 0.5])
    return [(a, b) for a in range(count) for b in range(a + 1, count) if random.random() < density]


def _one_source_and_sink(random: Random, count: int) -> list[tuple[int, int]]:
    edges = set(_any_edges(random, count))
    for vertex in range(1, count):
        if not any(head == vertex for _, head in edges):
            edges.add((random.randint(max(0, vertex - 3), vertex - 1), vertex))
    for vertex in range(count - 1):
        if not any(tail == vertex for tail, _ in edges):
            edges.add((vertex, random.randint(vertex + 1, min(count - 1, vertex + 3))))
    return sorted(edges)


def _nested(random: Random, count: int) -> list[tuple[int, int]]:
    """Grown from one edge by series vertices, parallel vertices, and bridges in place of edges."""
    edges = [(0, 1)]
    fresh = 2
    while fresh < count:
        place = random.randrange(len(edges))
        tail, head = edges[place]
        step = random.choice(["series", "parallel", "bridge"])
        if step == "bridge" and fresh + 2 <= count:
            upper, lower = fresh, fresh + 1
            edges[place] = (tail, upper)
            edges += [(tail, lower), (upper, lower), (upper, head), (lower, head)]
            fresh += 2
            continue
        if step == "parallel":
            edges.append((tail, fresh))
        else:
            edges[place] = (tail, fresh)
        edges.append((fresh, head))
        fresh += 1
    return edges


def _layered(random: Random, count: int) -> list[tuple[int, int]]:
    layers: list[range] = []
    first = 0
    while first < count:
        width = min(count - first, random.randint(1, 3))
        layers.append(range(first, first + width))
        first += width
    edges = set()
    for above, below in pairwise(layers):
        edges |= {(random.choice(above), vertex) for vertex in below}
        edges |= {(vertex, random.choice(below)) for vertex in above}
    for _ in range(random.randint(0, 2)):
        if len(layers) > 2:
            skipped = random.randrange(len(layers) - 2)
            edges.add((random.choice(layers[skipped]), random.choice(layers[skipped + 2])))
    return sorted(edges)
