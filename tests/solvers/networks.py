"""Bare graphs built tensor by tensor."""

from dataclasses import dataclass, field

from onnxgc.planning.problem import CheckpointProblem
from tests.graph.random_graphs import problem_of


@dataclass(slots=True)
class Sketch:
    batch: int
    sizes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, elements: int, *inputs: int) -> int:
        vertex = len(self.sizes)
        self.sizes.append(4 * self.batch * elements)
        self.edges.extend((source, vertex) for source in inputs)
        return vertex

    def row(self, start: int, *elements: int) -> int:
        for size in elements:
            start = self.add(size, start)
        return start

    def problem(self) -> CheckpointProblem:
        return problem_of(self.edges, self.sizes)


def dense_block_with_wide_concats(layers: int) -> CheckpointProblem:
    """Each layer reads all layers before it through one concatenation: one large Complicate segment."""
    sketch = Sketch(batch=1)
    features = [sketch.add(64)]
    for layer in range(layers):
        features.append(sketch.row(sketch.add(64 + 32 * layer, *features), 64 + 32 * layer, 128, 128, 32))
    sketch.add(10, *features)
    return sketch.problem()
