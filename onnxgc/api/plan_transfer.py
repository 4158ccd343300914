"""Transfer a plan between two files of one network."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxgc.api.planned_network import Network
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.peak.refine_plans import adopt_decisions, transfer_plan

CLOSE_FACTOR = 1.02
"""Maximum ratio of peaks at which a transferred plan is close to the target's own."""


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
    found = replace(CheckpointPlan.for_graph(graph, kept), keeps_last_segment=plan.keeps_last_segment)
    if plan.order:
        found = replace(found, order=_similar_order(plan.order, other, counterpart))
    source = one.planned.traced.problem.graph
    replacements = [
        {counterpart[near] for vertex in lost for near in _nearest(vertex, onward, counterpart)}
        for onward in (source.successors, source.predecessors)
    ]
    decided = set(counterpart.values()).difference(*replacements)
    undecided = [vertex for vertex in graph.vertices if vertex not in decided]
    starts = [
        replace(found, checkpoints=graph.in_order({*found.checkpoints, *some})) for some in replacements
    ]
    fitted = transfer_plan(problem, list(dict.fromkeys((found, *starts))), (undecided, graph.vertices))
    joint, own = problem.joint(), replace(other.planned.solution.plan, sequence=())
    limit = int(CLOSE_FACTOR * joint.profile(own).peak_bytes)
    if joint.profile(fitted).peak_bytes > limit:
        fitted = adopt_decisions(problem, own, found, decided, limit)
    changed = set(fitted.checkpoints) ^ set(found.checkpoints)
    return NetworkTransfer(fitted, found, lost, len(undecided), len(decided), len(changed & decided))


def _nearest(
    lost: str, onward: Callable[[Any], Iterable[Any]], counterpart: Mapping[str, str]
) -> Iterator[str]:
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
