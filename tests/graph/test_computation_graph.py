from itertools import pairwise
from random import Random

import networkx as nx
import pytest

from onnxgc.errors import GraphFileError
from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.graph.virtual_terminals import VirtualTerminal, forced_checkpoints, with_single_terminals
from tests.graph.random_graphs import random_graph


def test_neighbours_follow_the_edges_in_topological_order():
    graph = ComputationGraph.from_unsorted(["d", "b", "a", "c"], [("b", "d"), ("a", "c"), ("a", "b"), ("c", "d")])
    assert graph.vertices == ("a", "b", "c", "d")
    assert graph.edges == (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    assert graph.successors("a") == ("b", "c")
    assert graph.predecessors("d") == ("b", "c")
    assert graph.sources == ("a",)
    assert graph.sinks == ("d",)
    assert [graph.topological_index(vertex) for vertex in "abcd"] == [0, 1, 2, 3]
    assert graph.in_order(["d", "a", "d"]) == ("a", "d")
    assert "a" in graph
    assert "e" not in graph


def test_sorting_keeps_every_edge_once_and_pointing_forward():
    random = Random(1)
    for _ in range(200):
        graph = random_graph(random, 12)
        edges = [*graph.edges, *random.sample(graph.edges, len(graph.edges) // 2)]
        random.shuffle(edges)
        vertices = list(graph.vertices)
        random.shuffle(vertices)
        resorted = ComputationGraph.from_unsorted(vertices, edges)
        assert set(resorted.edges) == set(graph.edges)
        assert len(resorted.edges) == len(graph.edges)
        assert all(resorted.topological_index(tail) < resorted.topological_index(head) for tail, head in resorted.edges)


def test_order_is_preserved_and_equal_graphs_have_equal_hashes():
    assert ComputationGraph.from_unsorted([3, 1, 2, 0], [(3, 0), (1, 0)]).vertices == (3, 1, 2, 0)
    one = ComputationGraph.from_unsorted("ab", [("a", "b"), ("a", "b")])
    other = ComputationGraph(("a", "b"), (("a", "b"),))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "vertices, edges, message",
    [
        ("", [], "no vertices"),
        ("aba", [], "vertex 'a' is given twice"),
        ("ab", [("a", "x")], "edge 'a' -> 'x' names vertex 'x'"),
        ("ab", [("x", "b")], "edge 'x' -> 'b' names vertex 'x'"),
        ("ab", [("a", "a")], "cycle: a -> a"),
        ("abcd", [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")], "cycle: "),
    ],
)
def test_malformed_graphs_raise_with_the_vertex(vertices: str, edges: list[tuple[str, str]], message: str):
    with pytest.raises(GraphFileError, match=message):
        ComputationGraph.from_unsorted(vertices, edges)


def test_named_cycle_exists():
    random = Random(2)
    for _ in range(100):
        count = random.randint(2, 8)
        edges = [(random.randrange(count), random.randrange(count)) for _ in range(3 * count)]
        cyclic = not nx.is_directed_acyclic_graph(nx.DiGraph(edges))
        if not cyclic:
            ComputationGraph.from_unsorted(range(count), edges)
            continue
        with pytest.raises(GraphFileError) as raised:
            ComputationGraph.from_unsorted(range(count), edges)
        walk = [int(name) for name in str(raised.value).split("cycle: ")[1].split(";")[0].split(" -> ")]
        assert walk[0] == walk[-1]
        assert set(pairwise(walk)) <= set(edges)


@pytest.mark.parametrize(
    "edges, message", [((("b", "a"),), "contradicts the order"), ((("a", "b"), ("a", "b")), "edge is given twice")]
)
def test_constructor_requires_sorted_distinct_input(edges: tuple[tuple[str, str], ...], message: str):
    with pytest.raises(GraphFileError, match=message):
        ComputationGraph(("a", "b"), edges)


def test_virtual_terminals_replace_several_ends_only():
    two_inputs = ComputationGraph(("a", "b", "c"), (("a", "c"), ("b", "c")))
    closed = with_single_terminals(two_inputs)
    assert closed.sources == (VirtualTerminal.SOURCE,)
    assert closed.sinks == ("c",)
    assert closed.successors(VirtualTerminal.SOURCE) == ("a", "b")
    assert forced_checkpoints(two_inputs) == ("c",)

    one_of_each = ComputationGraph(("a", "b"), (("a", "b"),))
    assert with_single_terminals(one_of_each) is one_of_each
    assert forced_checkpoints(one_of_each) == ("a", "b")
    assert forced_checkpoints(ComputationGraph(("a",), ())) == ("a",)


def test_every_vertex_of_a_closed_graph_is_on_a_path_from_source_to_target():
    random = Random(3)
    for _ in range(200):
        graph = random_graph(random, 10)
        closed = with_single_terminals(graph)
        view = nx.DiGraph(list(closed.edges))
        view.add_nodes_from(closed.vertices)
        (source,), (target,) = closed.sources, closed.sinks
        assert nx.descendants(view, source) | {source} == set(closed.vertices)
        assert nx.ancestors(view, target) | {target} == set(closed.vertices)
        assert set(graph.edges) <= set(closed.edges)
