"""The form of MaxPool's gradients that needs less memory: with indices of forward, or by windows without them."""

from dataclasses import replace

from onnxgc.api.planned_step import PlannedStep, trace_problem
from onnxgc.api.step_planning import traced_step_with_plan
from onnxgc.errors import PlanError
from onnxgc.gradients.pooling import BY_WINDOWS, by_windows
from onnxgc.model.core.ir import TrainableModel
from onnxgc.planning.plan import CheckpointPlan, Objective, Status

INDICES, WINDOWS = "indices", "windows"
_NOTE = "MaxPool's gradients compare windows in place of storing indices, which needs less memory"


def pools_of(model: TrainableModel) -> str:
    """The form of a model's MaxPool gradients, as the option that reads it."""
    return WINDOWS if any(node.rule == BY_WINDOWS for node in model.nodes) else INDICES


def with_least_pools(planned: PlannedStep) -> PlannedStep:
    """The plan in the form by windows, if its peak is lower there; both forms have the same gradients.

    The baseline stays that of the planned form, and the time of comparing windows is extra time. A plan within
    given bytes keeps its form, since it has the least time.
    """
    changed = by_windows(planned.model)
    counts_peak = planned.solution.objective in (Objective.PEAK, Objective.TIME) and planned.budget_bytes is None
    if not counts_peak or planned.model.provider != "cpu" or changed.nodes == planned.model.nodes:
        return planned
    updates, solution = planned.step.updates, planned.solution
    traced = trace_problem(changed, planned.step.keeps_outputs, None if updates is None else updates.optimizer)
    known = set(traced.problem.graph.vertices)
    plan = solution.plan
    plan = replace(
        plan,
        checkpoints=tuple(name for name in plan.checkpoints if name in known),
        order=tuple(name for name in plan.order if name in known),
    )
    try:
        other = traced_step_with_plan(changed, traced, plan)
    except PlanError:
        return planned
    peak = other.profile.peak_bytes
    if peak >= planned.profile.peak_bytes:
        return planned
    time, budget = solution.time, planned.request.budget
    if time is not None:
        whole = sum(planned.request.durations(other.traced.step)[0].values())
        time = replace(time, extra=time.extra + max(0, whole - time.regular))
        if budget is not None and budget.max_extra is not None and time.extra > budget.max_extra * time.regular:
            return planned
    lowest = min(solution.lower_bound_bytes, peak)
    found: CheckpointPlan = other.solution.plan
    return replace(
        planned,
        model=changed,
        step=other.step,
        traced=traced,
        solution=replace(
            solution, plan=found, status=Status.FEASIBLE, objective_bytes=peak, lower_bound_bytes=lowest, time=time
        ),
        schedule=other.schedule,
        profile=other.profile,
        notes=(*planned.notes, _NOTE),
    )
