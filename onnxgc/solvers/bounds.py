"""Lower bounds on the paper's objective that hold for every set of checkpoints."""

from __future__ import annotations

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.terminals import forced_checkpoints
from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.working_set import floor_of


def any_plan_bound(problem: CheckpointProblem, objective: Objective | None) -> tuple[int, str]:
    """What no plan goes below under an objective, and the operator that sets that, if one does."""
    if objective is Objective.PEAK:
        floor = floor_of(problem.joint().step)
        return floor.bytes, floor.operator
    if objective is Objective.ACTIVATIONS:
        floor = floor_of(problem.joint().without_parameter_gradients().step)
        return floor.bytes, floor.operator
    return any_plan_lower_bound_bytes(problem), ""


def any_plan_lower_bound_bytes(problem: CheckpointProblem) -> int:
    """What no set of checkpoints goes below, whether its segments are independent or not.

    Any other tensor is kept, or is part of a segment: either way it is paid once beside the ends
    that are always kept. And on one path the checkpoints cut the rest into runs, each of them part
    of one segment. With k of the path's n bytes kept beside the ends, in c tensors, one of the
    c + 1 runs has at least (n - k) / (c + 1) bytes.
    """
    ends = forced_checkpoints(problem.graph)
    free = [problem.size_bytes(v) for v in problem.graph.vertices if v not in ends]
    base = sum(problem.size_bytes(v) for v in ends)
    path = [problem.size_bytes(v) for v in _heaviest_path(problem) if v not in ends]
    return base + max(max(free, default=0), _run_bound_bytes(path))


def _run_bound_bytes(sizes: list[int]) -> int:
    """The best over c of: the c smallest kept, plus an even share of what is left.

    For a fixed c, keeping more bytes costs more than it takes off the share, so the c smallest
    tensors are the least that can be kept.
    """
    total = sum(sizes)
    best, kept = total, 0
    for count, size in enumerate(sorted(sizes), start=1):
        kept += size
        best = min(best, kept + -(-(total - kept) // (count + 1)))
    return best


def _heaviest_path(problem: CheckpointProblem) -> list[Vertex]:
    """Vertices of a path from a source to a sink with the most bytes."""
    graph = problem.graph
    weight: dict[Vertex, int] = {}
    before: dict[Vertex, Vertex | None] = {}
    for vertex in graph.vertices:
        heaviest = max(graph.predecessors(vertex), key=weight.__getitem__, default=None)
        before[vertex] = heaviest
        weight[vertex] = problem.size_bytes(vertex) + (0 if heaviest is None else weight[heaviest])
    path: list[Vertex] = []
    step: Vertex | None = max(graph.sinks, key=weight.__getitem__)
    while step is not None:
        path.append(step)
        step = before[step]
    return path
