"""Plan a model by a solver, within a budget, or by a given plan."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction

from onnxgc.api.budget_plans import (
    DEFAULT_EXTRA_TIME,
    DEFAULT_SECONDS,
    BudgetRequest,
    BudgetSolution,
    FrontierPoint,
    plan_for_request,
    regular_peak_bytes,
)
from onnxgc.api.device_memory import DeviceMemory
from onnxgc.api.planned_step import PlannedStep, schedule_solution, trace_problem
from onnxgc.budget.from_step import problem_of
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import compile_repairs
from onnxgc.errors import BudgetError, PlanError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.planning.deadline import FIRST_PLAN_SHARE, Deadline
from onnxgc.planning.memory_budget import Budget
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, Status, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import Schedule
from onnxgc.planning.schedule_from_sequence import StepOperators
from onnxgc.planning.sequence_transfer import transferred_sequence
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.budget_solver import sequence_of_plan
from onnxgc.solvers.registry import solver_for
from onnxgc.tracing.checkpoint_problem import TracedProblem
from onnxgc.tracing.optimizers import Optimizer

# Solvers whose plans are used even if they raise the peak.
_UNCONDITIONAL = ("manual", "store-all")
# Seconds for the default solver's plan, in addition to a search with a budget.
_MAX_SECONDS = 5.0
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
    if chosen.name not in _UNCONDITIONAL and Objective.PEAK not in chosen.objectives and planned.raises_the_peak:
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
    traced: TracedProblem,
    request: BudgetRequest,
    options: SolverOptions,
    timed: tuple[dict[str, int], str, str] | None = None,
) -> PlannedStep:
    """Plan a traced model with the least extra time within a budget; `timed` are `request.durations`, if known.

    Raises:
        BudgetError: no plan fits.
        DurationError: the device is unknown, or the calibration file is not valid.
    """
    durations, timing, note = timed or request.durations(traced.step)
    updates = traced.step.updates
    if request.device_bytes is not None:
        request = replace(request, budget=DeviceMemory.of_step(traced.step).budget_within(request.device_bytes))
    elif updates is not None and request.budget is not None:
        request = replace(request, budget=replace(request.budget, reserved_bytes=updates.state_bytes))
    budgeted = plan_for_request(request, traced.problem, durations, options)
    if updates is not None:

        def run(solution: Solution) -> tuple[Schedule, int]:
            planned = schedule_solution(model, traced, solution)
            return planned.schedule, planned.profile.peak_bytes

        budgeted = with_runtime_peaks(budgeted, request, traced.problem, durations, options, run)
    solution = budgeted.solution
    planned = schedule_solution(model, traced, solution)
    budget = request.budget
    # The baseline of the plan has other columns on CUDA than that of the search.
    is_limited = budget is not None and not budget.is_least
    limit = budget.bytes_of(regular_peak_bytes(traced.problem)) if budget and is_limited else None
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
        frontier=budgeted.frontier,
        order_alone_peak_bytes=budgeted.order_alone_peak_bytes,
    )


def plan_quickly(
    model: TrainableModel, traced: TracedProblem, request: BudgetRequest, options: SolverOptions
) -> PlannedStep:
    """Plan a traced model without a budget: the least peak found within a moderate extra time, in seconds.

    The search starts with the plan of the solver `peak`, whose extra time is allowed in any case: that of
    recomputing once what is not a checkpoint.
    """
    # Without a limit, the solver `peak` takes as long as it needs.
    given, problem = Deadline(options.time_limit_seconds), traced.problem
    timed = request.durations(traced.step)
    durations = timed[0]
    step_problem = problem_of(problem.joint().step, durations)
    with ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(compile_repairs, options.progress)
        first = solver_for(None).solve(problem, SolverOptions(time_limit_seconds=given.share(FIRST_PLAN_SHARE)))
        compiling.result()
    sequence = sequence_of_plan(problem, step_problem, first.plan)
    is_start = sequence is not None and request.order.allows(sequence)
    if sequence is not None and is_start and request.budget is not None:
        duration = step_problem.problem.duration
        extra = simulate_sequence(step_problem.problem, sequence).duration - duration
        most = max(request.budget.max_extra or 0, Fraction(extra, max(duration, 1)))
        request = replace(request, budget=replace(request.budget, max_extra=Fraction(most)))
        options = replace(options, sequences=(step_problem.names_of(sequence),))
    left = DEFAULT_SECONDS if given.limit is None else given.left()
    planned = plan_within(model, traced, request, replace(options, time_limit_seconds=left), timed)
    planned = replace(planned, solution=replace(planned.solution, seconds=given.elapsed()))
    if not is_start:
        # In another order than the search's.
        other = schedule_solution(model, traced, first, planned)
        if other.profile.peak_bytes < planned.profile.peak_bytes:
            extra = sum(durations[run.source] for run in other.schedule.recomputed)
            solution = replace(
                planned.solution,
                plan=first.plan,
                solver=first.solver,
                status=Status.FEASIBLE,
                objective_bytes=other.profile.peak_bytes,
                time=TimeCost(step_problem.problem.duration, extra, 0),
            )
            most = Fraction(extra, max(step_problem.problem.duration, 1))
            budget = Budget(max_extra=max(most, DEFAULT_EXTRA_TIME))
            allowed = replace(planned.request, budget=budget)
            return replace(other, solution=solution, request=allowed, timing=planned.timing)
    return planned


def step_with_plan(
    model: TrainableModel,
    plan: CheckpointPlan,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
    is_transferable: bool = True,
) -> PlannedStep:
    """Trace a model and apply a plan to its training step; `is_transferable` as in `traced_step_with_plan`.

    Raises:
        PlanError: the plan contains a name that is not a tensor of the model, or it was made with an
            optimizer, and there is none.
    """
    if optimizer is None and any("/update/" in name for name in plan.sequence):
        raise PlanError("the plan was made with an optimizer; give the same one (--optimizer)")
    traced = trace_problem(model, keep_outputs, optimizer)
    try:
        return traced_step_with_plan(model, traced, plan, is_transferable=is_transferable)
    except PlanError as error:
        raise PlanError(
            f"{error}; `onnxgc compare` transfers it to another file of the same network (--plan, --carry-over)"
        ) from error


def traced_step_with_plan(
    model: TrainableModel,
    traced: TracedProblem,
    plan: CheckpointPlan,
    like: PlannedStep | None = None,
    *,
    is_transferable: bool = True,
) -> PlannedStep:
    """As `step_with_plan`, for a traced model; `like` as in `schedule_solution`.

    A transferable sequence is applied to a step with other operators of backward as well.
    """
    graph = traced.problem.graph
    notes: tuple[str, ...] = ()
    try:
        if plan.sequence:
            kept = graph.in_order(set(plan.checkpoints).intersection(graph.vertices))
            step_graph = traced.step.graph
            is_other = set(plan.sequence) != set(StepOperators.from_step(step_graph).operators)
            if is_transferable and is_other:
                sequence = transferred_sequence(plan.sequence, step_graph)
                if sequence is not None:
                    plan = replace(plan, sequence=sequence, checkpoints=kept)
                    notes = ("the plan was made for other shapes or another provider, and is applied to these",)
        else:
            kept = CheckpointPlan.for_graph(graph, plan.checkpoints).checkpoints
        if plan.order and set(plan.order) != set(graph.vertices):
            raise PlanError("the plan's order does not contain the model's tensors; make a plan for this model")
        options = SolverOptions(kept, Objective.PEAK)
        solution = solver_for("manual").solve(traced.problem, options)
        planned = schedule_solution(model, traced, replace(solution, plan=plan), like)
    except PlanError as error:
        raise PlanError(
            f"{error}; a plan is valid for the model and the shapes it was made for (--input-shapes), under "
            "a budget also for the provider (--provider)"
        ) from error
    # The solver reads the checkpoints only.
    evaluated = replace(planned.solution, solver="plan", objective_bytes=planned.profile.peak_bytes)
    return replace(planned, solution=evaluated, notes=(*planned.notes, *notes))


def with_runtime_peaks(
    planned: BudgetSolution,
    request: BudgetRequest,
    problem: CheckpointProblem,
    durations: Mapping[str, int],
    options: SolverOptions,
    run: Callable[[Solution], tuple[Schedule, int]],
) -> BudgetSolution:
    """Replaces assumed peaks by the files' peaks. `run` returns a plan's schedule and peak.

    The search may recompute an operator after the update of a parameter that it reads. In the file the update
    and its gradient then wait, which may need more memory. If a peak is higher than the search assumed, the
    best of all plans is chosen, including the default solver's and the baseline's.
    """
    solutions = [planned.solution, *(point.solution for point in planned.frontier)]
    known = [_with_peak(solution, run(solution)[1]) for solution in solutions]
    if known == solutions:
        return planned
    step_problem = problem_of(problem.joint().step, durations)
    baseline_time, operators = step_problem.problem.duration, step_problem.problem.operators
    limit = min(_MAX_SECONDS, options.time_limit_seconds or _MAX_SECONDS)
    plain = replace(options, time_limit_seconds=limit, objective=None)
    for solver in ("store-all", None):
        solution = solver_for(solver).solve(problem, plain)
        schedule, peak = run(solution)
        time = sum(operators[index].duration for index in step_problem.sequence_of(schedule))
        known.append(
            replace(
                planned.solution,
                plan=solution.plan,
                status=Status.FEASIBLE,
                objective=Objective.TIME,
                objective_bytes=peak,
                time=TimeCost(baseline_time, time - baseline_time, 0),
            )
        )
    frontier = tuple(
        FrontierPoint(point.budget_bytes, best)
        for point in planned.frontier
        if (best := _fastest(known, point.budget_bytes)) is not None
    )
    budget = request.budget
    if budget is None or budget.is_least:
        most = None if budget is None else budget.max_extra
        within = [s for s in known if most is None or s.time is None or s.time.extra <= most * s.time.regular]
        chosen: Solution | None = min(within or known, key=lambda s: (s.objective_bytes, _extra(s)))
    else:
        chosen = _fastest(known, budget.bytes_of(known[-2].objective_bytes))
    return replace(planned, solution=chosen or known[0], frontier=frontier)


def _with_peak(solution: Solution, peak: int) -> Solution:
    if peak <= solution.objective_bytes:
        return solution
    return replace(solution, objective_bytes=peak, status=Status.FEASIBLE)


def _fastest(solutions: list[Solution], most_bytes: int) -> Solution | None:
    fitting = [solution for solution in solutions if solution.objective_bytes <= most_bytes]
    return min(fitting, key=lambda s: (_extra(s), s.objective_bytes), default=None)


def _extra(solution: Solution) -> int:
    return 0 if solution.time is None else solution.time.extra
