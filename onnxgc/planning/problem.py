"""The problem that solvers read: a graph, its costs, and the traced step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxgc.errors import GraphFileError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.virtual_terminals import with_single_terminals
from onnxgc.planning.joint_graph import JointGraph, joint_of_bare_graph


@dataclass(frozen=True, slots=True)
class TensorCost:
    """The cost to keep a tensor, and to recompute it.

    `size_bytes` is its memory, `recompute_flops` the floating-point operations of the operator that
    computes it. Both are at least 0.
    """

    size_bytes: int
    recompute_flops: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    """The choice of checkpoints among the tensors of `graph`, each at its cost.

    `traced` is the training step that will run, if it is known. Several sources or sinks are allowed:
    see `closed_graph`.

    Raises:
        GraphFileError: a vertex has no cost, a cost has no vertex, or a cost is negative.
    """

    graph: ComputationGraph
    costs: Mapping[Vertex, TensorCost] = field(hash=False)
    traced: JointGraph | None = field(default=None, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for vertex in self.graph.vertices:
            if vertex not in self.costs:
                raise GraphFileError(f"vertex {vertex!r} has no cost; give its size in bytes")
            cost = self.costs[vertex]
            if cost.size_bytes < 0 or cost.recompute_flops < 0:
                raise GraphFileError(f"vertex {vertex!r} has a negative cost; sizes and flops are at least 0")
        for vertex in self.costs:
            if vertex not in self.graph:
                raise GraphFileError(f"a cost is given for {vertex!r}, which is not a vertex of the graph")

    @property
    def total_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(self.size_bytes(vertex) for vertex in self.graph.vertices)

    def size_bytes(self, vertex: Vertex) -> int:
        """Size of a tensor of the graph."""
        return self.costs[vertex].size_bytes

    def joint(self) -> JointGraph:
        """Forward and backward, as traced, or as `joint_of_bare_graph` assumes."""
        return self.traced or joint_of_bare_graph(self.graph, self.size_bytes)

    def closed_graph(self) -> ComputationGraph:
        """The graph with one source and one sink, virtual ones for several.

        Virtual terminals cost nothing and are in no plan. After a virtual source, the real sources are
        tensors like any other.
        """
        return with_single_terminals(self.graph)
