"""Files of one network with their own plans, and the transfer of a plan from one to another."""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from onnxgc.api.planned_step import PlannedStep, schedule_solution, trace_problem
from onnxgc.api.read_options import ReadOptions, read_with_options
from onnxgc.api.step_planning import traced_step_with_plan
from onnxgc.errors import ShapeError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.files.load import load_proto
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.peak.refine_plans import adopt_decisions, transfer_plan
from onnxgc.solvers.registry import solver_for

CLOSE_FACTOR = 1.02
"""Maximum ratio of peaks at which a transferred plan is close to the target's own."""
Shapes = Mapping[str, tuple[int, ...]]
Source = str | os.PathLike[str] | onnx.ModelProto


@dataclass(frozen=True, slots=True)
class Network:
    """A file with its own plan; `note` reports if it was read with another batch size."""

    name: str
    model: TrainableModel
    planned: PlannedStep
    note: str = ""


def shapes_for(source: Source, name: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs that the model has.

    Raises:
        ShapeError: it has none of the inputs.
    """
    if not shapes:
        return {}
    known = _named_here(source, shapes)
    if not known:
        inputs = [value.name for value in load_proto(source)[0].graph.input]
        raise ShapeError(
            f"--input-shapes names {', '.join(map(repr, shapes))}, but the inputs of '{name}' are "
            f"{', '.join(map(repr, inputs[:5]))}; repeat the option with one of these"
        )
    return known


def _named_here(source: Source, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    inputs = {value.name for value in load_proto(source)[0].graph.input} if shapes else set()
    return {given: shape for given, shape in shapes.items() if given in inputs}


def planned_network(
    name: str,
    source: Source,
    read: ReadOptions,
    shapes: Shapes,
    options: SolverOptions,
    first: Network | None = None,
    plan: CheckpointPlan | None = None,
) -> Network:
    """A file with `plan`, or with a plan of the lowest peak found.

    Unless `shapes` contains its inputs, it is read with the batch size of the `first` file.

    Raises:
        ShapeError: it cannot be read with that batch size.
        PlanError: the plan contains a name that is not a tensor of the file.
    """
    own = shapes_for(source, name, shapes) if first is None else _named_here(source, shapes)
    model, note = read_with_options(source, read, own), ""
    if first is not None and not own and _differs_in_batch_only(first.model, model):
        batch, here = _batch_size(first.model), _batch_size(model)
        wanted = {
            key: (batch, *model.types[key].shape[1:]) for key in model.inputs if model.types[key].shape[:1] == (here,)
        }
        note = f"read with batch size {batch}, like '{first.name}', instead of {here}"
        try:
            model = read_with_options(source, read, wanted)
        except ShapeError as error:
            raise ShapeError(
                f"'{name}' has batch size {here} and cannot be read with {batch}, that of '{first.name}': {error}"
            ) from error
    traced = trace_problem(model)
    if plan is not None:
        return Network(name, model, traced_step_with_plan(model, traced, plan), note)
    solution = solver_for(None).solve(traced.problem, options)
    return Network(name, model, schedule_solution(model, traced, solution), note)


def _batch_size(model: TrainableModel) -> int:
    """The first dimension of the first input, or 1."""
    return next(iter(model.types[model.inputs[0]].shape), 1)


def _differs_in_batch_only(one: TrainableModel, other: TrainableModel) -> bool:
    samples = [sorted(sorted(model.types[name].shape[1:]) for name in model.inputs) for model in (one, other)]
    return samples[0] == samples[1] and _batch_size(one) != _batch_size(other)


@dataclass(frozen=True, slots=True)
class NetworkTransfer:
    """The plan of one file (source) with the tensors of another (target).

    Attributes:
        plan: the adapted plan. First the `undecided` tensors are decided, then all others, if that lowers the
            peak. If the result is not close to the target's own plan, it is the target's own plan, changed to
            follow as many of the source's decisions as `CLOSE_FACTOR` allows.
        unadapted: keeps the counterparts of the source's checkpoints.
        lost: checkpoints without a counterpart.
        undecided: number of tensors without a decision of the source: those that only the target has, and
            those that replace a lost checkpoint.
        decided: number of other tensors.
        overruled: number of decided tensors for which the plan deviates from the source.
    """

    plan: CheckpointPlan
    unadapted: CheckpointPlan
    lost: tuple[str, ...]
    undecided: int
    decided: int
    overruled: int


def transfer_between(one: Network, other: Network, counterpart: Mapping[str, str]) -> NetworkTransfer:
    """The plan of one file for the other, by the counterparts of its vertices."""
    plan, problem = one.planned.solution.plan, other.planned.traced.problem
    graph, checkpoints = problem.graph, [str(vertex) for vertex in plan.checkpoints]
    kept = [counterpart[vertex] for vertex in checkpoints if vertex in counterpart]
    lost = tuple(vertex for vertex in checkpoints if vertex not in counterpart)
    direct = replace(CheckpointPlan.for_graph(graph, kept), keeps_last_segment=plan.keeps_last_segment)
    if plan.order:
        direct = replace(direct, order=_similar_order(plan.order, other, counterpart))
    source = one.planned.traced.problem.graph
    replacements = [
        {counterpart[near] for vertex in lost for near in _nearest(vertex, onward, counterpart)}
        for onward in (source.successors, source.predecessors)
    ]
    decided = set(counterpart.values()).difference(*replacements)
    undecided = [vertex for vertex in graph.vertices if vertex not in decided]
    starts = [replace(direct, checkpoints=graph.in_order({*direct.checkpoints, *some})) for some in replacements]
    fitted = transfer_plan(problem, list(dict.fromkeys((direct, *starts))), (undecided, graph.vertices))
    joint, own = problem.joint(), replace(other.planned.solution.plan, sequence=())
    limit = int(CLOSE_FACTOR * joint.profile(own).peak_bytes)
    if joint.profile(fitted).peak_bytes > limit:
        fitted = adopt_decisions(problem, own, direct, decided, limit)
    changed = set(fitted.checkpoints) ^ set(direct.checkpoints)
    return NetworkTransfer(fitted, direct, lost, len(undecided), len(decided), len(changed & decided))


def _nearest(lost: str, onward: Callable[[Any], Iterable[Any]], counterpart: Mapping[str, str]) -> Iterator[str]:
    """The nearest tensors with a counterpart, in one direction from a tensor without one."""
    seen, pending = {lost}, [lost]
    while pending:
        for vertex in map(str, onward(pending.pop())):
            if vertex in seen:
                continue
            seen.add(vertex)
            if vertex in counterpart:
                yield vertex
            else:
                pending.append(vertex)


def _similar_order(order: Sequence[Any], other: Network, counterpart: Mapping[str, str]) -> tuple[Any, ...]:
    """The other file's vertices in the order of this one; vertices without a counterpart come early."""
    graph = other.planned.traced.problem.graph
    rank: dict[Any, int] = {}
    for position, vertex in enumerate(order):
        if str(vertex) in counterpart:
            rank.setdefault(counterpart[str(vertex)], position)
    for vertex in graph.vertices:
        before = max((rank[read] for read in graph.predecessors(vertex)), default=-1)
        rank[vertex] = max(rank.get(vertex, before), before)
    missing = {vertex: len(graph.predecessors(vertex)) for vertex in graph.vertices}
    ready = [
        (rank[vertex], graph.topological_index(vertex), vertex) for vertex in graph.vertices if not missing[vertex]
    ]
    heapq.heapify(ready)
    ordered: list[Any] = []
    while ready:
        vertex = heapq.heappop(ready)[2]
        ordered.append(vertex)
        for reader in graph.successors(vertex):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (rank[reader], graph.topological_index(reader), reader))
    return tuple(ordered)
