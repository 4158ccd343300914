"""One network in several files: which tensors are the same, what each costs, and plans carried over."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from onnxgc.api.pipeline import PlannedStep, ReadOptions, judged, plan_traced_again, read_again, trace_problem
from onnxgc.api.plan_difference import MOST_HELD
from onnxgc.errors import ShapeError
from onnxgc.matching.match import Matching, Reason, match
from onnxgc.matching.network_view import Pair
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.files.load import load_proto
from onnxgc.planning.peak_contents import held_at_peak
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.schedule import Schedule, StepGraph
from onnxgc.planning.simulate import MemoryProfile
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.peak.plan_transfer import adopt_decisions, transfer_plan
from onnxgc.solvers.registry import solver_for

Shapes = Mapping[str, tuple[int, ...]]
Source = str | os.PathLike[str] | onnx.ModelProto


@dataclass(frozen=True, slots=True)
class Network:
    """A file with its own plan; `note` says if it was read for another batch than it has."""

    name: str
    model: TrainableModel
    planned: PlannedStep
    note: str = ""

    def batch(self) -> int:
        return batch_of(self.model)


def shapes_for(source: Source, name: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Those of the given shapes whose inputs a model has.

    Raises:
        ShapeError: it has none of them.
    """
    if not shapes:
        return {}
    found = _named_here(source, shapes)
    if not found:
        inputs = [value.name for value in load_proto(source)[0].graph.input]
        raise ShapeError(
            f"--input-shapes names {', '.join(map(repr, shapes))}, but the inputs of '{name}' are "
            f"{', '.join(map(repr, inputs[:5]))}; repeat the option with one of these"
        )
    return found


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
    """A file with `plan`, or its plan of least peak, for the batch of the `first` one where none was said.

    Raises:
        ShapeError: it cannot be read for that batch.
        PlanError: the plan names what is no tensor of it.
    """
    own = shapes_for(source, name, shapes) if first is None else _named_here(source, shapes)
    model, note = read_again(source, read, own), ""
    if first is not None and not own and _differs_in_batch_alone(first.model, model):
        batch, here = first.batch(), batch_of(model)
        wanted = {
            key: (batch, *model.types[key].shape[1:])
            for key in model.inputs
            if model.types[key].shape[:1] == (here,)
        }
        note = f"read for batch {batch}, as '{first.name}' is; by itself it has {here}"
        try:
            model = read_again(source, read, wanted)
        except ShapeError as error:
            raise ShapeError(
                f"'{name}' has batch {here}, '{first.name}' {batch}, and it cannot be read for that: {error}"
            ) from error
    traced = trace_problem(model)
    if plan is not None:
        return Network(name, model, plan_traced_again(model, traced, plan), note)
    solution = solver_for(None).solve(traced.problem, options)
    return Network(name, model, judged(model, traced, solution), note)


def batch_of(model: TrainableModel) -> int:
    """The first dimension of the first input, 1 where it has none."""
    return next(iter(model.types[model.inputs[0]].shape), 1)


def _differs_in_batch_alone(one: TrainableModel, other: TrainableModel) -> bool:
    samples = [sorted(sorted(model.types[name].shape[1:]) for name in model.inputs) for model in (one, other)]
    return samples[0] == samples[1] and batch_of(one) != batch_of(other)


def compared_networks(networks: Sequence[Network]) -> tuple[dict[str, Any], dict[str, CheckpointPlan]]:
    """The first file beside each of the others: figures for `--json`, and its plan carried over to them.

    Raises:
        ShapeError: the files are read for different batches.
    """
    first, *others = networks
    plans = {first.name: first.planned.solution.plan}
    pairs: list[dict[str, Any]] = []
    for other in others:
        found, plan = _pair(first, other, match(first.model, other.model))
        pairs.append(found)
        plans[other.name] = plan
    return {"files": [_file(network) for network in networks], "pairs": pairs}, plans


def _file(network: Network) -> dict[str, Any]:
    planned, model = network.planned, network.model
    read = _read_by_backward(network)
    return {
        "model": network.name,
        "inputs": {name: list(model.types[name].shape) for name in model.inputs},
        "vertices": len(planned.traced.problem.graph.vertices),
        "operators": len({node.origin for node in model.nodes}),
        "read_by_backward": {"count": len(read), "bytes": sum(read.values())},
        "regular": _peak(planned.regular_schedule, planned.traced.step.graph, planned.regular_profile),
        "planned": {
            "solver": planned.solution.solver,
            **_peak(planned.schedule, planned.step.graph, planned.profile),
            "checkpoints": len(planned.solution.plan.checkpoints),
            "checkpoint_bytes": planned.objective.checkpoint_bytes,
        },
        "is_rebatched": bool(network.note),
        "notes": [*filter(None, [network.note]), *model.notes],
    }


