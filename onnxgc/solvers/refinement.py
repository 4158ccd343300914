"""A plan that was made for something else, made to fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.joint import operator_order, vertex_of_operators
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.kept_sets import improved
from onnxgc.solvers.step_model import step_model

_MOST_EVENTS = 300_000
"""Operators and slots that are looked at from each plan, in each order and stage."""


def refined(
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
        step = joint.step
        if order:
            step = joint.in_order(operator_order(step, vertex_of_operators(step, joint.members, order)))
        model = step_model(step, joint.members, vertices)
        place = {vertex: number for number, vertex in enumerate(vertices)}
        for plan in plans:
            kept = [place[vertex] for vertex in plan.checkpoints]
            for changeable in ((), *stages):
                places = sorted(place[vertex] for vertex in changeable)
                kept = improved(model, kept, _MOST_EVENTS, math.inf, places)[1]
                checkpoints = graph.in_order(vertices[number] for number in kept)
                candidate = CheckpointPlan(checkpoints, order, keeps_last_segment=False)
                found = joint.profile(candidate).peak_bytes
                if found < peak:
                    best, peak = candidate, found
    return best
