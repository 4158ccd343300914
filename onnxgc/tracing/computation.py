"""The computation graph that solvers see of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.planning.schedule import Operator, StepGraph
from onnxgc.tracing.trace import TrainingStep


@dataclass(frozen=True, slots=True)
class TracedProblem:
    """A checkpoint problem and what its vertices stand for.

    A vertex is a tensor on a way from the model's inputs to the loss, together with its views and
    with the tensor that an in-place operator made it from; it has the name of the last that has
    contents of its own. `members` lists all of them, `vertex_of` is the inverse.
    """

    problem: CheckpointProblem
    members: Mapping[str, tuple[str, ...]]
    vertex_of: Mapping[str, str]

    def discarded(self, plan: CheckpointPlan) -> frozenset[str]:
        """Tensors that the plan does not keep."""
        kept = set(plan.checkpoints)
        return frozenset(
            tensor for vertex, tensors in self.members.items() if vertex not in kept for tensor in tensors
        )

    def vertex(self, tensor: str) -> str:
        """The vertex that holds a tensor; a name that is none stays as it is, for the solver to refuse."""
        return self.vertex_of.get(tensor, tensor)


@dataclass(slots=True)
class _Group:
    """A vertex while it is put together."""

    label: str
    tensors: list[str]
    size_bytes: int
    flops: int


def checkpoint_problem(step: TrainingStep) -> TracedProblem:
    """Vertices, edges and costs of a training step.

    Batch statistics and whatever does not depend on the model's inputs (masks of the labels, counts)
    are no vertices: they are small and always kept.

    Raises:
        PlanError: the loss does not depend on any input of the model.
    """
    graph = step.graph
    readers = _reader_counts(graph)
    read_by_backward = {name for chunk in graph.chunks for operator in chunk for name in operator.inputs}
    groups: list[_Group] = []
    group_of: dict[str, _Group] = {}
    edges: list[tuple[_Group, _Group]] = []
    for name in step.model.inputs:
        _new_group(name, (name,), graph.sizes[name], 0, groups, group_of)
    for operator in graph.forward:
        sources = [group_of[name] for name in dict.fromkeys(operator.inputs) if name in group_of]
        if not sources or operator.once:
            continue
        extra = [name for name in operator.outputs[1:] if name in read_by_backward]
        output = operator.outputs[0]
        if operator.is_view:
            group = sources[0]
            group.tensors.append(output)
            group_of[output] = group
        elif _runs_in_place(operator, graph, readers, read_by_backward, group_of):
            group = group_of[operator.inputs[0]]
            group.label = output
            group.tensors.append(output)
            group.flops += operator.flops
            group_of[output] = group
        else:
            size = graph.sizes[output] + sum(graph.sizes[name] for name in extra)
            group = _new_group(output, (output, *extra), size, operator.flops, groups, group_of)
        edges.extend((source, group) for source in sources if source is not group)
    useful = _reaching(edges, group_of.get(step.model.loss))
    if not useful:
        raise PlanError(f"the loss '{step.model.loss}' depends on no input of the model; check --loss")
    vertices = [group for group in groups if group.label in useful]
    return TracedProblem(
        CheckpointProblem(
            ComputationGraph.from_unsorted(
                [group.label for group in vertices],
                [(tail.label, head.label) for tail, head in edges if head.label in useful],
            ),
            {group.label: TensorCost(group.size_bytes, group.flops) for group in vertices},
        ),
        {group.label: tuple(group.tensors) for group in vertices},
        {name: group.label for name, group in group_of.items() if group.label in useful},
    )


def _new_group(
    label: str,
    tensors: tuple[str, ...],
    size_bytes: int,
    flops: int,
    groups: list[_Group],
    group_of: dict[str, _Group],
) -> _Group:
    group = _Group(label, list(tensors), size_bytes, flops)
    groups.append(group)
    group_of.update(dict.fromkeys(tensors, group))
    return group


def _reader_counts(graph: StepGraph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for operator in graph.forward:
        for name in dict.fromkeys(operator.inputs):
            counts[name] = counts.get(name, 0) + 1
    return counts


def _runs_in_place(
    operator: Operator,
    graph: StepGraph,
    readers: Mapping[str, int],
    read_by_backward: set[str],
    group_of: Mapping[str, _Group],
) -> bool:
    """Whether the output takes its input's place, so that both are one tensor in memory."""
    source = operator.inputs[0]
    return (
        operator.in_place
        and source in group_of
        and group_of[source].label == source
        and source not in graph.resident
        and readers[source] == 1
        and source not in read_by_backward
    )


def _reaching(edges: list[tuple[_Group, _Group]], loss: _Group | None) -> set[str]:
    """Labels of the groups from which the loss can be reached."""
    if loss is None:
        return set()
    useful = {loss.label}
    for tail, head in reversed(edges):
        if head.label in useful:
            useful.add(tail.label)
    return useful
