"""Peaks of plans whose updates wait for the last reader of their parameters.

The search may recompute an operator after the update of a parameter that it reads. In the file the update and
its gradient then wait, which may need more memory than the search assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from onnxgc.api.budget_plans import BudgetRequest, BudgetSolution, FrontierPoint
from onnxgc.budget.from_step import problem_of
from onnxgc.planning.plan import Objective, Solution, Status, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import Schedule
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import solver_for

# Seconds for the default solver's plan, in addition to the search.
_MAX_SECONDS = 5.0


def with_runtime_peaks(
    found: BudgetSolution,
    request: BudgetRequest,
    problem: CheckpointProblem,
    durations: Mapping[str, int],
    options: SolverOptions,
    run: Callable[[Solution], tuple[Schedule, int]],
) -> BudgetSolution:
    """Replaces assumed peaks by the files' peaks. `run` returns a plan's schedule and peak.

    If a peak is higher than the search assumed, the best of all plans is chosen, including the default
    solver's and the baseline's.
    """
    solutions = [found.solution, *(point.solution for point in found.frontier)]
    peaks = [run(solution)[1] for solution in solutions]
    if all(peak <= solution.objective_bytes for peak, solution in zip(peaks, solutions, strict=True)):
        return found
    known = [_with_peak(solution, peak) for solution, peak in zip(solutions, peaks, strict=True)]
    step_problem = problem_of(problem.joint().step, durations)
    duration = {
        name: operation.duration
        for name, operation in zip(step_problem.names, step_problem.problem.operators, strict=True)
    }
    limit = min(_MAX_SECONDS, options.time_limit_seconds or _MAX_SECONDS)
    plain = replace(options, time_limit_seconds=limit, objective=None)
    for solver in ("store-all", None):
        solution = solver_for(solver).solve(problem, plain)
        schedule, peak = run(solution)
        ran = sum(duration[step_problem.names[index]] for index in step_problem.sequence_of(schedule))
        regular = step_problem.problem.duration
        known.append(
            replace(
                found.solution,
                plan=solution.plan,
                status=Status.FEASIBLE,
                objective=Objective.TIME,
                objective_bytes=peak,
                time=TimeCost(regular, ran - regular, 0),
            )
        )
    frontier = tuple(
        FrontierPoint(point.budget_bytes, best)
        for point in found.frontier
        if (best := _fastest(known, point.budget_bytes)) is not None
    )
    budget = request.budget
    if budget is None or budget.is_least:
        most = None if budget is None else budget.max_extra
        within = [s for s in known if most is None or s.time is None or s.time.extra <= most * s.time.regular]
        chosen: Solution | None = min(within or known, key=lambda s: (s.objective_bytes, _extra(s)))
    else:
        regular_peak = known[-2].objective_bytes
        chosen = _fastest(known, budget.bytes_of(regular_peak))
    return replace(found, solution=chosen or known[0], frontier=frontier)


def _with_peak(solution: Solution, peak: int) -> Solution:
    if peak <= solution.objective_bytes:
        return solution
    return replace(solution, objective_bytes=peak, status=Status.FEASIBLE)


def _fastest(solutions: list[Solution], most_bytes: int) -> Solution | None:
    fitting = [solution for solution in solutions if solution.objective_bytes <= most_bytes]
    return min(fitting, key=lambda s: (_extra(s), s.objective_bytes), default=None)


def _extra(solution: Solution) -> int:
    return 0 if solution.time is None else solution.time.extra
