"""The computation graph that solvers see of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.model.core.draft import captured_names
from onnxgc.planning.joint import JointGraph
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.planning.schedule import Operator, StepGraph
from onnxgc.tracing.step_graph import TrainingStep, retrace


@dataclass(frozen=True, slots=True)
class TracedProblem:
    """A checkpoint problem and what its vertices stand for.

    A vertex is a tensor on a way from the model's inputs to the loss, together with its views and
    with the tensor that an in-place operator made it from; it has the name of the last that has
    contents of its own; `vertex_of` says for each tensor which one. `step_in_order` gives the step
    with its forward operators in another order, each order traced once.
    """

    problem: CheckpointProblem
    step: TrainingStep
    vertex_of: Mapping[str, str]
    step_in_order: Callable[[tuple[str, ...]], TrainingStep] = field(repr=False)

    def vertex(self, tensor: str) -> str:
        """The vertex that holds a tensor; a name that is none stays as it is, for the solver to refuse."""
        return self.vertex_of.get(tensor, tensor)


@dataclass(slots=True, eq=False)
class _Group:
    """A vertex while it is put together.

    `ends` are the outputs of its last operator: what others may read. `merged_into` is the vertex
    that it has become part of. What `is_drawn` becomes part of the first that reads it.
    """

    label: str
    tensors: list[str]
    ends: tuple[str, ...]
    size_bytes: int
    flops: int
    is_drawn: bool = False
    merged_into: _Group | None = None

    def find(self) -> _Group:
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        return group


def checkpoint_problem(step: TrainingStep) -> TracedProblem:
    """Vertices, edges and costs of a training step, and the step itself.

    A ReLU, an Add or a scaling is one vertex with what it was made from, where that is made for it
    alone, has its size and is not read by backward: such tensors are never held for long. Batch
    statistics and whatever does not depend on the model's inputs (masks of the labels, counts) are
    no vertices: they are small and always kept. Random numbers by the number of the run are part of the
    vertex that first reads them, as a Dropout's mask is.

    Raises:
        PlanError: the loss does not depend on any input of the model.
    """
    builder = _GraphBuilder(step.graph)
    for name in step.model.inputs:
        builder.add_input(name)
    drawn = {step.model.draw}
    fixed = {*step.model.weights, *step.constants}.difference(step.model.parameters)
    with_subgraphs = {node.name for node in step.model.nodes if captured_names(node)}
    for operator in step.graph.forward:
        is_drawn = not drawn.isdisjoint(operator.inputs) and drawn.union(fixed).issuperset(operator.inputs)
        drawn.update(operator.outputs if is_drawn else ())
        if operator.name in with_subgraphs:
            # It runs once, so that what it makes is there as inputs are.
            for name in operator.outputs:
                builder.add_input(name)
        elif not operator.once:
            builder.add_operator(operator, is_drawn=is_drawn)
    steps = {tuple(operator.name for operator in step.graph.forward): step}

    def step_in_order(names: tuple[str, ...]) -> TrainingStep:
        if names not in steps:
            steps[names] = retrace(step, names)
        return steps[names]

    return builder.problem(step, step_in_order)


class _GraphBuilder:
    """Puts tensors together to vertices, one operator after the other."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._groups: list[_Group] = []
        self._group_of: dict[str, _Group] = {}
        self._edges: list[tuple[_Group, _Group]] = []
        self._readers = Counter(name for operator in graph.forward for name in dict.fromkeys(operator.inputs))
        self._read_by_backward = {
            name for chunk in graph.chunks for operator in chunk for name in operator.inputs
        }

    def add_input(self, name: str) -> None:
        self._new_group(name, [name], (name,), self._graph.sizes[name], 0)

    def add_operator(self, operator: Operator, *, is_drawn: bool = False) -> None:
        sources = [name for name in dict.fromkeys(operator.inputs) if name in self._group_of]
        if not sources and not is_drawn:
            return
        output = operator.outputs[0]
        if operator.is_view and sources:
            group = self._group_of[sources[0]].find()
            group.tensors.append(output)
            self._group_of[output] = group
            return
        held = [name for name in operator.outputs if name in self._read_by_backward]
        counted = held if is_drawn else dict.fromkeys((output, *held))
        size = sum(self._graph.sizes[name] for name in counted)
        group = self._new_group(output, list(operator.outputs), operator.outputs, size, operator.flops)
        group.is_drawn = is_drawn
        for source in sources:
            before = self._group_of[source].find()
            if before.is_drawn or self._is_passing(source, before, output):
                group.tensors[:0] = before.tensors
                group.flops += before.flops
                group.size_bytes += before.size_bytes - (0 if before.is_drawn else self._graph.sizes[source])
                before.merged_into = group
            else:
                self._edges.append((before, group))

    def _is_passing(self, source: str, group: _Group, output: str) -> bool:
        """Whether a tensor ends where `output` begins: made for it alone, and of its size."""
        return (
            group.label == source
            and source not in self._graph.resident
            and sum(self._readers[name] for name in group.ends) == 1
            and source not in self._read_by_backward
            and self._graph.sizes[source] == self._graph.sizes[output]
        )

    def _new_group(
        self, label: str, tensors: list[str], ends: tuple[str, ...], size_bytes: int, flops: int
    ) -> _Group:
        group = _Group(label, tensors, ends, size_bytes, flops)
        self._groups.append(group)
        self._group_of.update(dict.fromkeys(tensors, group))
        return group

    def problem(
        self, step: TrainingStep, step_in_order: Callable[[tuple[str, ...]], TrainingStep]
    ) -> TracedProblem:
        loss = step.model.loss
        edges = [(tail.find(), head.find()) for tail, head in self._edges]
        edges = [(tail, head) for tail, head in edges if tail is not head]
        useful = _reaching(edges, self._group_of[loss].find()) if loss in self._group_of else set()
        if not useful:
            raise PlanError(f"the loss '{loss}' depends on no input of the model; check --loss")
        vertices = [group for group in self._groups if group.merged_into is None and group.label in useful]
        members: dict[Vertex, tuple[str, ...]] = {group.label: tuple(group.tensors) for group in vertices}
        joint = JointGraph(self._graph, members, lambda names: step_in_order(names).graph)
        return TracedProblem(
            CheckpointProblem(
                ComputationGraph.from_unsorted(
                    [group.label for group in vertices],
                    [(tail.label, head.label) for tail, head in edges if head.label in useful],
                ),
                {group.label: TensorCost(group.size_bytes, group.flops) for group in vertices},
                joint,
            ),
            step,
            {
                name: group.find().label
                for name, group in self._group_of.items()
                if group.find().label in useful
            },
            step_in_order,
        )


def _reaching(edges: Sequence[tuple[_Group, _Group]], loss: _Group) -> set[str]:
    """Labels of the groups from which the loss can be reached."""
    tails: dict[str, list[str]] = {}
    for tail, head in edges:
        tails.setdefault(head.label, []).append(tail.label)
    useful, pending = {loss.label}, [loss.label]
    while pending:
        for tail_label in tails.get(pending.pop(), ()):
            if tail_label not in useful:
                useful.add(tail_label)
                pending.append(tail_label)
    return useful