def _peak(schedule: Schedule, graph: StepGraph, profile: MemoryProfile) -> dict[str, Any]:
    """The peak, where it is, and what it is made of."""
    held = held_at_peak(schedule, graph, profile)[:MOST_HELD]
    return {
        "simulated_peak_bytes": profile.peak_bytes,
        "peak_step": profile.peak_step,
        "largest_at_peak": [{"tensor": name, "bytes": size} for name, size in held],
    }


def _pair(one: Network, other: Network, found: Matching) -> tuple[dict[str, Any], CheckpointPlan]:
    here, there = _Side.of(one, other, found.of_a), _Side.of(other, one, found.of_b)
    reasons = (
        {unmatched.tensor: (unmatched.reason, unmatched.detail) for unmatched in side}
        for side in (found.unmatched_a, found.unmatched_b)
    )
    reasons_a, reasons_b = reasons
    found_plan = carried_over(one, other, here.counterpart)
    plan, as_it_is = (
        plan_traced_again(other.model, other.planned.traced, version, other.planned)
        for version in (found_plan.plan, found_plan.as_it_is)
    )
    return {
        "a": one.name,
        "b": other.name,
        "is_same_network": found.is_same_network,
        "has_same_biases": found.has_same_biases,
        "differences": [{"what": other.what, "a": other.a, "b": other.b} for other in found.differences],
        "matched_tensors": len(found.pairs),
        "rearranged_tensors": sum(pair.is_rearranged for pair in found.pairs),
        "multiplied_tensors": sum(pair.factor != 1 for pair in found.pairs),
        "checkpoints": {
            "a": here.fate_of_checkpoints(reasons_a),
            "b": there.fate_of_checkpoints(reasons_b),
        },
        "extras": [
            {
                "kind": extra.kind,
                "count_a": extra.count_a,
                "count_b": extra.count_b,
                "bytes_a": extra.bytes_a,
                "bytes_b": extra.bytes_b,
            }
            for extra in found.extras
        ],
        "read_by_backward_here_only": {
            "a": here.read_here_only(reasons_a),
            "b": there.read_here_only(reasons_b),
        },
        "part_behind": [_names(pair) for pair in found.last_from_inputs],
        "operators_behind": [[list(side) for side in both] for both in found.operators_behind],
        "meet_again_at": [_names(pair) for pair in found.last_from_outputs],
        "carried_over": {
            "checkpoints": len(found_plan.plan.checkpoints),
            "is_without_sequence": bool(one.planned.solution.plan.sequence),
            "lost": list(found_plan.lost),
            "undecided": found_plan.undecided,
            "decided": found_plan.decided,
            "overruled": found_plan.overruled,
            "simulated_peak_bytes": plan.profile.peak_bytes,
            "as_it_is_simulated_peak_bytes": as_it_is.profile.peak_bytes,
            "own_simulated_peak_bytes": other.planned.profile.peak_bytes,
            "regular_simulated_peak_bytes": other.planned.regular_profile.peak_bytes,
        },
    }, found_plan.plan


def _names(pair: Pair) -> list[str]:
    return [pair.a, pair.b]


@dataclass(frozen=True, slots=True)
class _Side:
    """A file beside another one: the vertex there that holds the same as one here, and how often it is so."""

    own: Network
    other: Network
    counterpart: Mapping[str, str]

    @classmethod
    def of(cls, own: Network, other: Network, matched: Mapping[str, str]) -> _Side:
        return cls(own, other, counterparts_of(own, other, matched))

    def fate_of_checkpoints(self, reasons: Mapping[str, tuple[Reason, str]]) -> dict[str, Any]:
        """What became of this file's own checkpoints in the other file."""
        kept_there = set(self.other.planned.solution.plan.checkpoints)
        found: dict[str, list[str]] = {reason.name.lower(): [] for reason in Reason}
        same = both = 0
        checkpoints = [str(vertex) for vertex in self.own.planned.solution.plan.checkpoints]
        for vertex in checkpoints:
            if vertex in self.counterpart:
                same += 1
                both += self.counterpart[vertex] in kept_there
            else:
                found[self._reason(vertex, reasons)[0].name.lower()].append(vertex)
        return {"count": len(checkpoints), "same_tensor": same, "kept_by_both": both, **found}

    def read_here_only(self, reasons: Mapping[str, tuple[Reason, str]]) -> list[dict[str, Any]]:
        """What backward reads and the other file has not, the largest first."""
        read = _read_by_backward(self.own)
        alone = [vertex for vertex in read if vertex not in self.counterpart]
        return [
            {"tensor": vertex, "bytes": read[vertex], "detail": self._reason(vertex, reasons)[1]}
            for vertex in sorted(alone, key=lambda vertex: (-read[vertex], vertex))
        ]

    def _reason(self, vertex: str, reasons: Mapping[str, tuple[Reason, str]]) -> tuple[Reason, str]:
        members = self.own.planned.traced.problem.joint().members[vertex]
        known = [reasons[tensor] for tensor in (vertex, *members) if tensor in reasons]
        return min(
            known,
            key=lambda reason: list(Reason).index(reason[0]),
            default=(Reason.ONE_SIDE, "its counterpart is no tensor that could be kept"),
        )


