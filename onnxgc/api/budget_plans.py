"""Plans for a traced step within a budget, at the lowest peak, or along the trade-off."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from onnxgc.api.device_memory import parse_device_memory
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.from_step import StepProblem, problem_of
from onnxgc.budget.least_peak import least_peak, quick_least_peak
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS, BudgetedSequence
from onnxgc.budget.trade_off import trade_off
from onnxgc.errors import PlanError
from onnxgc.planning.deadline import LEAST_PEAK_SHARE, REORDERING_SHARE, TRADE_OFF_END, Deadline
from onnxgc.planning.memory_budget import Budget, parse_budget_options
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.runtime.calibrate import calibration_in
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.budget_solver import BUDGET, floor_operator, plan_of, plans_of_least_peak, search_options
from onnxgc.tracing.devices import Device
from onnxgc.tracing.devices import device as find_device
from onnxgc.tracing.durations import durations_ns
from onnxgc.tracing.step_graph import TrainingStep

DEFAULT_DEVICE = "a100"
"""Source of durations on CUDA without a device or a calibration."""
DEFAULT_EXTRA_TIME = Fraction(1, 5)
"""Extra time that a plan without options may take, as a share of the baseline's time."""
DEFAULT_SECONDS = 10.0
"""Time limit of the search without options."""
FRONTIER_POINTS = 12
"""Budgets of a trade-off, including the lowest peak found and the baseline's."""


