"""Plan a model by a solver, within a budget, or by a given plan."""

from __future__ import annotations

from dataclasses import replace

from onnxgc.api.budget_plans import BudgetRequest, plan_for_request
from onnxgc.api.delayed_update_peaks import with_runtime_peaks
from onnxgc.api.planned_step import PlannedStep, schedule_solution, trace_problem
from onnxgc.errors import BudgetError, PlanError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution
from onnxgc.planning.schedule import Schedule
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import solver_for
from onnxgc.tracing.checkpoint_problem import TracedProblem
from onnxgc.tracing.optimizers import Optimizer

# Solvers whose plans are used even if they raise the peak.
_UNCONDITIONAL = ("manual", "store-all")
_INTERRUPTED = "the search was interrupted; this is the best plan found"


def plan_step(
    model: TrainableModel,
    solver: str | None = None,
    options: SolverOptions | None = None,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> PlannedStep:
    """Trace a model and plan its training step by a solver, by default the one for the objective.

    If a plan for the paper's objective raises the simulated peak, the baseline replaces it, with a note.

    Raises:
        PlanError: unknown solver or checkpoint, or the solver does not support the objective.
    """
    options = options or SolverOptions()
    chosen = solver_for(solver, options.objective)
    traced = trace_problem(model, keep_outputs, optimizer)
    named = tuple(traced.vertex(str(name)) for name in options.checkpoints)
    solution = chosen.solve(traced.problem, replace(options, checkpoints=named))
    planned = schedule_solution(model, traced, solution)
    if (
        chosen.name not in _UNCONDITIONAL
        and Objective.PEAK not in chosen.objectives
        and planned.raises_the_peak
    ):
        # The paper's objective ignores part of the memory that the simulator counts.
        stored = schedule_solution(model, traced, solver_for("store-all").solve(traced.problem, options))
        note = (
            f"the plan of '{chosen.name}' would raise the peak, so the baseline is used: "
            f"{planned.profile.peak_bytes:,} bytes, baseline {planned.regular_profile.peak_bytes:,}"
        )
        return replace(stored, notes=(*stored.notes, note))
    return planned


def plan_within(
    model: TrainableModel,
    request: BudgetRequest,
    options: SolverOptions,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> PlannedStep:
    """Trace a model and plan its training step with the least extra time within a budget.

    Raises:
        BudgetError: no plan fits.
        DurationError: the device is unknown, or the calibration file is not valid.
    """
    return plan_traced_within(model, trace_problem(model, keep_outputs, optimizer), request, options)


def plan_traced_within(
    model: TrainableModel, traced: TracedProblem, request: BudgetRequest, options: SolverOptions
) -> PlannedStep:
    """As `plan_within`, for a traced model."""
    durations, timing, note = request.durations(traced.step)
    updates = traced.step.updates
    if updates is not None and request.budget is not None:
        request = replace(request, budget=replace(request.budget, reserved_bytes=updates.state_bytes))
    found = plan_for_request(request, traced.problem, durations, options)
    if updates is not None:

        def run(solution: Solution) -> tuple[Schedule, int]:
            planned = schedule_solution(model, traced, solution)
            return planned.schedule, planned.profile.peak_bytes

        found = with_runtime_peaks(found, request, traced.problem, durations, options, run)
    solution = found.solution
    planned = schedule_solution(model, traced, solution)
    budget, regular = request.budget, planned.regular_profile.peak_bytes
    limit = None if budget is None or budget.is_least else budget.bytes_of(regular)
    if limit is not None and planned.profile.peak_bytes > limit:
        assert updates is not None, "without updates the schedule has the peak of the plan"
        raise BudgetError(
            f"no plan was found within {limit:,} bytes, excluding optimizer state: updates wait for the last "
            f"reader of a parameter, so the peak is {planned.profile.peak_bytes:,}; give more memory"
        )
    return replace(
        planned,
        notes=(*planned.notes, *filter(None, [note, _INTERRUPTED if solution.interrupted else ""])),
        request=request,
        budget_bytes=limit,
        timing=timing,
        frontier=found.frontier,
        order_alone_peak_bytes=found.order_alone_peak_bytes,
    )


def step_with_plan(
    model: TrainableModel,
    plan: CheckpointPlan,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> PlannedStep:
    """Trace a model and apply a plan to its training step.

    Raises:
        PlanError: the plan contains a name that is not a tensor of the model.
    """
    try:
        return traced_step_with_plan(model, trace_problem(model, keep_outputs, optimizer), plan)
    except PlanError as error:
        if optimizer is None and any("/update/" in name for name in plan.sequence):
            raise PlanError("the plan was made with an optimizer; give the same one (--optimizer)") from error
        raise PlanError(
            f"{error}; `onnxgc compare` transfers it to another file of the same network "
            "(--plan, --carry-over)"
        ) from error


def traced_step_with_plan(
    model: TrainableModel, traced: TracedProblem, plan: CheckpointPlan, like: PlannedStep | None = None
) -> PlannedStep:
    """As `step_with_plan`, for a traced model; `like` as in `schedule_solution`."""
    try:
        return _traced_step_with_plan(model, traced, plan, like)
    except PlanError as error:
        raise PlanError(
            f"{error}; a plan is valid for the model and the shapes it was made for (--input-shapes)"
        ) from error


def _traced_step_with_plan(
    model: TrainableModel, traced: TracedProblem, plan: CheckpointPlan, like: PlannedStep | None
) -> PlannedStep:
    if plan.sequence:
        kept = traced.problem.graph.in_order(plan.checkpoints)
        known = CheckpointPlan(kept, keeps_last_segment=False, sequence=plan.sequence)
    else:
        known = CheckpointPlan.for_graph(traced.problem.graph, plan.checkpoints)
    if plan.order and set(plan.order) != set(traced.problem.graph.vertices):
        raise PlanError("the plan's order does not contain the model's tensors; make a plan for this model")
    options = SolverOptions(known.checkpoints, Objective.PEAK)
    solution = solver_for("manual").solve(traced.problem, options)
    planned = schedule_solution(model, traced, replace(solution, plan=plan), like)
    # The solver reads the checkpoints only.
    found = replace(planned.solution, solver="plan", objective_bytes=planned.profile.peak_bytes)
    return replace(planned, solution=found)
