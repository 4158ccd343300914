"""The joint graph of a problem: forward and backward together, on which plans are scheduled and simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.schedule import (
    Operator,
    Schedule,
    StepGraph,
    build_schedule,
    segment_order,
    segment_read_first,
)
from onnxgc.planning.schedule_from_sequence import schedule_of_sequence
from onnxgc.planning.simulate import MemoryProfile, simulate


class Retrace(Protocol):
    """Builds a training step with its forward operators in another order, and backward in reverse.

    A joint graph of a traced model differentiates the model again for each new order
    (`onnxgc.tracing.step_graph.retrace`), and infers types of backward nodes that the first trace does not
    have. That takes far longer than a simulation, so solvers try few orders; tracing caches the step of each
    order. Backward's operators may differ between orders: gradients of a tensor with several
    readers are summed in the order in which backward reaches these.
    """

    def __call__(self, names: tuple[str, ...], /) -> StepGraph:
        """The step whose forward operators, all of them, have the order `names`; topological."""


@dataclass(frozen=True, slots=True)
class JointGraph:
    """One training step, and which of its tensors belong to which vertex.

    `retrace` builds the same step in another order.
    """

    step: StepGraph
    members: Mapping[Vertex, tuple[str, ...]]
    retrace: Retrace = field(repr=False)

    def retraced(self, names: tuple[str, ...]) -> StepGraph:
        """The step with forward operators in the order `names`; a new order calls `retrace`."""
        if names == tuple(operator.name for operator in self.step.forward):
            return self.step
        return self.retrace(names)

    def mapped(self, change: Callable[[StepGraph], StepGraph]) -> JointGraph:
        """The joint graph with a changed step, in every order."""
        return JointGraph(change(self.step), self.members, lambda names: change(self.retrace(names)))

    def without_parameter_gradients(self) -> JointGraph:
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
        named = copy_name or _counting_namer()
        if plan.sequence:
            return self.step, schedule_of_sequence(self.step, plan.sequence, named)
        discarded = self.discarded(plan)
        if plan.order:
            names = operator_order(self.step, vertex_of_operators(self.step, self.members, plan.order))
        else:
            names = segment_order(self.step, discarded)
        step = self.retraced(names)
        return step, build_schedule(step, discarded, named)

    def profile(self, plan: CheckpointPlan) -> MemoryProfile:
        """The simulated memory of a plan."""
        step, schedule = self.scheduled(plan)
        return simulate(schedule, step)


def _counting_namer() -> Callable[[str], str]:
    """A function that names copies `x__recompute`, `x__recompute2`, ..., for steps without such tensors."""
    copies: Counter[str] = Counter()

    def name_of_copy(name: str) -> str:
        copies[name] += 1
        number = copies[name]
        return f"{name}__recompute" if number == 1 else f"{name}__recompute{number}"

    return name_of_copy


def vertex_of_operators(
    step: StepGraph, members: Mapping[Vertex, tuple[str, ...]], order: Sequence[Vertex]
) -> list[int]:
    """For each forward operator, the place in `order` of the vertex that it belongs to.

    An operator that writes no vertex (batch statistics) belongs to the last vertex that it depends on, or
    without such a vertex to the first that depends on it.
    """
    place = {tensor: number for number, vertex in enumerate(order) for tensor in members[vertex]}
    known: dict[str, int] = {}
    places: list[int | None] = []
    for operator in step.forward:
        own = [place[name] for name in operator.outputs if name in place]
        read = [
            number for name in operator.inputs if (number := known.get(name, place.get(name))) is not None
        ]
        number = own[0] if own else max(read, default=None)
        places.append(number)
        if number is not None:
            known.update(dict.fromkeys(operator.outputs, number))
    wanted: dict[str, int] = {}
    for index in reversed(range(len(places))):
        operator = step.forward[index]
        number = places[index]
        if number is None:
            number = min((wanted[name] for name in operator.outputs if name in wanted), default=0)
            places[index] = number
        for name in operator.inputs:
            wanted[name] = min(wanted.get(name, number), number)
    return [number or 0 for number in places]


def operator_order(step: StepGraph, places: Sequence[int]) -> tuple[str, ...]:
    """Names of the forward operators, vertex by vertex."""
    by_place = sorted(range(len(places)), key=lambda index: (places[index], index))
    return tuple(step.forward[index].name for index in by_place)


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
