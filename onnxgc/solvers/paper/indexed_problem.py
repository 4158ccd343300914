"""A checkpoint problem as plain lists, for searches that visit its vertices many times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxgc.graph.components import connected_components, contracts_without_cycle
from onnxgc.graph.virtual_terminals import forced_checkpoints
from onnxgc.planning.problem import CheckpointProblem


@dataclass(frozen=True)
class IndexedProblem:
    """Vertices are their topological indices.

    `sizes` are in bytes. `forced` marks the single source and target, which every plan keeps.
    """

    sizes: Sequence[int]
    predecessors: Sequence[Sequence[int]]
    successors: Sequence[Sequence[int]]
    forced: Sequence[bool]

    @classmethod
    def from_problem(cls, problem: CheckpointProblem) -> "IndexedProblem":
        graph = problem.graph
        ends = forced_checkpoints(graph)
        sizes = [problem.size_bytes(vertex) for vertex in graph.vertices]
        return cls(sizes, *graph.adjacency(), forced=[vertex in ends for vertex in graph.vertices])

    @cached_property
    def neighbours(self) -> list[tuple[int, ...]]:
        """Predecessors, then successors."""
        return [(*tails, *heads) for tails, heads in zip(self.predecessors, self.successors, strict=True)]

    def __len__(self) -> int:
        return len(self.sizes)

    def evaluate(self, kept: Iterable[int]) -> "EvaluatedSet | None":
        """Evaluate a set together with the forced vertices; `None` if it is invalid under reading G.

        O(vertices + edges).
        """
        is_kept = list(self.forced)
        for vertex in kept:
            is_kept[vertex] = True
        discarded = [vertex for vertex in range(len(self)) if not is_kept[vertex]]
        segments = connected_components(discarded, self.neighbours.__getitem__)
        group = {vertex: vertex for vertex in range(len(self))}
        for segment in segments:
            group.update(dict.fromkeys(segment, segment[0]))
        edges = ((tail, head) for tail, heads in enumerate(self.successors) for head in heads)
        if not contracts_without_cycle(group, edges):
            return None
        return EvaluatedSet(
            kept=tuple(v for v in range(len(self)) if is_kept[v]),
            interior_bytes=sum(size for v, size in enumerate(self.sizes) if is_kept[v] and not self.forced[v]),
            heaviest_segment_bytes=max(
                (sum(self.sizes[vertex] for vertex in segment) for segment in segments), default=0
            ),
        )


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """A valid set of checkpoints and its two terms of the paper's objective.

    `kept` includes the forced vertices, `interior_bytes` excludes them.
    """

    kept: tuple[int, ...]
    interior_bytes: int
    heaviest_segment_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.interior_bytes + self.heaviest_segment_bytes
