"""The paper's networks as bare graphs: tensor sizes at 224 x 224 in float32, batch as in its Table 1.

An in-place ReLU shares the vertex of the operator before it, and so does a BatchNormalization before an
addition. The numbers of vertices equal those of the paper's reference code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxgc.planning.problem import CheckpointProblem
from tests.graph.random_graphs import problem_of


@dataclass(slots=True)
class Sketch:
    """Builds a graph tensor by tensor; each has `elements` float32 values per sample."""

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


def resnet(blocks: tuple[int, int, int, int], *, bottleneck: bool, batch: int) -> CheckpointProblem:
    sketch = Sketch(batch)
    last = sketch.row(sketch.add(3 * 224**2), 64 * 112**2, 64 * 112**2, 64 * 56**2)
    side, channels = 56, 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        out_channels = 4 * width if bottleneck else width
        for block in range(count):
            in_side, side = side, side // 2 if stage and not block else side
            before, after = width * in_side**2, width * side**2
            inner = [before, before, after, after] if bottleneck else [after, after]
            output = out_channels * side**2
            branch = sketch.row(last, *inner, output)
            if out_channels != channels or side != in_side:
                last = sketch.add(output, last)
            last = sketch.add(output, branch, last)
            channels = out_channels
    sketch.row(last, channels, 1000)
    return sketch.problem()


def vgg(layout: str, *, batch: int) -> CheckpointProblem:
    """`layout` has the log2 of each convolution's channels, and `M` for pooling."""
    sketch = Sketch(batch)
    last = sketch.add(3 * 224**2)
    side = 224
    channels = 3
    for letter in layout:
        if letter == "M":
            side //= 2
        else:
            channels = 2 ** int(letter)
        last = sketch.add(channels * side**2, last)
    sketch.row(last, 4096, 4096, 1000)
    return sketch.problem()


def densenet(blocks: tuple[int, int, int, int], *, growth: int, batch: int) -> CheckpointProblem:
    sketch = Sketch(batch)
    channels, side = 2 * growth, 56
    last = sketch.row(sketch.add(3 * 224**2), channels * 112**2, channels * 112**2, channels * 56**2)
    for number, count in enumerate(blocks):
        for _ in range(count):
            area = side**2
            new = sketch.row(last, channels * area, 4 * growth * area, 4 * growth * area, growth * area)
            channels += growth
            last = sketch.add(channels * area, new, last)
        if number < 3:
            half = channels // 2
            last = sketch.row(last, channels * side**2, half * side**2, half * (side // 2) ** 2)
            channels, side = half, side // 2
    sketch.row(last, channels * side**2, channels, 1000)
    return sketch.problem()


def dense_block_with_wide_concats(layers: int) -> CheckpointProblem:
    """Each layer reads all layers before it through one concatenation: one large Complicate segment."""
    sketch = Sketch(batch=1)
    features = [sketch.add(64)]
    for layer in range(layers):
        features.append(sketch.row(sketch.add(64 + 32 * layer, *features), 64 + 32 * layer, 128, 128, 32))
    sketch.add(10, *features)
    return sketch.problem()