def _read_by_backward(network: Network) -> dict[str, int]:
    """Vertices of which backward reads a tensor, with their bytes: what storing everything holds."""
    traced = network.planned.traced
    read = {
        traced.vertex_of[name]
        for chunk in traced.step.graph.chunks
        for operator in chunk
        for name in operator.inputs
        if name in traced.vertex_of
    }
    return {
        str(vertex): traced.problem.size_bytes(vertex)
        for vertex in traced.problem.graph.vertices
        if vertex in read
    }


def counterparts_of(own: Network, other: Network, matched: Mapping[str, str]) -> dict[str, str]:
    """The vertices of a file that hold the same as one of the other file, by the matched tensors."""
    found: dict[str, str] = {}
    for vertex, tensors in own.planned.traced.problem.joint().members.items():
        # What the vertex is named by first: the others are its views, and what it was made from.
        for tensor in (str(vertex), *tensors):
            there = other.planned.traced.vertex_of.get(matched.get(tensor, ""))
            if there is not None:
                found[str(vertex)] = there
                break
    return found


@dataclass(frozen=True, slots=True)
class CarriedPlan:
    """The plan of one file with the tensors of another.

    `as_it_is` keeps what the source keeps, of what there is; `lost` are checkpoints that have no
    counterpart. `plan` is made to fit: first what the source says nothing of is decided, which are
    `undecided` tensors, those that the target has alone or that stand in for a lost checkpoint, then
    all others, where the peak falls. Where that does not come close to the target's own plan, the plan
    is the target's own with as many of the source's decisions as leave it close. `overruled` is in how
    many of the `decided` tensors it is not the source's decision.
    """

    plan: CheckpointPlan
    as_it_is: CheckpointPlan
    lost: tuple[str, ...]
    undecided: int
    decided: int
    overruled: int


CLOSE = 1.02
"""A carried plan is close to the target's own where its peak is at most this many times as high."""


def carried_over(one: Network, other: Network, counterpart: Mapping[str, str]) -> CarriedPlan:
    """The plan of one file for the other, by the counterparts of its vertices there."""
    plan, problem = one.planned.solution.plan, other.planned.traced.problem
    graph, checkpoints = problem.graph, [str(vertex) for vertex in plan.checkpoints]
    kept = [counterpart[vertex] for vertex in checkpoints if vertex in counterpart]
    lost = tuple(vertex for vertex in checkpoints if vertex not in counterpart)
    found = replace(CheckpointPlan.for_graph(graph, kept), keeps_last_segment=plan.keeps_last_segment)
    if plan.order:
        found = replace(found, order=_order_like(plan.order, other, counterpart))
    source = one.planned.traced.problem.graph
    stand_ins = [
        {counterpart[near] for vertex in lost for near in _nearest(vertex, onward, counterpart)}
        for onward in (source.successors, source.predecessors)
    ]
    decided = set(counterpart.values()).difference(*stand_ins)
    undecided = [vertex for vertex in graph.vertices if vertex not in decided]
    starts = [replace(found, checkpoints=graph.in_order({*found.checkpoints, *some})) for some in stand_ins]
    fitted = transfer_plan(problem, list(dict.fromkeys((found, *starts))), (undecided, graph.vertices))
    joint, own = problem.joint(), replace(other.planned.solution.plan, sequence=())
    limit = int(CLOSE * joint.profile(own).peak_bytes)
    if joint.profile(fitted).peak_bytes > limit:
        fitted = adopt_decisions(problem, own, found, decided, limit)
    changed = set(fitted.checkpoints) ^ set(found.checkpoints)
    return CarriedPlan(fitted, found, lost, len(undecided), len(decided), len(changed & decided))


def _nearest(
    lost: str, onward: Callable[[Any], Iterable[Any]], counterpart: Mapping[str, str]
) -> Iterator[str]:
    """The next tensors with a counterpart, in one direction from one that has none."""
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


def _order_like(order: Sequence[Any], other: Network, counterpart: Mapping[str, str]) -> tuple[Any, ...]:
    """The other file's vertices in an order of this one; what is there only comes as soon as it can."""
    graph = other.planned.traced.problem.graph
    rank: dict[Any, int] = {}
    for place, vertex in enumerate(order):
        if str(vertex) in counterpart:
            rank.setdefault(counterpart[str(vertex)], place)
    for vertex in graph.vertices:
        before = max((rank[read] for read in graph.predecessors(vertex)), default=-1)
        rank[vertex] = max(rank.get(vertex, before), before)
    missing = {vertex: len(graph.predecessors(vertex)) for vertex in graph.vertices}
    ready = [
        (rank[vertex], graph.topological_index(vertex), vertex)
        for vertex in graph.vertices
        if not missing[vertex]
    ]
    heapq.heapify(ready)
    found: list[Any] = []
    while ready:
        vertex = heapq.heappop(ready)[2]
        found.append(vertex)
        for reader in graph.successors(vertex):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (rank[reader], graph.topological_index(reader), reader))
    return tuple(found)
