"""Plan transfer: plans for one network applied to its counterpart."""

import math
from collections.abc import Collection, Sequence

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.peak.local_search import descend_peak, peak_of_kept
from onnxgc.solvers.peak.step_model import StepModel, step_model

_MAX_EVENTS = 300_000
"""Operators and slots evaluated for each plan, order and stage."""


def transfer_plan(
    problem: CheckpointProblem, plans: Sequence[CheckpointPlan], stages: Sequence[Collection[Vertex]]
) -> CheckpointPlan:
    """The best plan that local search finds from any of `plans`, in their orders and in the graph's own.

    Args:
        problem: the network that receives the plan.
        plans: plans without sequences.
        stages: sets of vertices that may change, one set after another.

    Returns:
        A plan with a peak no higher than the least of `plans`.
    """
    joint, graph = problem.joint(), problem.graph
    best = min(plans, key=lambda plan: joint.profile(plan).peak_bytes)
    peak = joint.profile(best).peak_bytes
    for order in dict.fromkeys((*(plan.order for plan in plans), ())):
        vertices = order or graph.vertices
        model, position = _model_in_order(problem, order)
        for plan in plans:
            kept = [position[vertex] for vertex in plan.checkpoints]
            for changeable in ((), *stages):
                positions = sorted(position[vertex] for vertex in changeable)
                kept = descend_peak(model, kept, _MAX_EVENTS, math.inf, positions)[1]
                checkpoints = graph.in_order(vertices[number] for number in kept)
                candidate = CheckpointPlan(checkpoints, order, keeps_last_segment=False)
                candidate_peak = joint.profile(candidate).peak_bytes
                if candidate_peak < peak:
                    best, peak = candidate, candidate_peak
    return best


def adopt_decisions(
    problem: CheckpointProblem,
    plan: CheckpointPlan,
    wishes: CheckpointPlan,
    decided: Collection[Vertex],
    max_bytes: int,
) -> CheckpointPlan:
    """Move `plan` towards `wishes` on the `decided` vertices while the simulated peak allows it.

    Decisions are adopted all at once, or by halves, in the plan's order, while the simulated peak is at most
    `max_bytes`. A plan above that is returned unchanged. `plan` has no sequence.
    """
    joint, graph = problem.joint(), problem.graph
    model, position = _model_in_order(problem, plan.order)
    kept = {position[vertex] for vertex in plan.checkpoints}
    wished = {position[vertex] for vertex in wishes.checkpoints}
    differing = sorted((kept ^ wished) & {position[vertex] for vertex in decided})
    while differing:
        pending, adopted = [differing], False
        while pending:
            decisions = pending.pop()
            if peak_of_kept(model, kept ^ set(decisions)) <= max_bytes:
                kept ^= set(decisions)
                adopted = True
            elif len(decisions) > 1:
                middle = len(decisions) // 2
                pending += [decisions[middle:], decisions[:middle]]
        if not adopted:
            break
        differing = [number for number in differing if (number in kept) != (number in wished)]
    vertices = plan.order or graph.vertices
    checkpoints = graph.in_order(vertices[number] for number in kept)
    candidate = CheckpointPlan(checkpoints, plan.order, keeps_last_segment=False)
    return candidate if joint.profile(candidate).peak_bytes <= max_bytes else plan


def _model_in_order(problem: CheckpointProblem, order: Sequence[Vertex]) -> tuple[StepModel, dict[Vertex, int]]:
    """The step in an order of the vertices (the graph's own if it is empty), and each vertex's position."""
    joint, vertices = problem.joint(), order or problem.graph.vertices
    step = joint.step_in(order) if order else joint.step
    return step_model(step, joint.members, vertices), {vertex: n for n, vertex in enumerate(vertices)}
