from random import Random

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.orders import topological_orders
from tests.graph.random_graphs import problem_of, random_problem


def max_live_bytes(graph: ComputationGraph, order: tuple[Vertex, ...], sizes: dict[Vertex, int]) -> int:
    """The most live bytes between two vertices of an order."""
    place = {vertex: step for step, vertex in enumerate(order)}
    last = {v: max((place[head] for head in graph.successors(v)), default=place[v]) for v in order}
    return max(sum(sizes[v] for v in order if place[v] <= step < last[v]) for step in range(len(order)))


def test_all_orders_are_topological_and_distinct():
    random = Random(31)
    several = 0
    for _ in range(300):
        problem = random_problem(random, 14)
        orders = topological_orders(problem.graph, problem.size_bytes)
        assert orders[0] == problem.graph.vertices
        assert len(set(orders)) == len(orders) <= 4
        several += len(orders) > 1
        for order in orders:
            assert sorted(order, key=problem.graph.topological_index) == list(problem.graph.vertices)
            place = {vertex: step for step, vertex in enumerate(order)}
            assert all(place[tail] < place[head] for tail, head in problem.graph.edges)
    assert several > 150


def test_a_branch_is_finished_before_the_next_one():
    # Two branches 1-3-5 and 2-4-6 that the graph's own order interleaves.
    problem = problem_of([(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)], [1] * 8)
    assert (0, 1, 3, 5, 2, 4, 6, 7) in topological_orders(problem.graph, problem.size_bytes)


def test_some_order_keeps_few_bytes_live():
    # Ten branches, each large at first and small in the end: only depth keeps one of them large.
    edges, sizes = [], [1]
    for branch in range(10):
        edges += [(0, 1 + branch), (1 + branch, 11 + branch), (11 + branch, 21)]
    sizes += [100] * 10 + [1] * 10 + [1]
    problem = problem_of(edges, sizes)
    live = [
        max_live_bytes(problem.graph, order, dict(enumerate(sizes)))
        for order in topological_orders(problem.graph, problem.size_bytes)
    ]
    assert live[0] == 1000
    assert min(live) < 120


def test_orders_do_not_depend_on_names():
    random = Random(32)
    for _ in range(100):
        problem = random_problem(random, 14)
        graph = problem.graph
        names = {v: f"tensor {random.random()}" for v in graph.vertices}
        renamed = ComputationGraph(
            tuple(names[v] for v in graph.vertices), tuple((names[a], names[b]) for a, b in graph.edges)
        )
        sizes: dict[Vertex, int] = {names[v]: problem.size_bytes(v) for v in graph.vertices}
        orders = topological_orders(graph, problem.size_bytes)
        assert topological_orders(renamed, sizes.__getitem__) == tuple(
            tuple(names[v] for v in order) for order in orders
        )


def test_long_graphs():
    count = 20_000
    problem = problem_of([(v, v + 1) for v in range(count - 1)], [1] * count)
    assert topological_orders(problem.graph, problem.size_bytes) == (problem.graph.vertices,)
