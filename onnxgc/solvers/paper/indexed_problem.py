"""A checkpoint problem as plain lists, for searches that visit its vertices many times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxgc.graph.contraction import contracts_without_cycle
from onnxgc.graph.virtual_terminals import forced_checkpoints
from onnxgc.planning.problem import CheckpointProblem


@dataclass(frozen=True, slots=True)
class IndexedProblem:
    """Vertices are their topological indices.

    `sizes` are in bytes. `forced` marks the single source and target, which every plan keeps.
    """

    sizes: Sequence[int]
    predecessors: Sequence[Sequence[int]]
    successors: Sequence[Sequence[int]]
    forced: Sequence[bool]

    @classmethod
    def of(cls, problem: CheckpointProblem) -> IndexedProblem:
        graph = problem.graph
        index = graph.topological_index
        ends = forced_checkpoints(graph)
        return cls(
            sizes=[problem.size_bytes(v) for v in graph.vertices],
            predecessors=[[index(tail) for tail in graph.predecessors(v)] for v in graph.vertices],
            successors=[[index(head) for head in graph.successors(v)] for v in graph.vertices],
            forced=[v in ends for v in graph.vertices],
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def evaluate(self, kept: Iterable[int]) -> EvaluatedSet | None:
        """Evaluate a set together with the forced vertices; `None` if it is invalid under reading G.

        O(vertices + edges).
        """
        is_kept = list(self.forced)
        for vertex in kept:
            is_kept[vertex] = True
        group = [-1] * len(self)
        weights: list[int] = []
        for start in range(len(self)):
            if is_kept[start]:
                group[start] = len(weights)
                weights.append(0)
            elif group[start] < 0:
                group[start] = number = len(weights)
                found = [start]
                for vertex in found:  # Grows during the loop.
                    for neighbours in (self.predecessors[vertex], self.successors[vertex]):
                        for neighbour in neighbours:
                            if group[neighbour] < 0 and not is_kept[neighbour]:
                                group[neighbour] = number
                                found.append(neighbour)
                weights.append(sum(self.sizes[vertex] for vertex in found))
        edges = ((tail, head) for tail, heads in enumerate(self.successors) for head in heads)
        if not contracts_without_cycle(dict(enumerate(group)), edges):
            return None
        return EvaluatedSet(
            kept=tuple(v for v in range(len(self)) if is_kept[v]),
            interior_bytes=sum(
                size for v, size in enumerate(self.sizes) if is_kept[v] and not self.forced[v]
            ),
            heaviest_segment_bytes=max(weights),
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
