"""Plans under a memory budget for a traced step: one budget, the least one, or the whole trade-off."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.from_step import StepProblem, problem_of
from onnxgc.budget.least_peak import least_peak
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS, BudgetedSequence
from onnxgc.budget.trade_off import trade_off
from onnxgc.errors import PlanError
from onnxgc.planning.memory_budget import Budget, budget_asked
from onnxgc.planning.order import Order
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, Status, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.runtime.calibration_run import calibration_in
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.budget import BUDGET, floor_operator, plan_of, plans_of_least_peak, search_options
from onnxgc.tracing.devices import Device
from onnxgc.tracing.devices import device as find_device
from onnxgc.tracing.durations import durations_ns
from onnxgc.tracing.step_graph import TrainingStep

DEFAULT_DEVICE = "a100"
"""Whose times count where neither a device nor a calibration is given."""
FRONTIER_POINTS = 12
"""Budgets of a trade-off, the least and the regular peak included."""
_SHARE_OF_ORDER = 0.1
"""Of the time limit, what the search for the best order without recomputation takes."""
_SHARE_OF_FRONTIER = 0.7
"""Of the time limit, what a trade-off takes where a budget is asked for beside it."""
_SHARE_OF_LEAST = 0.4
"""Of the time limit of a trade-off, what the search for the least peak takes."""


@dataclass(frozen=True, slots=True)
class BudgetRequest:
    """What a user asked for about memory and time; nothing, if there is neither budget nor trade-off."""

    budget: Budget | None = None
    pareto: bool = False
    order: Order = Order.FREE
    device: Device | None = None
    calibrate: str | None = None

    @classmethod
    def of(
        cls,
        budget: str | float | None,
        *,
        extra_time: str | float | None = None,
        pareto: bool,
        order: str,
        device: str | None,
        calibrate: str | os.PathLike[str] | None,
        solver: str | None,
        objective: Objective | None,
    ) -> BudgetRequest:
        """Check what was given before anything is read.

        Raises:
            BudgetFormError: the budget is not written as one.
            PlanError: options that do not go together.
            DurationError: there is no such device.
        """
        request = cls(
            budget_asked(budget, extra_time),
            pareto,
            Order.named(order),
            None if device is None else find_device(device),
            None if calibrate is None else os.fspath(calibrate),
        )
        if request.is_asked and solver == "manual":
            raise PlanError("--checkpoints says what to keep, a budget how much to hold; drop one of them")
        if request.is_asked and objective is not None:
            raise PlanError(f"--objective {objective.value} does not go with a budget; drop one of them")
        if request.is_asked and solver not in (None, BUDGET.name):
            raise PlanError(
                f"--budget and --pareto have the solver '{BUDGET.name}', not '{solver}'; leave --solver out"
            )
        if solver == BUDGET.name and not request.is_asked:
            raise PlanError(f"the solver '{BUDGET.name}' needs --budget, such as 8GiB or 60%")
        check_times(device, calibrate)
        return request

    @property
    def is_asked(self) -> bool:
        return self.budget is not None or self.pareto

    def durations(self, step: TrainingStep) -> tuple[dict[str, int], str, str]:
        """Times of all operators in nanoseconds, what they are taken from, and a note on it or ""."""
        if self.calibrate is not None:
            timing, note = calibration_in(self.calibrate, step)
            return durations_ns(step, timing), f"measured, kept in '{self.calibrate}'", note
        chosen = self.device or find_device(DEFAULT_DEVICE)
        return durations_ns(step, chosen), f"data sheet of {chosen.name}", ""


def check_times(device: str | None, calibrate: str | os.PathLike[str] | None) -> None:
    """Refuses times from two places, and a device that there is not.

    Raises:
        PlanError, DurationError: which of these.
    """
    if device is not None and calibrate is not None:
        raise PlanError("--device and --calibrate both say where times come from; give one of them")
    if device is not None:
        find_device(device)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One budget of a trade-off and the plan for it."""

    budget_bytes: int
    solution: Solution


@dataclass(frozen=True, slots=True)
class BudgetSolution:
    """The plan that was asked for, and the trade-off where that was too.

    `order_alone_peak_bytes` is the lowest peak found without any recomputation, by the order of operators
    alone; in fixed order there is no other.
    """

    solution: Solution
    frontier: tuple[FrontierPoint, ...]
    order_alone_peak_bytes: int | None


def answer_to(
    request: BudgetRequest,
    problem: CheckpointProblem,
    durations: Mapping[str, int],
    options: SolverOptions,
) -> BudgetSolution:
    """What was asked for, within one time limit.

    Without a budget the plan is that of the least peak in the trade-off.

    Raises:
        BudgetError: no plan fits.
    """
    started = time.perf_counter()
    options = with_default_limit(options)
    limit, budget = options.time_limit_seconds, request.budget
    order_alone = None
    if request.order is Order.FREE:
        order, order_alone = _order_alone(problem, durations, options)
        options = replace(options, sequences=(*options.sequences, order))
    frontier: tuple[FrontierPoint, ...] = ()
    if request.pareto:
        share = 1.0 if budget is None or budget == Budget() else _SHARE_OF_FRONTIER
        spent = time.perf_counter() - started
        left = None if limit is None else max(0.0, share * limit - spent)
        first = replace(options, time_limit_seconds=left)
        frontier = frontier_of(problem, durations, first)
    interrupted = any(point.solution.interrupted for point in frontier)
    if frontier and (budget is None or budget == Budget()):
        solution = frontier[-1].solution
    else:
        assert budget is not None, "there is a budget or a trade-off"
        spent = time.perf_counter() - started
        left = None if limit is None else max(0.0, limit - spent)
        options = replace(options, time_limit_seconds=0.0 if interrupted else left)
        solution = solution_within(problem, budget, durations, options, frontier)
    seconds = time.perf_counter() - started
    solution = replace(solution, seconds=seconds, interrupted=interrupted or solution.interrupted)
    return BudgetSolution(solution, frontier, order_alone)


