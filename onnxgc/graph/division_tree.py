"""The division tree: nested independent segments of a graph.

Source: Feng & Huang, CVPR 2021, Definitions 2-5 and Algorithms 2-4, with three deviations. Linear splitting
vertices are found in one sweep instead of by recursion, and so are branches. The division of a
Complicate segment keeps, for each pair of vertices, the branches without other neighbours, as the
theorems require; the printed Algorithm 4 drops the pair if any vertex between the two is connected to
a third.

In the words of graph theory the tree is the SPQR tree of the undirected graph with an extra edge
from source to target: Linear, Branch and Complicate are its series, parallel and rigid nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from onnxgc.graph.components import connected_components
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.segments import IndependentSegment


class DivisionKind(Enum):
    """How a segment divides into its members."""

    LINEAR = "linear"
    """Members in a row, joined by the vertices on every path."""
    BRANCH = "branch"
    """Members side by side between the same two ends."""
    COMPLICATE = "complicate"
    """Neither: the members are the largest segments strictly inside."""
    LEAF = "leaf"
    """A single edge."""


@dataclass(frozen=True, slots=True, eq=False)
class DivisionTree:
    """A segment and, if it divides, its members.

    `connectors` are the interior vertices at which members meet, in topological order: the linear
    splitting vertices, or the inner ends of a Complicate segment's members. The interior is exactly
    the connectors and the members' interiors, without overlap.
    """

    kind: DivisionKind
    segment: IndependentSegment
    connectors: tuple[Vertex, ...] = ()
    members: "tuple[DivisionTree, ...]" = field(default=(), repr=False)

    def walk(self) -> "Iterator[DivisionTree]":
        """All nodes, members before their parents; without recursion, so any depth is possible."""
        nodes = [self]
        for node in nodes:  # Grows during the loop.
            nodes.extend(node.members)
        return reversed(nodes)


def build_division_tree(graph: ComputationGraph) -> DivisionTree:
    """Divide the whole graph, from its source to its target.

    Members are ordered topologically: by source, then target; an edge before other branches, and
    branches by their first vertex.

    Args:
        graph: at least two vertices, one source and one sink (`with_single_terminals`).

    >>> graph = ComputationGraph.from_unsorted(range(4), [(0, 1), (1, 2), (2, 3), (1, 3)])
    >>> tree = build_division_tree(graph)
    >>> tree.kind.value, tree.connectors, [member.kind.value for member in tree.members]
    ('linear', (1,), ['leaf', 'branch'])

    Raises:
        ValueError: the graph has several sources or sinks, or one vertex.

    Source: the paper, Algorithms 2-4.
    """
    if len(graph) < 2 or len(graph.sources) != 1 or len(graph.sinks) != 1:
        raise ValueError("a division tree needs one source and another vertex as the only sink")
    divider = _Divider(graph)
    last = len(graph) - 1
    parts = [_Part(0, last, list(range(1, last)), divider.has_edge(0, last))]
    divisions: list[_Division] = []
    members_at: list[range] = []
    for part in parts:  # Grows during the loop.
        division = divider.divide(part)
        divisions.append(division)
        members_at.append(range(len(parts), len(parts) + len(division.members)))
        parts.extend(division.members)

    vertices = graph.vertices
    nodes: dict[int, DivisionTree] = {}
    for number in reversed(range(len(parts))):  # Members come after their parent, so their nodes exist.
        part, division = parts[number], divisions[number]
        nodes[number] = DivisionTree(
            kind=division.kind,
            segment=IndependentSegment(
                vertices[part.source], vertices[part.target], tuple(vertices[v] for v in part.interior)
            ),
            connectors=tuple(vertices[v] for v in division.connectors),
            members=tuple(nodes.pop(member) for member in members_at[number]),
        )
    return nodes[0]


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment in topological indices; `direct` if it contains the edge between its ends."""

    source: int
    target: int
    interior: list[int]
    direct: bool


@dataclass(frozen=True, slots=True)
class _Division:
    kind: DivisionKind
    connectors: list[int] = field(default_factory=list)
    members: list[_Part] = field(default_factory=list)


