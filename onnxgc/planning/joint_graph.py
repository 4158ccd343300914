"""The joint graph of a problem: forward and backward together, on which plans are scheduled and simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.schedule import (
    Operator,
    Schedule,
    StepGraph,
    build_schedule,
    copy_namer,
    segment_order,
    segment_read_first,
)
from onnxgc.planning.schedule_from_sequence import schedule_of_sequence
from onnxgc.planning.simulate import MemoryProfile, simulate

Retrace: TypeAlias = Callable[[tuple[str, ...]], StepGraph]
"""Builds a training step with its forward operators in another topological order, and backward in reverse.

A joint graph of a traced model differentiates the model again for each new order
(`onnxgc.tracing.step_graph.retrace`), and infers types of backward nodes that the first trace does not
have. That takes far longer than a simulation, so solvers try few orders; tracing caches the step of each
order. Backward's operators may differ between orders: gradients of a tensor with several readers are
summed in the order in which backward reaches these."""


_MAX_PROFILES = 8
"""Profiles of plans that a joint graph keeps: searches and reports ask for the same ones."""


@dataclass(frozen=True, slots=True)
class JointGraph:
    """One training step, and which of its tensors belong to which vertex."""

    step: StepGraph
    members: Mapping[Vertex, tuple[str, ...]]
    retrace: Retrace = field(repr=False)
    _profiles: dict[CheckpointPlan, MemoryProfile] = field(default_factory=dict, init=False, repr=False, compare=False)

    def retraced(self, names: tuple[str, ...]) -> StepGraph:
        """The step with forward operators in the order `names`; a new order calls `retrace`."""
        if names == tuple(operator.name for operator in self.step.forward):
            return self.step
        return self.retrace(names)

    def step_in(self, order: Sequence[Vertex]) -> StepGraph:
        """The step with its forward operators sorted by vertex."""
        order_numbers = vertex_of_operators(self.step, self.members, order)
        by_vertex = sorted(zip(order_numbers, self.step.forward, strict=True), key=lambda entry: entry[0])
        return self.retraced(tuple(operator.name for _, operator in by_vertex))

    def mapped(self, change: Callable[[StepGraph], StepGraph]) -> "JointGraph":
        """The joint graph with a changed step, in every order."""
        return JointGraph(change(self.step), self.members, lambda names: change(self.retrace(names)))

    def without_parameter_gradients(self) -> "JointGraph":
        """The same step with parameters' gradients of 0 bytes."""

        def without_gradients(step: StepGraph) -> StepGraph:
            return replace(step, sizes={**step.sizes, **dict.fromkeys(step.parameter_gradients, 0)})

        return self.mapped(without_gradients)

    def discarded(self, plan: CheckpointPlan) -> frozenset[str]:
        """The tensors that a plan does not keep from forward to backward."""
        kept = set(plan.checkpoints)
        dropped = frozenset(
            tensor for vertex, tensors in self.members.items() if vertex not in kept for tensor in tensors
        )
        return dropped - segment_read_first(self.step, dropped) if plan.keeps_last_segment else dropped

    def scheduled(
        self, plan: CheckpointPlan, copy_name: Callable[[str], str] | None = None
    ) -> tuple[StepGraph, Schedule]:
        """The step in the plan's order, and its schedule; `copy_name` names the copies of tensors."""
        copy_name = copy_name or copy_namer()
        if plan.sequence:
            return self.step, schedule_of_sequence(self.step, plan.sequence, copy_name)
        discarded = self.discarded(plan)
        names = () if plan.order else segment_order(self.step, discarded)
        step = self.step_in(plan.order) if plan.order else self.retraced(names)
        return step, build_schedule(step, discarded, copy_name)

    def profile(self, plan: CheckpointPlan) -> MemoryProfile:
        """The simulated memory of a plan."""
        if plan not in self._profiles:
            step, schedule = self.scheduled(plan)
            if len(self._profiles) >= _MAX_PROFILES:
                self._profiles.clear()
            self._profiles[plan] = simulate(schedule, step)
        return self._profiles[plan]


def vertex_of_operators(
    step: StepGraph, members: Mapping[Vertex, tuple[str, ...]], order: Sequence[Vertex]
) -> list[int]:
    """For each forward operator, the position in `order` of the vertex that it belongs to.

    An operator that writes no vertex (batch statistics) belongs to the last vertex that it depends on, or
    without such a vertex to the first that depends on it.
    """
    position = {tensor: number for number, vertex in enumerate(order) for tensor in members[vertex]}
    known = dict(position)
    positions: list[int | None] = []
    for operator in step.forward:
        own = next((position[name] for name in operator.outputs if name in position), None)
        read = [known[name] for name in operator.inputs if name in known]
        number = max(read, default=None) if own is None else own
        positions.append(number)
        if number is not None:
            known.update(dict.fromkeys(operator.outputs, number))
    wanted: dict[str, int] = {}
    numbers: list[int] = []
    for operator, number in zip(reversed(step.forward), reversed(positions), strict=True):
        if number is None:
            number = min((wanted[name] for name in operator.outputs if name in wanted), default=0)
        numbers.append(number)
        for name in operator.inputs:
            wanted[name] = min(wanted.get(name, number), number)
    return numbers[::-1]


def joint_of_bare_graph(graph: ComputationGraph, size_of: Callable[[Vertex], int]) -> JointGraph:
    """The joint graph of a graph with sizes alone.

    Backward of an operator reads the inputs that the operator reads in forward; gradients take no memory.
    Sources are live from the start to their last use and are never recomputed.
    """
    name = {vertex: f"t{number}" for number, vertex in enumerate(graph.vertices)}
    forward = {
        f"f{number}": Operator(
            f"f{number}",
            tuple(name[tail] for tail in graph.predecessors(vertex)),
            (name[vertex],),
            once=not graph.predecessors(vertex),
            flops=1,
        )
        for number, vertex in enumerate(graph.vertices)
    }
    sizes = {name[vertex]: size_of(vertex) for vertex in graph.vertices}

    def step_in_order(names: tuple[str, ...]) -> StepGraph:
        operators = tuple(forward[operator] for operator in names)
        differentiated = [operator for operator in reversed(operators) if operator.inputs]
        chunks = tuple((Operator(f"b{operator.name}", operator.inputs, ()),) for operator in differentiated)
        sources = tuple(operator.name for operator in differentiated)
        return StepGraph(operators, chunks, sources, sizes, frozenset(), (), frozenset())

    members = {vertex: (tensor,) for vertex, tensor in name.items()}
    return JointGraph(step_in_order(tuple(forward)), members, step_in_order)
