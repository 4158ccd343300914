"""The computation graph of a training step, as solvers use it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.model.core.draft import captured_names
from onnxgc.planning.joint_graph import JointGraph
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.planning.schedule import Operator, StepGraph
from onnxgc.tracing.step_graph import TrainingStep, retrace


@dataclass(frozen=True, slots=True)
class TracedProblem:
    """A checkpoint problem and the training step from which it was built.

    A vertex is a tensor on a path from the model's inputs to the loss, merged with its views and with
    transient tensors before it. It is named after the last tensor that is not a view. `vertex_of` maps each
    tensor to its vertex. `step_in_order` returns the step with its forward operators in another order, and
    traces each order once.
    """

    problem: CheckpointProblem
    step: TrainingStep
    vertex_of: Mapping[str, str]
    step_in_order: Callable[[tuple[str, ...]], TrainingStep] = field(repr=False)

    def vertex(self, tensor: str) -> str:
        """The vertex of a tensor; an unknown name is returned unchanged, for the solver to reject."""
        return self.vertex_of.get(tensor, tensor)


@dataclass(slots=True, eq=False)
class _MergedVertex:
    """A vertex under construction.

    `ends` are the outputs of its last operator, which others may read. `merged_into` is the vertex of which
    it has become a part. A vertex of random numbers (`is_drawn`) merges into its first reader.
    """

    label: str
    tensors: list[str]
    ends: tuple[str, ...]
    size_bytes: int
    flops: int
    is_drawn: bool = False
    merged_into: "_MergedVertex | None" = None

    def find(self) -> "_MergedVertex":
        vertex = self
        while vertex.merged_into is not None:
            vertex = vertex.merged_into
        return vertex


def checkpoint_problem(step: TrainingStep) -> TracedProblem:
    """Vertices, edges and costs of a training step, and the step itself.

    A tensor merges into its only reader (a ReLU, an Add, a scaling) if both have the same size and backward
    does not read it: such tensors are transient. Batch statistics and tensors that do not depend on the
    model's inputs (masks of the labels, counts) are not vertices: they are small and always kept.
    Counter-based random numbers are part of the vertex that first reads them, like a Dropout's mask.

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
            # It runs once, so its outputs are always live, like inputs.
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
    """Merges tensors to vertices, one operator at a time."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._vertices: list[_MergedVertex] = []
        self._vertex_of: dict[str, _MergedVertex] = {}
        self._edges: list[tuple[_MergedVertex, _MergedVertex]] = []
        self._readers = Counter(name for operator in graph.forward for name in dict.fromkeys(operator.inputs))
        self._read_by_backward = {name for chunk in graph.chunks for operator in chunk for name in operator.inputs}

    def add_input(self, name: str) -> None:
        self._new_vertex(name, [name], (name,), self._graph.sizes[name], 0)

    def add_operator(self, operator: Operator, *, is_drawn: bool = False) -> None:
        sources = [name for name in dict.fromkeys(operator.inputs) if name in self._vertex_of]
        if not sources and not is_drawn:
            return
        output = operator.outputs[0]
        if operator.is_view and sources:
            vertex = self._vertex_of[sources[0]].find()
            vertex.tensors.append(output)
            self._vertex_of[output] = vertex
            return
        kept = [name for name in operator.outputs if name in self._read_by_backward]
        counted = kept if is_drawn else dict.fromkeys((output, *kept))
        size = sum(self._graph.sizes[name] for name in counted)
        vertex = self._new_vertex(output, list(operator.outputs), operator.outputs, size, operator.flops)
        vertex.is_drawn = is_drawn
        for source in sources:
            before = self._vertex_of[source].find()
            if before.is_drawn or self._is_transient(source, before, output):
                vertex.tensors[:0] = before.tensors
                vertex.flops += before.flops
                vertex.size_bytes += before.size_bytes - (0 if before.is_drawn else self._graph.sizes[source])
                before.merged_into = vertex
            else:
                self._edges.append((before, vertex))

    def _is_transient(self, source: str, vertex: _MergedVertex, output: str) -> bool:
        """Whether `output` is the only reader of a tensor, has its size, and backward does not read it."""
        return (
            vertex.label == source
            and source not in self._graph.resident
            and sum(self._readers[name] for name in vertex.ends) == 1
            and source not in self._read_by_backward
            and self._graph.sizes[source] == self._graph.sizes[output]
        )

    def _new_vertex(
        self, label: str, tensors: list[str], ends: tuple[str, ...], size_bytes: int, flops: int
    ) -> _MergedVertex:
        vertex = _MergedVertex(label, tensors, ends, size_bytes, flops)
        self._vertices.append(vertex)
        self._vertex_of.update(dict.fromkeys(tensors, vertex))
        return vertex

    def problem(self, step: TrainingStep, step_in_order: Callable[[tuple[str, ...]], TrainingStep]) -> TracedProblem:
        loss = step.model.loss
        edges = [(tail.find(), head.find()) for tail, head in self._edges]
        edges = [(tail, head) for tail, head in edges if tail is not head]
        useful = _reaching(edges, self._vertex_of[loss].find()) if loss in self._vertex_of else set()
        if not useful:
            raise PlanError(f"the loss '{loss}' does not depend on any input of the model; check --loss")
        vertices = [vertex for vertex in self._vertices if vertex.merged_into is None and vertex.label in useful]
        members: dict[Vertex, tuple[str, ...]] = {vertex.label: tuple(vertex.tensors) for vertex in vertices}
        joint = JointGraph(self._graph, members, lambda names: step_in_order(names).graph)
        return TracedProblem(
            CheckpointProblem(
                ComputationGraph.from_unsorted(
                    [vertex.label for vertex in vertices],
                    [(tail.label, head.label) for tail, head in edges if head.label in useful],
                ),
                {vertex.label: TensorCost(vertex.size_bytes, vertex.flops) for vertex in vertices},
                joint,
            ),
            step,
            {name: vertex.find().label for name, vertex in self._vertex_of.items() if vertex.find().label in useful},
            step_in_order,
        )


def _reaching(edges: Sequence[tuple[_MergedVertex, _MergedVertex]], loss: _MergedVertex) -> set[str]:
    """Labels of the vertices from which a path leads to the loss."""
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