class _Divider:
    """Divides parts of one graph. All lists of indices are rising."""

    def __init__(self, graph: ComputationGraph) -> None:
        self._predecessors, self._successors = graph.adjacency()

    def has_edge(self, tail: int, head: int) -> bool:
        return tail in self._predecessors[head]

    def divide(self, part: _Part) -> _Division:
        if not part.interior:
            return _Division(DivisionKind.LEAF)
        branches = self._components(part.interior)
        if len(branches) + part.direct > 1:
            edge = [_Part(part.source, part.target, [], True)] if part.direct else []
            rest = [_Part(part.source, part.target, branch, False) for branch in branches]
            return _Division(DivisionKind.BRANCH, members=edge + rest)
        splitting = self._splitting_vertices(part)
        if splitting:
            return _Division(DivisionKind.LINEAR, splitting, self._parts_between(part, splitting))
        return self._divide_complicate(part)

    def _components(self, interior: list[int]) -> list[list[int]]:
        """Weakly connected components, by first vertex (Algorithm 3)."""
        return [sorted(component) for component in connected_components(interior, self._neighbours)]

    def _neighbours(self, vertex: int) -> list[int]:
        return self._predecessors[vertex] + self._successors[vertex]

    def _splitting_vertices(self, part: _Part) -> list[int]:
        """Vertices on every path of the part (Algorithm 2).

        These are the vertices that no edge passes over in topological order: a path that avoids a vertex
        has an edge passing over it, and an edge that passes over it lies on a path.
        """
        interior = set(part.interior)
        farthest = max(v for v in self._successors[part.source] if v in interior)
        splitting: list[int] = []
        for vertex in part.interior:
            if farthest == vertex:
                splitting.append(vertex)
            farthest = max(farthest, self._successors[vertex][-1])
        return splitting

    def _parts_between(self, part: _Part, splitting: list[int]) -> list[_Part]:
        stops = [part.source, *splitting, part.target]
        between: list[list[int]] = [[] for _ in stops[1:]]
        passed = 0
        for vertex in part.interior:
            if vertex == stops[passed + 1]:
                passed += 1
            else:
                between[passed].append(vertex)
        return [
            _Part(stops[n], stops[n + 1], inner, self.has_edge(stops[n], stops[n + 1]))
            for n, inner in enumerate(between)
        ]

    def _divide_complicate(self, part: _Part) -> _Division:
        """The largest segments inside: components between the vertices that no smaller segment encloses.

        Any two of those vertices stay connected when two others are removed (otherwise one of them
        would be inside a segment). So the largest segments never overlap and their ends are such
        vertices: each remaining component has exactly two of them as neighbours.
        """
        enclosed = _EnclosedVertices(part, self._predecessors, self._successors).find()
        connectors = [vertex for vertex in part.interior if vertex not in enclosed]
        ends = {part.source, part.target, *connectors}

        inside: dict[tuple[int, int], list[int]] = {}
        for component in self._components([vertex for vertex in part.interior if vertex in enclosed]):
            around = {n for v in component for n in self._neighbours(v) if n in ends}
            inside.setdefault((min(around), max(around)), []).extend(component)
        for head in (*connectors, part.target):
            for tail in self._predecessors[head]:
                # An edge between the part's ends is another branch, outside of this part.
                if tail in ends and (tail, head) != (part.source, part.target):
                    inside.setdefault((tail, head), [])
        members = [
            _Part(tail, head, sorted(inside[tail, head]), self.has_edge(tail, head)) for tail, head in sorted(inside)
        ]
        return _Division(DivisionKind.COMPLICATE, connectors, members)


class _EnclosedVertices:
    """Finds the interior vertices of a part that lie inside a smaller segment of it.

    An entry and an exit separate a smaller segment from both ends of the part. Without the entry, the
    exits are articulation points, which one depth-first search finds together: O(vertices * edges) at
    worst. In practice it is far less, since an entry dominates the vertices that it encloses and an
    enclosed entry is skipped.
    """

    def __init__(self, part: _Part, predecessors: list[list[int]], successors: list[list[int]]) -> None:
        self._part = part
        self._names = [part.source, *part.interior, part.target]
        local = {name: number for number, name in enumerate(self._names)}
        self._target = len(self._names) - 1
        self._above: list[list[int]] = [[] for _ in self._names]
        self._neighbours: list[list[int]] = [[] for _ in self._names]
        for name in part.interior:
            vertex = local[name]
            self._above[vertex] = [local[p] for p in predecessors[name]]
            below = [local[s] for s in successors[name]]
            self._neighbours[vertex] = self._above[vertex] + below
            if predecessors[name][0] == part.source:
                self._neighbours[0].append(vertex)
            if successors[name][-1] == part.target:
                self._neighbours[self._target].append(vertex)
        # The rest of the graph joins the part's two ends.
        self._neighbours[0].append(self._target)
        self._neighbours[self._target].append(0)

    def find(self) -> set[int]:
        """The enclosed vertices, as topological indices of the whole graph."""
        # The cheapest segments: a vertex with one edge in and one out.
        enclosed = {v for v in range(1, self._target) if len(self._neighbours[v]) == 2}
        for entry in self._entries():
            if entry not in enclosed:
                self._enclose_behind(entry, enclosed)
        return {self._names[vertex] for vertex in enclosed}

    def _entries(self) -> list[int]:
        """Vertices that dominate another interior vertex, in topological order."""
        dominators = [1] * (self._target + 1)
        dominating = 1
        for vertex in range(1, self._target):
            common = -1
            for predecessor in self._above[vertex]:
                common &= dominators[predecessor]
            dominating |= common
            dominators[vertex] = common | 1 << vertex
        return [vertex for vertex in range(self._target) if dominating >> vertex & 1]

    def _enclose_behind(self, entry: int, enclosed: set[int]) -> None:
        """Add to `enclosed` the vertices that `entry` and one exit separate from the part's ends.

        Tarjan's articulation points in the graph without `entry`. The search starts at an end of
        the part, and the other end is its neighbour, so no separated subtree contains either.
        """
        root = 0 if entry else self._target
        neighbours = self._neighbours
        seen = [-1] * len(neighbours)
        lowest = [0] * len(neighbours)
        seen[root] = 0
        visited = [root]
        trail = [(root, iter(neighbours[root]))]
        while trail:
            vertex, untried = trail[-1]
            for neighbour in untried:
                if neighbour == entry:
                    continue
                if seen[neighbour] < 0:
                    seen[neighbour] = lowest[neighbour] = len(visited)
                    visited.append(neighbour)
                    trail.append((neighbour, iter(neighbours[neighbour])))
                    break
                if seen[neighbour] < lowest[vertex]:
                    lowest[vertex] = seen[neighbour]
            else:
                trail.pop()
                if not trail:
                    return
                parent = trail[-1][0]
                if parent != root and lowest[vertex] >= seen[parent]:
                    enclosed.update(visited[seen[vertex] :])  # The newest visits are its subtree.
                elif lowest[vertex] < lowest[parent]:
                    lowest[parent] = lowest[vertex]
