"""Computation graphs: directed acyclic graphs of tensors.

Vertices are tensors and edges are operators, as in the paper: edge `(a, b)` means that tensor `b` is
computed from tensor `a`.
"""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onnxgc.errors import GraphFileError

Vertex: TypeAlias = Hashable
"""A tensor's identifier: a name or a number."""

Edge: TypeAlias = tuple[Vertex, Vertex]
"""`(read tensor, computed tensor)`."""


@dataclass(frozen=True, slots=True)
class ComputationGraph:
    """Tensors in topological order, and the edges between them.

    Use `from_unsorted` if the order is unknown or edges may repeat.

    >>> graph = ComputationGraph.from_unsorted(["y", "h", "x"], [("h", "y"), ("x", "h"), ("x", "y")])
    >>> graph.vertices
    ('x', 'h', 'y')
    >>> graph.predecessors("y")
    ('x', 'h')

    Raises:
        GraphFileError: there is no vertex, a vertex or an edge is given twice, an edge names an
            unknown vertex, or the vertices are not in topological order.
    """

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    _index: dict[Vertex, int] = field(init=False, repr=False, compare=False)
    _predecessors: dict[Vertex, tuple[Vertex, ...]] = field(init=False, repr=False, compare=False)
    _successors: dict[Vertex, tuple[Vertex, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = _index_of(self.vertices)
        if not index:
            raise GraphFileError("the graph has no vertices; give at least one")
        _require_known_ends(self.edges, index)
        if len(set(self.edges)) != len(self.edges):
            raise GraphFileError("an edge is given twice; build the graph with from_unsorted to merge repeats")
        for tail, head in self.edges:
            if index[tail] >= index[head]:
                raise GraphFileError(
                    f"edge {tail!r} -> {head!r} contradicts the order of the vertices; "
                    "build the graph with from_unsorted"
                )

        predecessors: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in self.vertices}
        successors: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in self.vertices}
        for tail, head in _sorted_edges(self.edges, index):
            successors[tail].append(head)
            predecessors[head].append(tail)
        # Fields of a frozen class can be derived in no other way.
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_predecessors", {v: tuple(tails) for v, tails in predecessors.items()})
        object.__setattr__(self, "_successors", {v: tuple(heads) for v, heads in successors.items()})

    @classmethod
    def from_unsorted(cls, vertices: Iterable[Vertex], edges: Iterable[Edge]) -> "ComputationGraph":
        """Sort the vertices topologically and merge repeated edges. O((vertices + edges) log(vertices)).

        The given order breaks ties. Edges may repeat because an operator may read a tensor twice.

        Raises:
            GraphFileError: there is a cycle (the message names one), an edge has an unknown end, or a
                vertex is given twice.
        """
        given = tuple(vertices)
        rank = _index_of(given)
        distinct = tuple(dict.fromkeys(edges))
        _require_known_ends(distinct, rank)

        successors: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in given}
        missing = dict.fromkeys(given, 0)
        for tail, head in distinct:
            successors[tail].append(head)
            missing[head] += 1
        ready = [rank[vertex] for vertex in given if missing[vertex] == 0]
        heapq.heapify(ready)
        order: list[Vertex] = []
        while ready:
            vertex = given[heapq.heappop(ready)]
            order.append(vertex)
            for head in successors[vertex]:
                missing[head] -= 1
                if missing[head] == 0:
                    heapq.heappush(ready, rank[head])
        if len(order) < len(given):
            cycle = _find_cycle([vertex for vertex in given if missing[vertex] > 0], distinct)
            raise GraphFileError(
                f"the graph has a cycle: {' -> '.join(map(str, cycle))}; a computation graph must have none"
            )
        position = {vertex: index for index, vertex in enumerate(order)}
        return cls(tuple(order), _sorted_edges(distinct, position))

    @property
    def sources(self) -> tuple[Vertex, ...]:
        """Vertices without predecessors, in topological order."""
        return tuple(vertex for vertex in self.vertices if not self._predecessors[vertex])

    @property
    def sinks(self) -> tuple[Vertex, ...]:
        """Vertices without successors, in topological order."""
        return tuple(vertex for vertex in self.vertices if not self._successors[vertex])

    def __contains__(self, vertex: object) -> bool:
        return vertex in self._index

    def __len__(self) -> int:
        return len(self.vertices)

    def predecessors(self, vertex: Vertex) -> tuple[Vertex, ...]:
        """Tensors from which `vertex` is computed, in topological order."""
        return self._predecessors[vertex]

    def successors(self, vertex: Vertex) -> tuple[Vertex, ...]:
        """Tensors computed from `vertex`, in topological order."""
        return self._successors[vertex]

    def neighbours(self, vertex: Vertex) -> tuple[Vertex, ...]:
        """Predecessors, then successors."""
        return self._predecessors[vertex] + self._successors[vertex]

    def adjacency(self) -> tuple[list[list[int]], list[list[int]]]:
        """Predecessors and successors of each vertex; vertices are their positions in `vertices`."""
        return (
            [[self._index[tail] for tail in self._predecessors[vertex]] for vertex in self.vertices],
            [[self._index[head] for head in self._successors[vertex]] for vertex in self.vertices],
        )

    def topological_index(self, vertex: Vertex) -> int:
        return self._index[vertex]

    def in_order(self, vertices: Iterable[Vertex]) -> tuple[Vertex, ...]:
        """The distinct given vertices in topological order."""
        return tuple(sorted(set(vertices), key=self._index.__getitem__))


def _index_of(vertices: Sequence[Vertex]) -> dict[Vertex, int]:
    index = {vertex: number for number, vertex in enumerate(vertices)}
    if len(index) < len(vertices):
        twice = next(vertex for number, vertex in enumerate(vertices) if index[vertex] != number)
        raise GraphFileError(f"vertex {twice!r} is given twice; identifiers must be distinct")
    return index


def _sorted_edges(edges: Iterable[Edge], index: dict[Vertex, int]) -> tuple[Edge, ...]:
    return tuple(sorted(edges, key=lambda edge: (index[edge[0]], index[edge[1]])))


def _require_known_ends(edges: Iterable[Edge], index: dict[Vertex, int]) -> None:
    for edge in edges:
        for end in edge:
            if end not in index:
                raise GraphFileError(
                    f"edge {edge[0]!r} -> {edge[1]!r} names vertex {end!r}, which is not among the vertices"
                )


def _find_cycle(blocked: list[Vertex], edges: tuple[Edge, ...]) -> list[Vertex]:
    """A cycle, with its first vertex repeated at the end. Each blocked vertex has a blocked predecessor."""
    within = set(blocked)
    predecessor = {head: tail for tail, head in edges if tail in within and head in within}
    seen: dict[Vertex, int] = {}
    trail: list[Vertex] = []
    vertex = blocked[0]
    while vertex not in seen:
        seen[vertex] = len(trail)
        trail.append(vertex)
        vertex = predecessor[vertex]
    return [vertex, *reversed(trail[seen[vertex] :])]
