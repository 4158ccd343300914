"""A plan that was made for something else, made to fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.joint import operator_order, vertex_of_operators
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.peak.local_search import descend_peak, peak_of_kept
from onnxgc.solvers.peak.step_model import StepModel, step_model

_MOST_EVENTS = 300_000
"""Operators and slots that are looked at from each plan, in each order and stage."""


def transfer_plan(
    problem: CheckpointProblem, plans: Sequence[CheckpointPlan], stages: Sequence[Collection[Vertex]]
) -> CheckpointPlan:
    """A plan of no higher peak: vertices are kept or given up while it falls, one stage's after another's.

    It is the best that is found from any of the plans, in their order and in the graph's own. They have no
    sequence of operators.
    """
    joint, graph = problem.joint(), problem.graph
    best = min(plans, key=lambda plan: joint.profile(plan).peak_bytes)
    peak = joint.profile(best).peak_bytes
    for order in dict.fromkeys((*(plan.order for plan in plans), ())):
        vertices = order or graph.vertices
        model, place = _model_in_order(problem, order)
        for plan in plans:
            kept = [place[vertex] for vertex in plan.checkpoints]
            for changeable in ((), *stages):
                places = sorted(place[vertex] for vertex in changeable)
                kept = descend_peak(model, kept, _MOST_EVENTS, math.inf, places)[1]
                checkpoints = graph.in_order(vertices[number] for number in kept)
                candidate = CheckpointPlan(checkpoints, order, keeps_last_segment=False)
                found = joint.profile(candidate).peak_bytes
                if found < peak:
                    best, peak = candidate, found
    return best


def adopt_decisions(
    problem: CheckpointProblem,
    plan: CheckpointPlan,
    wishes: CheckpointPlan,
    decided: Collection[Vertex],
    most_bytes: int,
) -> CheckpointPlan:
    """`plan` with what `wishes` keeps and gives up among the `decided` vertices, as far as its peak allows.

    Decisions are taken over all at once, or by halves, in the plan's order, while the simulated peak is
    at most `most_bytes`; where that of `plan` is above, nothing is. `plan` has no sequence of operators.
    """
    joint, graph = problem.joint(), problem.graph
    model, place = _model_in_order(problem, plan.order)
    kept = {place[vertex] for vertex in plan.checkpoints}
    wished = {place[vertex] for vertex in wishes.checkpoints}
    differing = sorted((kept ^ wished) & {place[vertex] for vertex in decided})
    while differing:
        pending, taken = [differing], False
        while pending:
            some = pending.pop()
            if peak_of_kept(model, kept ^ set(some)) <= most_bytes:
                kept ^= set(some)
                taken = True
            elif len(some) > 1:
                middle = len(some) // 2
                pending += [some[middle:], some[:middle]]
        if not taken:
            break
        differing = [number for number in differing if (number in kept) != (number in wished)]
    vertices = plan.order or graph.vertices
    checkpoints = graph.in_order(vertices[number] for number in kept)
    found = CheckpointPlan(checkpoints, plan.order, keeps_last_segment=False)
    return found if joint.profile(found).peak_bytes <= most_bytes else plan


def _model_in_order(
    problem: CheckpointProblem, order: Sequence[Vertex]
) -> tuple[StepModel, dict[Vertex, int]]:
    """The step in an order of the vertices (the graph's own where it is empty), and each vertex's place."""
    joint = problem.joint()
    vertices, step = order or problem.graph.vertices, joint.step
    if order:
        step = joint.in_order(operator_order(step, vertex_of_operators(step, joint.members, order)))
    return step_model(step, joint.members, vertices), {vertex: n for n, vertex in enumerate(vertices)}
