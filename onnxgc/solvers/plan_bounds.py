"""Lower bounds that hold for every plan."""

from dataclasses import dataclass

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.virtual_terminals import forced_checkpoints
from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import Operator, StepGraph


def plan_lower_bound(problem: CheckpointProblem, objective: Objective | None) -> tuple[int, str]:
    """Lower bound in bytes under an objective, and the operator that sets it, if one does."""
    if objective is Objective.PEAK:
        floor = largest_working_set(problem.joint().step)
        return floor.bytes, floor.operator
    if objective is Objective.ACTIVATIONS:
        floor = largest_working_set(problem.joint().without_parameter_gradients().step)
        return floor.bytes, floor.operator
    return paper_lower_bound_bytes(problem), ""


def paper_lower_bound_bytes(problem: CheckpointProblem) -> int:
    """Lower bound on the paper's objective for any set of checkpoints, with independent segments or not.

    The ends are always kept. Every other tensor is kept or part of a segment, so the largest one counts in
    addition. On any one path the checkpoints cut the rest into runs, each part of one segment: with k of
    the path's n bytes kept in c tensors, without the ends, one of the c + 1 runs has at least
    (n - k) / (c + 1) bytes. The heaviest path is used. O(vertices log(vertices) + edges).
    """
    ends = forced_checkpoints(problem.graph)
    free = [problem.size_bytes(v) for v in problem.graph.vertices if v not in ends]
    base = sum(problem.size_bytes(v) for v in ends)
    path = [problem.size_bytes(v) for v in _heaviest_path(problem) if v not in ends]
    return base + max(max(free, default=0), _run_bound_bytes(path))


def _run_bound_bytes(sizes: list[int]) -> int:
    """The least, over c, of the c smallest tensors plus an even share of the other bytes.

    For a fixed c, each kept byte adds 1 and saves only 1/(c + 1), so keeping the c
    smallest tensors is a lower bound.
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


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Bytes of a working set, and its operator.

    `operator` is empty for the step's outputs, which are all live at the end.
    """

    bytes: int
    operator: str


def largest_working_set(step: StepGraph) -> WorkingSet:
    """The largest working set of a step: a lower bound for any order and any number of recomputations.

    While an operator runs, its inputs, outputs and workspace are live. Inputs of the step and parameters
    count 0 bytes, a view counts as its source, and an in-place operator may write into its input.
    O(operators and their inputs).
    """
    root: dict[str, str] = {}
    floor = WorkingSet(sum(step.sizes[name] for name in set(step.outputs) - step.resident), "")
    for operator in step.operators:
        if operator.is_view and operator.outputs[0] not in step.output_set:
            source = operator.inputs[0]
            root[operator.outputs[0]] = root.get(source, source)
        size_bytes = _working_set(operator, step, root)
        if size_bytes > floor.bytes:
            floor = WorkingSet(size_bytes, operator.name)
    return floor


def _working_set(operator: Operator, step: StepGraph, root: dict[str, str]) -> int:
    read = {root.get(name, name) for name in operator.inputs} - step.resident
    # Trailing outputs without readers may be omitted.
    written = {root.get(name, name) for name in operator.outputs[:1]} - read - step.resident
    shared = 0
    if operator.in_place and operator.outputs and operator.outputs[0] not in step.output_set:
        source = root.get(operator.inputs[0], operator.inputs[0])
        if source in read and step.sizes[source] == step.sizes[operator.outputs[0]]:
            shared = step.sizes[source]
    return sum(step.sizes[name] for name in (*read, *written)) - shared + operator.workspace_bytes
