"""Answers for steps that replace parameters: what a plan needs once each update waits for its last reader.

The search lets an operator run again behind the update of what it reads. As the file runs, that update and
the gradient that it reads wait, which may take more memory than the search knew of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from onnxgc.api.budgeting import BudgetRequest, BudgetSolution, FrontierPoint
from onnxgc.budget.from_step import problem_of
from onnxgc.planning.plan import Objective, Solution, Status, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import Schedule
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import solver_for

# What the default solver may take for another plan, beside the search.
_MOST_SECONDS = 5.0


def with_runtime_peaks(
    answer: BudgetSolution,
    request: BudgetRequest,
    problem: CheckpointProblem,
    durations: Mapping[str, int],
    options: SolverOptions,
    run: Callable[[Solution], tuple[Schedule, int]],
) -> BudgetSolution:
    """The answer with the peaks of what runs, which is `run` of a plan: its schedule and its peak.

    Where that takes a plan above what it was found for, the best of all that were found takes its place, the
    default solver's plan and storing everything among them.
    """
    found = [answer.solution, *(point.solution for point in answer.frontier)]
    peaks = [run(solution)[1] for solution in found]
    if all(peak <= solution.objective_bytes for peak, solution in zip(peaks, found, strict=True)):
        return answer
    known = [_at(solution, peak) for solution, peak in zip(found, peaks, strict=True)]
    posed = problem_of(problem.joint().step, durations)
    duration = {
        name: operation.duration
        for name, operation in zip(posed.names, posed.problem.operations, strict=True)
    }
    limit = min(_MOST_SECONDS, options.time_limit_seconds or _MOST_SECONDS)
    plain = replace(options, time_limit_seconds=limit, objective=None)
    for solver in ("store-all", None):
        solution = solver_for(solver).solve(problem, plain)
        schedule, peak = run(solution)
        ran = sum(duration[posed.names[index]] for index in posed.sequence_of(schedule))
        regular = posed.problem.duration
        known.append(
            replace(
                answer.solution,
                plan=solution.plan,
                status=Status.FEASIBLE,
                objective=Objective.TIME,
                objective_bytes=peak,
                time=TimeCost(regular, ran - regular, 0),
            )
        )
    frontier = tuple(
        FrontierPoint(point.budget_bytes, best)
        for point in answer.frontier
        if (best := _quickest(known, point.budget_bytes)) is not None
    )
    budget = request.budget
    if budget is None or budget.is_least:
        most = None if budget is None else budget.most_extra
        within = [s for s in known if most is None or s.time is None or s.time.extra <= most * s.time.regular]
        chosen: Solution | None = min(within or known, key=lambda s: (s.objective_bytes, _extra(s)))
    else:
        regular_peak = known[-2].objective_bytes
        chosen = _quickest(known, budget.bytes_of(regular_peak))
    return replace(answer, solution=chosen or known[0], frontier=frontier)


def _at(solution: Solution, peak: int) -> Solution:
    if peak <= solution.objective_bytes:
        return solution
    return replace(solution, objective_bytes=peak, status=Status.FEASIBLE)


def _quickest(solutions: list[Solution], most_bytes: int) -> Solution | None:
    fitting = [solution for solution in solutions if solution.objective_bytes <= most_bytes]
    return min(fitting, key=lambda s: (_extra(s), s.objective_bytes), default=None)


def _extra(solution: Solution) -> int:
    return 0 if solution.time is None else solution.time.extra