@dataclass(frozen=True, slots=True)
class BudgetRequest:
    """A user's request for a budget or a trade-off, or neither.

    `is_quick`: the search of `optimize` without options. `device_bytes` is the whole memory of a device, in
    place of a budget.
    """

    budget: Budget | None = None
    pareto: bool = False
    order: Order = Order.FREE
    device: Device | None = None
    calibrate: str | None = None
    is_quick: bool = False
    device_bytes: int | None = None
    is_order_given: bool = False

    @classmethod
    def from_options(
        cls,
        budget: str | float | None,
        extra_time: str | float | None = None,
        *,
        pareto: bool = False,
        order: str | None,
        device: str | None,
        calibrate: str | os.PathLike[str] | None = None,
        device_memory: str | float | None = None,
    ) -> "BudgetRequest":
        """The request of options as `onnxgc.optimize` takes them.

        Raises:
            BudgetFormError: the budget is not valid.
            PlanError: the order is unknown, or there are two sources of durations.
            DurationError: the device is unknown.
        """
        if device is not None and calibrate is not None:
            raise PlanError("--device and --calibrate are both sources of durations; give one of them")
        if device_memory is not None and (budget is not None or extra_time is not None):
            raise PlanError("--device-memory is a budget for the whole device; leave out --budget and --extra-time")
        return cls(
            parse_budget_options(budget, extra_time),
            pareto,
            Order.FREE if order is None else Order.named(order),
            None if device is None else find_device(device),
            None if calibrate is None else os.fspath(calibrate),
            is_order_given=order is not None,
            device_bytes=None if device_memory is None else parse_device_memory(device_memory),
        )

    def as_default(self) -> "BudgetRequest":
        """The request of `optimize` without options: the least peak within a moderate extra time.

        The order is the model's unless another is given: sessions with default settings keep more of the
        saving in it.
        """
        order = self.order if self.is_order_given else Order.FIXED
        return replace(self, budget=Budget(max_extra=DEFAULT_EXTRA_TIME), order=order, is_quick=True)

    @property
    def is_requested(self) -> bool:
        return self.budget is not None or self.pareto or self.device_bytes is not None

    def durations(self, step: TrainingStep) -> tuple[dict[str, int], str, str]:
        """Durations of all operators in nanoseconds, their source, and a note on it or ""."""
        if self.calibrate is not None:
            timing, note = calibration_in(self.calibrate, step)
            return durations_ns(step, timing), f"measured, kept in '{self.calibrate}'", note
        chosen = self.device or find_device("cpu" if step.model.provider == "cpu" else DEFAULT_DEVICE)
        return durations_ns(step, chosen), f"data sheet of {chosen.name}", ""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget of a trade-off and its plan."""

    budget_bytes: int
    solution: Solution


@dataclass(frozen=True, slots=True)
class BudgetSolution:
    """The requested plan, and the trade-off if requested.

    `order_alone_peak_bytes` is the lowest peak found by reordering only; None in fixed order.
    """

    solution: Solution
    frontier: tuple[FrontierPoint, ...]
    order_alone_peak_bytes: int | None


def plan_for_request(
    request: BudgetRequest, problem: CheckpointProblem, durations: Mapping[str, int], options: SolverOptions
) -> BudgetSolution:
    """The requested plans, within one time limit.

    Without a budget the plan is that of the lowest peak in the trade-off.

    Raises:
        BudgetError: no plan fits.
    """
    if request.is_quick:
        return BudgetSolution(quick_solution(request, problem, durations, options), (), None)
    options = with_default_limit(options)
    if request.order is Order.FREE:
        # Imported here, since it imports the compiler; the time limit excludes compilation.
        from onnxgc.budget.search import compile_loops

        compile_loops(options.progress)
    deadline, budget = Deadline(options.time_limit_seconds), request.budget
    order_alone = None
    if request.order is Order.FREE:
        order, order_alone = _reordering_only(problem, durations, options)
        options = replace(options, sequences=(*options.sequences, order))
    frontier: tuple[FrontierPoint, ...] = ()
    if request.pareto:
        end = 1.0 if budget is None or budget == Budget() else TRADE_OFF_END
        first = replace(options, time_limit_seconds=deadline.left(end))
        frontier = frontier_of(problem, durations, first)
    interrupted = any(point.solution.interrupted for point in frontier)
    if frontier and (budget is None or budget == Budget()):
        solution = frontier[-1].solution
    else:
        assert budget is not None, "there is a budget or a trade-off"
        options = replace(options, time_limit_seconds=0.0 if interrupted else deadline.left())
        solution = solution_within(problem, budget, durations, options, frontier)
    solution = replace(solution, seconds=deadline.elapsed(), interrupted=interrupted or solution.interrupted)
    return BudgetSolution(solution, frontier, order_alone)


def quick_solution(
    request: BudgetRequest, problem: CheckpointProblem, durations: Mapping[str, int], options: SolverOptions
) -> Solution:
    """The plan of the least peak found within the extra time, by a search from `options.sequences`."""
    step_problem = problem_of(problem.joint().step, durations)
    options = replace(options, order=request.order)
    return _least_peak_solution(
        problem, step_problem, options, request.budget.max_extra if request.budget else None, is_quick=True
    )


def _reordering_only(
    problem: CheckpointProblem, durations: Mapping[str, int], options: SolverOptions
) -> tuple[tuple[str, ...], int]:
    """Each operator once, in the order of the lowest peak found, and that peak."""
    # Imported here, since it imports the compiler.
    from onnxgc.budget.improve.local_moves import order_of_least_peak

    options.progress("planning: reordering only")
    deadline = Deadline(options.time_limit_seconds).phase(REORDERING_SHARE)
    step_problem = problem_of(problem.joint().step, durations)
    order = order_of_least_peak(step_problem.problem, deadline.is_over, options.seed)
    return step_problem.names_of(order), simulate_sequence(step_problem.problem, order).peak


def with_default_limit(options: SolverOptions) -> SolverOptions:
    """The options with the default time limit if nothing else ends the search."""
    if options.time_limit_seconds is None and options.max_rounds is None:
        return replace(options, time_limit_seconds=DEFAULT_TIME_LIMIT_SECONDS)
    return options


def solution_within(
    problem: CheckpointProblem,
    budget: Budget,
    durations: Mapping[str, int],
    options: SolverOptions,
    frontier: Sequence[FrontierPoint] = (),
) -> Solution:
    """The plan of least extra time within a budget, or of the lowest peak found.

    The search starts with the plans of a `frontier`.

    Raises:
        BudgetError: no plan fits.
    """
    if budget.is_least:
        return _least_peak_solution(problem, problem_of(problem.joint().step, durations), options, budget.max_extra)
    known = (*options.sequences, *(point.solution.plan.sequence for point in frontier))
    limit = budget.bytes_of(regular_peak_bytes(problem))
    within = replace(options, budget_bytes=limit, durations=durations, objective=None, sequences=known)
    return BUDGET.solve(problem, within)


def frontier_of(
    problem: CheckpointProblem, durations: Mapping[str, int], options: SolverOptions
) -> tuple[FrontierPoint, ...]:
    """Plans at `FRONTIER_POINTS` budgets, from the baseline's peak down to the lowest found."""
    deadline = Deadline(options.time_limit_seconds)
    step_problem = problem_of(problem.joint().step, durations)
    first = replace(options, time_limit_seconds=deadline.share(LEAST_PEAK_SHARE))
    least = _least_peak_solution(problem, step_problem, first)
    highest, lowest = regular_peak_bytes(problem), least.objective_bytes
    steps = FRONTIER_POINTS - 1
    budgets = [lowest + (highest - lowest) * number // steps for number in range(FRONTIER_POINTS)]
    left = 0.0 if least.interrupted else deadline.left()
    number = {name: index for index, name in enumerate(step_problem.names)}
    known = [[number[name] for name in least.plan.sequence]]
    points = trade_off(step_problem.problem, budgets, search_options(replace(options, time_limit_seconds=left)), known)
    return tuple(FrontierPoint(point.budget, _solution(problem, step_problem, point.best, least)) for point in points)


def _least_peak_solution(
    problem: CheckpointProblem,
    step_problem: StepProblem,
    options: SolverOptions,
    max_extra: Fraction | None = None,
    *,
    is_quick: bool = False,
) -> Solution:
    """The plan of the lowest peak found; `max_extra` limits the extra time, as a share of the baseline's.

    A quick search starts with `options.sequences` alone.
    """
    deadline = Deadline(options.time_limit_seconds)
    floor = floor_of_problem(step_problem.problem)
    most = None if max_extra is None else int(max_extra * step_problem.problem.duration)
    if is_quick:
        number = {name: index for index, name in enumerate(step_problem.names)}
        known = [[number[name] for name in names] for names in options.sequences]
        least = quick_least_peak(step_problem.problem, floor.size, search_options(options), known, most)
    else:
        options.progress("planning: a first plan")
        known = plans_of_least_peak(problem, step_problem, options)
        options = replace(options, time_limit_seconds=deadline.left())
        least = least_peak(step_problem.problem, floor.size, search_options(options), known, most)
    sequence = least.best
    solution = Solution(
        CheckpointPlan(()),
        BUDGET.name,
        sequence.status,
        Objective.TIME,
        sequence.peak,
        least.floor,
        sequence.seconds,
        floor_operator(step_problem, floor) if least.floor <= floor.size else "",
    )
    solved = _solution(problem, step_problem, sequence, solution)
    return solved if sequence.peak <= least.floor else replace(solved, status=Status.FEASIBLE)


def _solution(
    problem: CheckpointProblem, step_problem: StepProblem, sequence: BudgetedSequence, like: Solution
) -> Solution:
    return replace(
        like,
        plan=plan_of(problem, problem.joint().step, step_problem, sequence.sequence),
        status=sequence.status,
        objective_bytes=sequence.peak,
        seconds=sequence.seconds,
        time=sequence.time,
        interrupted=sequence.interrupted or like.interrupted,
    )


def regular_peak_bytes(problem: CheckpointProblem) -> int:
    """Simulated peak of the baseline."""
    stored = CheckpointPlan(problem.graph.vertices, keeps_last_segment=False)
    return problem.joint().profile(stored).peak_bytes
