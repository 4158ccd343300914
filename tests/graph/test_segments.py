from random import Random

import networkx as nx
import pytest

from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.graph.segments import Segment, is_valid_reading_a, segments_between
from tests.graph.random_graphs import random_graph


def test_segments_of_a_residual_block():
    graph = ComputationGraph.from_unsorted(range(6), [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (4, 5)])
    assert segments_between(graph, [0, 1, 3, 5]) == (Segment((1,), (3,), (2,)), Segment((3,), (5,), (4,)))
    assert segments_between(graph, [0, 2, 5]) == (Segment((0, 2), (2, 5), (1, 3, 4)),)
    assert segments_between(graph, graph.vertices) == ()
    assert segments_between(graph, []) == (Segment((), (), (0, 1, 2, 3, 4, 5)),)


def test_segments_are_the_components_with_their_neighbours():
    random = Random(4)
    for _ in range(400):
        graph = random_graph(random, 12)
        kept = {vertex for vertex in graph.vertices if random.random() < 0.4}
        view = nx.DiGraph(list(graph.edges))
        view.add_nodes_from(graph.vertices)
        rest = view.subgraph([vertex for vertex in graph.vertices if vertex not in kept])
        expected = set()
        for component in nx.weakly_connected_components(rest):
            entries = {tail for tail, head in graph.edges if head in component and tail in kept}
            exits = {head for tail, head in graph.edges if tail in component and head in kept}
            expected.add((graph.in_order(entries), graph.in_order(exits), graph.in_order(component)))
        segments = segments_between(graph, kept)
        assert {(s.entries, s.exits, s.interior) for s in segments} == expected
        assert len(segments) == len(expected)


def dependencies(graph: ComputationGraph, segments: tuple[Segment, ...]) -> nx.DiGraph:
    """The graph with each segment as one vertex, named by its number."""
    owner = {vertex: number for number, segment in enumerate(segments) for vertex in segment.interior}
    quotient = nx.DiGraph()
    quotient.add_nodes_from(range(len(segments)))
    for tail, head in graph.edges:
        ends = owner.get(tail, ("kept", tail)), owner.get(head, ("kept", head))
        if ends[0] != ends[1]:
            quotient.add_edge(*ends)
    return quotient


def test_segments_come_after_those_they_depend_on():
    random = Random(5)
    interleaved = 0
    for _ in range(400):
        graph = random_graph(random, 12)
        segments = segments_between(graph, [v for v in graph.vertices if random.random() < 0.5])
        quotient = dependencies(graph, segments)
        if not nx.is_directed_acyclic_graph(quotient):
            interleaved += 1
            continue
        for number in range(len(segments)):
            assert all(later > number for later in nx.descendants(quotient, number) if isinstance(later, int))
    assert 5 < interleaved < 200


def test_a_segment_with_a_later_start_may_come_first():
    # {1, 4} begins before {2} but depends on it through 3.
    graph = ComputationGraph(tuple(range(6)), ((0, 1), (1, 4), (0, 2), (2, 3), (3, 4), (4, 5)))
    assert [segment.interior for segment in segments_between(graph, [0, 3, 5])] == [(2,), (1, 4)]


def test_free_segments_keep_the_order_of_their_first_tensors():
    # {3}, {4}, {5} and {6} are free once 1 is known, and {2} before.
    edges = [(0, 1), (0, 2), *((1, middle) for middle in (3, 4, 5, 6)), *((v, 7) for v in (2, 3, 4, 5, 6))]
    graph = ComputationGraph.from_unsorted(range(8), edges)
    assert [segment.interior for segment in segments_between(graph, [0, 1, 7])] == [(2,), (3,), (4,), (5,), (6,)]


def test_interleaved_segments_do_not_stall():
    # {1, 6} and {2, 5} each feed the other through a checkpoint.
    edges = ((0, 1), (0, 2), (1, 3), (3, 5), (2, 4), (4, 6), (1, 6), (2, 5), (5, 7), (6, 7))
    graph = ComputationGraph(tuple(range(8)), edges)
    assert [segment.interior for segment in segments_between(graph, [0, 3, 4, 7])] == [(1, 6), (2, 5)]


@pytest.mark.parametrize(
    "edges, checkpoints, valid",
    [
        ([(0, 1), (1, 2)], [], True),
        ([(0, 1), (1, 2), (2, 3), (0, 3)], [1], True),
        ([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], [1], False),
        ([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], [1, 2], True),
        ([(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)], [3], True),
        # The source and the target always count as kept.
        ([(0, 1), (1, 2), (2, 3)], [0, 1, 2, 3], True),
        # Two sources: 0 comes from the virtual source, so {0, 2} and {1} are fed by it alone ...
        ([(0, 2), (1, 2), (2, 3)], [2], True),
        # ... but a segment with a source in it may read no other checkpoint.
        ([(0, 2), (1, 3), (2, 3), (3, 4)], [2], False),
    ],
)
def test_reading_a(edges: list[tuple[int, int]], checkpoints: list[int], valid: bool):
    count = 1 + max(head for _, head in edges)
    assert is_valid_reading_a(ComputationGraph.from_unsorted(range(count), edges), checkpoints) is valid