def _order_alone(
    problem: CheckpointProblem, durations: Mapping[str, int], options: SolverOptions
) -> tuple[tuple[str, ...], int]:
    """Operators once each, in the order of the lowest peak that was found, and that peak."""
    # Imported here: it brings the compiler along.
    from onnxgc.budget.improve.local_moves import order_of_least_peak
    from onnxgc.budget.search import compile_loops

    compile_loops(options.tell)
    options.tell("planning: the order alone")
    limit = options.time_limit_seconds
    end = math.inf if limit is None else time.perf_counter() + _SHARE_OF_ORDER * limit
    posed = problem_of(problem.joint().step, durations)
    order = order_of_least_peak(posed.problem, lambda: time.perf_counter() >= end, options.seed)
    return posed.names_of(order), simulate_sequence(posed.problem, order).peak


def with_default_limit(options: SolverOptions) -> SolverOptions:
    """The options with the search's own time limit where nothing else ends it."""
    if options.time_limit_seconds is None and options.most_rounds is None:
        return replace(options, time_limit_seconds=DEFAULT_TIME_LIMIT_SECONDS)
    return options


def solution_within(
    problem: CheckpointProblem,
    budget: Budget,
    durations: Mapping[str, int],
    options: SolverOptions,
    frontier: Sequence[FrontierPoint] = (),
) -> Solution:
    """The plan of least extra time within a budget, or of the least peak found.

    A `frontier` that was found before gives plans to begin with.

    Raises:
        BudgetError: no plan fits.
    """
    if budget.is_least:
        return _of_least_peak(
            problem, problem_of(problem.joint().step, durations), options, budget.most_extra
        )
    regular = regular_peak_bytes(problem)
    within = replace(options, budget_bytes=budget.bytes_of(regular), durations=durations, objective=None)
    known = (*options.sequences, *(point.solution.plan.sequence for point in frontier))
    return BUDGET.solve(problem, replace(within, sequences=known))


def frontier_of(
    problem: CheckpointProblem, durations: Mapping[str, int], options: SolverOptions
) -> tuple[FrontierPoint, ...]:
    """Plans from the regular peak down to the least that is found, at `FRONTIER_POINTS` budgets."""
    started = time.perf_counter()
    posed = problem_of(problem.joint().step, durations)
    limit = options.time_limit_seconds
    first = replace(options, time_limit_seconds=None if limit is None else _SHARE_OF_LEAST * limit)
    least = _of_least_peak(problem, posed, first)
    regular, lowest = regular_peak_bytes(problem), least.objective_bytes
    steps = FRONTIER_POINTS - 1
    budgets = [lowest + (regular - lowest) * number // steps for number in range(FRONTIER_POINTS)]
    left = None if limit is None else max(0.0, limit - (time.perf_counter() - started))
    if least.interrupted:
        left = 0.0
    number = {name: index for index, name in enumerate(posed.names)}
    known = [[number[name] for name in least.plan.sequence]]
    points = trade_off(
        posed.problem, budgets, search_options(replace(options, time_limit_seconds=left)), known
    )
    return tuple(
        FrontierPoint(point.budget, _solution(problem, posed, point.found, least)) for point in points
    )


def _of_least_peak(
    problem: CheckpointProblem,
    posed: StepProblem,
    options: SolverOptions,
    most_extra: Fraction | None = None,
) -> Solution:
    """The least peak found; `most_extra` limits the extra time, as a share of the regular."""
    started = time.perf_counter()
    floor = floor_of_problem(posed.problem)
    options.tell("planning: a first plan")
    known = plans_of_least_peak(problem, posed, options)
    limit = options.time_limit_seconds
    if limit is not None:
        left = max(0.0, limit - (time.perf_counter() - started))
        options = replace(options, time_limit_seconds=left)
    most = None if most_extra is None else int(most_extra * posed.problem.duration)
    least = least_peak(posed.problem, floor.size, search_options(options), known, most)
    found = least.found
    solution = Solution(
        CheckpointPlan(()),
        BUDGET.name,
        found.status,
        Objective.TIME,
        found.peak,
        least.floor,
        found.seconds,
        floor_operator(posed, floor) if least.floor <= floor.size else "",
    )
    solved = _solution(problem, posed, found, solution)
    return solved if found.peak <= least.floor else replace(solved, status=Status.FEASIBLE)


def _solution(
    problem: CheckpointProblem, posed: StepProblem, found: BudgetedSequence, like: Solution
) -> Solution:
    return replace(
        like,
        plan=plan_of(problem, problem.joint().step, posed, found.sequence),
        status=found.status,
        objective_bytes=found.peak,
        seconds=found.seconds,
        time=TimeCost(posed.problem.duration, found.extra, found.lower_bound),
        interrupted=found.interrupted or like.interrupted,
    )


def regular_peak_bytes(problem: CheckpointProblem) -> int:
    """Simulated peak of the step that stores everything."""
    stored = CheckpointPlan(problem.graph.vertices, keeps_last_segment=False)
    return problem.joint().profile(stored).peak_bytes
