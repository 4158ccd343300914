from itertools import combinations, pairwise
from random import Random

import networkx as nx
import pytest

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.division_tree import DivisionKind, DivisionTree, build_division_tree
from onnxgc.graph.virtual_terminals import with_single_terminals
from tests.graph.random_graphs import random_graph


def divided(edges: list[tuple[int, int]]) -> DivisionTree:
    count = 1 + max(head for _, head in edges)
    return build_division_tree(ComputationGraph.from_unsorted(range(count), edges))


def outline(tree: DivisionTree) -> str:
    """One line: L(...), B(...), C(...) around members, leaves as source-target."""
    if tree.kind is DivisionKind.LEAF:
        return f"{tree.segment.source}-{tree.segment.target}"
    return f"{tree.kind.name[0]}({' '.join(outline(member) for member in tree.members)})"


@pytest.mark.parametrize(
    "edges, expected",
    [
        ([(0, 1)], "0-1"),
        ([(0, 1), (1, 2), (2, 3)], "L(0-1 1-2 2-3)"),
        ([(0, 1), (1, 2), (0, 2)], "B(0-2 L(0-1 1-2))"),
        ([(0, 1), (1, 2), (2, 3), (1, 3), (3, 4)], "L(0-1 B(1-3 L(1-2 2-3)) 3-4)"),
        # The smallest Complicate segment.
        ([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], "C(0-1 0-2 1-2 1-3 2-3)"),
        # The same with a longer member, and nested in another one.
        ([(0, 1), (0, 3), (1, 2), (2, 3), (1, 4), (3, 4)], "C(0-1 0-3 L(1-2 2-3) 1-4 3-4)"),
        (
            [(0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (1, 5), (4, 5)],
            "C(0-1 0-4 C(1-2 1-3 2-3 2-4 3-4) 1-5 4-5)",
        ),
        # The same segment as a branch next to an edge.
        ([(0, 3), (0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], "B(0-3 C(0-1 0-2 1-2 1-3 2-3))"),
        # Between 0 and 3, vertex 2 has no other neighbour, and vertex 1 has one.
        ([(0, 1), (0, 2), (1, 3), (1, 5), (2, 3), (3, 4), (4, 5)], "C(0-1 L(0-2 2-3) 1-3 1-5 L(3-4 4-5))"),
    ],
)
def test_division_of_known_graphs(edges: list[tuple[int, int]], expected: str):
    assert outline(divided(edges)) == expected


def random_trees(seed: int, count: int, max_vertices: int) -> list[tuple[ComputationGraph, DivisionTree]]:
    random = Random(seed)
    graphs = [with_single_terminals(random_graph(random, max_vertices)) for _ in range(count)]
    return [(graph, build_division_tree(graph)) for graph in graphs if len(graph) > 1]


def test_parts_cover_the_graph_once_and_are_independent_segments():
    for graph, root in random_trees(6, 400, 14):
        assert set(root.segment.interior) == set(graph.vertices[1:-1])
        leaves = edges_of(root)
        assert len(leaves) == len(graph.edges)
        assert set(leaves) == set(graph.edges)
        seen: set[int] = set()
        for tree in root.walk():
            assert all(id(member) in seen for member in tree.members), "members come before their parents"
            seen.add(id(tree))
            parts = [*tree.connectors, *(v for member in tree.members for v in member.segment.interior)]
            assert graph.in_order(parts) == tree.segment.interior
            assert len(parts) == len(tree.segment.interior)
            within = {*tree.segment.interior}
            ends = {tree.segment.source, tree.segment.target}
            for vertex in tree.segment.interior:
                assert set(graph.predecessors(vertex)) <= within | ends - {tree.segment.target}
                assert set(graph.successors(vertex)) <= within | ends - {tree.segment.source}
        assert id(root) in seen


def edges_of(tree: DivisionTree) -> list[tuple[Vertex, Vertex]]:
    return [(t.segment.source, t.segment.target) for t in tree.walk() if t.kind is DivisionKind.LEAF]


def splits(tree: DivisionTree, vertex: Vertex) -> bool:
    view = nx.DiGraph(edges_of(tree))
    view.remove_node(vertex)
    return not nx.has_path(view, tree.segment.source, tree.segment.target)


def test_kinds_follow_their_definitions():
    for _, root in random_trees(9, 300, 12):
        for tree in root.walk():
            splitting = tuple(vertex for vertex in tree.segment.interior if splits(tree, vertex))
            if tree.kind is DivisionKind.LINEAR:
                assert tree.connectors == splitting
                stops = (tree.segment.source, *splitting, tree.segment.target)
                assert [(m.segment.source, m.segment.target) for m in tree.members] == list(pairwise(stops))
                assert all(member.kind is not DivisionKind.LINEAR for member in tree.members)
                continue
            assert splitting == ()
            inner = nx.Graph(edges_of(tree)).subgraph(tree.segment.interior)
            direct = (tree.segment.source, tree.segment.target) in edges_of(tree)
            if tree.kind is DivisionKind.BRANCH:
                assert len(tree.members) == nx.number_connected_components(inner) + direct > 1
                assert all(member.kind is not DivisionKind.BRANCH for member in tree.members)
            elif tree.kind is DivisionKind.COMPLICATE:
                assert nx.is_connected(inner)
                assert not direct


def enclosed_by_definition(tree: DivisionTree) -> set[Vertex]:
    """Vertices that some pair of vertices separates from both ends, by trying all pairs."""
    ends = [tree.segment.source, tree.segment.target]
    whole = nx.Graph([*edges_of(tree), (ends[0], ends[1])])
    enclosed: set[Vertex] = set()
    for pair in combinations([*ends, *tree.segment.interior], 2):
        if set(pair) == set(ends):
            continue
        rest = whole.subgraph([vertex for vertex in whole if vertex not in pair])
        for component in nx.connected_components(rest):
            if not component & set(ends):
                enclosed |= component
    return enclosed


def test_no_smaller_segment_encloses_complicate_connectors():
    nested = 0
    for _, root in random_trees(10, 300, 13):
        for tree in root.walk():
            if tree.kind is not DivisionKind.COMPLICATE:
                continue
            enclosed = enclosed_by_definition(tree)
            assert set(tree.connectors) == set(tree.segment.interior) - enclosed
            pairs = [(member.segment.source, member.segment.target) for member in tree.members]
            assert len(set(pairs)) == len(pairs)
            nested += bool(enclosed)
    assert nested > 50


def test_deep_and_long_graphs():
    length = 5000
    chain = [(vertex, vertex + 1) for vertex in range(length)]
    root = divided(chain)
    assert root.kind is DivisionKind.LINEAR
    assert len(root.members) == length

    # Every vertex also feeds the last one: each level contains the next.
    depth = 1200
    fan = [(v, v + 1) for v in range(depth)] + [(v, depth) for v in range(depth - 1)]
    assert sum(tree.kind is DivisionKind.BRANCH for tree in divided(fan).walk()) == depth - 1
    repr(divided(fan))


@pytest.mark.parametrize("graph", [ComputationGraph(("a",), ()), ComputationGraph(("a", "b"), ())])
def test_requires_one_source_and_another_sink(graph: ComputationGraph):
    with pytest.raises(ValueError, match="one source"):
        build_division_tree(graph)
