"""Least extra time under a memory budget: any operator may run again, as often as it helps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from onnxgc.budget.bounds.peak_bound import PeakBound, floor_of_problem
from onnxgc.budget.from_step import StepProblem, problem_of
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import (
    DEFAULT_TIME_LIMIT_SECONDS,
    NoSequence,
    SearchOptions,
    within_budget,
)
from onnxgc.errors import BudgetError, PlanError
from onnxgc.planning.plan import CheckpointPlan, Objective, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import StepGraph
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.peak.solver import PEAK

PEAK_SECONDS = 10.0
"""What the solver `peak` may take for a plan to begin with."""
_SHARE_OF_PEAK = 0.3
"""The same as a share of the time limit."""
_LEAST_PEAK_SECONDS = 3.0
"""The same where nothing else was found, however short the limit is: else there is no plan in the end."""
MOST_NAMED = 4
"""Tensors that a refusal names."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The sequence of `onnxgc.budget.search` as a plan.

    Raises:
        PlanError: there is no budget.
        BudgetError: no plan fits it; the message names the floor and what sets it.
    """
    if options.budget_bytes is None:
        raise PlanError("the solver 'budget' needs --budget, such as 8GiB or 60%")
    step = problem.joint().step
    posed = problem_of(step, options.durations or step_flops(step))
    started = time.perf_counter()
    number = {name: index for index, name in enumerate(posed.names)}
    known = [[number[name] for name in names] for names in options.sequences]
    found = within_budget(posed.problem, options.budget_bytes, search_options(options), known)
    floor = floor_of_problem(posed.problem)
    if isinstance(found, NoSequence) and not found.impossible:
        options.tell("planning: the least peak with one more forward")
        known = plans_of_least_peak(problem, posed, options, _LEAST_PEAK_SECONDS)
        limit = options.time_limit_seconds
        if limit is not None:
            left = limit - (time.perf_counter() - started)
            options = replace(options, time_limit_seconds=max(_SHARE_OF_PEAK * limit, left))
        found = within_budget(posed.problem, options.budget_bytes or 0, search_options(options), known)
    if isinstance(found, NoSequence):
        raise BudgetError(why_none(posed, step, options.budget_bytes or 0, floor))
    return Finding(
        plan_of(problem, step, posed, found.sequence),
        found.status,
        floor.size,
        floor_operator(posed, floor),
        TimeCost(posed.problem.duration, found.extra, found.lower_bound),
        found.interrupted,
    )


def plans_of_least_peak(
    problem: CheckpointProblem, posed: StepProblem, options: SolverOptions, least_seconds: float = 0.0
) -> list[list[int]]:
    """The plan of the solver `peak` as a sequence, where its order of operators can be told by name.

    It takes a share of the time limit, but `least_seconds` where it needs them.
    """
    joint = problem.joint()
    limit = options.time_limit_seconds
    share = PEAK_SECONDS if limit is None else max(least_seconds, _SHARE_OF_PEAK * limit)
    seconds = min(PEAK_SECONDS, share)
    plan = PEAK.solve(problem, SolverOptions(time_limit_seconds=seconds)).plan
    _, schedule = joint.scheduled(plan)
    sequence = posed.sequence_of(schedule)
    try:
        simulate_sequence(posed.problem, sequence)
    except ValueError:
        # In another order of forward, gradients are added up by other operators.
        return []
    return [sequence]


def step_flops(step: StepGraph) -> dict[str, int]:
    """Floating-point operations in place of time, and one for each operator that has none."""
    operators = (*step.forward, *(operator for chunk in step.chunks for operator in chunk))
    return {operator.name: 0 if operator.is_view else operator.flops + 1 for operator in operators}


def search_options(options: SolverOptions) -> SearchOptions:
    """What the search needs to know of a solver's options."""
    limit = options.time_limit_seconds
    if limit is None and options.most_rounds is None:
        limit = DEFAULT_TIME_LIMIT_SECONDS
    return SearchOptions(
        order=options.order,
        time_limit_seconds=limit,
        most_rounds=options.most_rounds,
        seed=options.seed,
        tell=options.tell,
    )


def plan_of(
    problem: CheckpointProblem, step: StepGraph, posed: StepProblem, sequence: Iterable[int]
) -> CheckpointPlan:
    """The plan that runs a sequence; its checkpoints are the vertices that never run again."""
    names = posed.names_of(tuple(sequence))
    seen: set[str] = set()
    again = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    operators = (*step.forward, *(operator for chunk in step.chunks for operator in chunk))
    made_again = {tensor for operator in operators if operator.name in again for tensor in operator.outputs}
    members = problem.joint().members
    kept = (vertex for vertex in problem.graph.vertices if made_again.isdisjoint(members[vertex]))
    return CheckpointPlan(tuple(kept), keeps_last_segment=False, sequence=names)


def floor_operator(posed: StepProblem, floor: PeakBound) -> str:
    """The name of the operator that sets the floor; none where it is what the step returns."""
    return "" if floor.size <= floor.kept_size else posed.names[floor.operator]


def why_none(posed: StepProblem, step: StepGraph, budget_bytes: int, floor: PeakBound) -> str:
    """One line: what is needed at least, which operator needs it, and what would help."""
    name = floor_operator(posed, floor)
    if floor.size <= budget_bytes:
        at = f"at '{name}'" if name else "what the step returns"
        return (
            f"no plan within {budget_bytes:,} bytes was found; nothing goes below {floor.size:,} ({at}); "
            "give more memory or --time-limit, or use --budget min for the least that is found"
        )
    if not name:
        return (
            f"no plan fits {budget_bytes:,} bytes: what the step returns (parameters' gradients and the "
            f"like) takes {floor.kept_size:,}; --freeze for fewer gradients or float16 would lower that"
        )
    operators = (*step.forward, *(operator for chunk in step.chunks for operator in chunk))
    operator = next(operator for operator in operators if operator.name == name)
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor not in step.resident]
    largest = sorted(dict.fromkeys(tensors), key=lambda tensor: -step.sizes[tensor])[:MOST_NAMED]
    listed = ", ".join(f"'{tensor}' {step.sizes[tensor]:,}" for tensor in largest)
    beside = floor.size - floor.own_size
    held = f" beside {beside:,} bytes that must stay (parameters' gradients and the like)" if beside else ""
    return (
        f"no plan fits {budget_bytes:,} bytes: operator '{name}' needs {floor.size:,} bytes{held}: {listed}; "
        "a smaller batch (--input-shapes), --freeze for fewer gradients, or float16 would lower that"
    )


BUDGET = Solver(
    name="budget",
    summary="least extra time under --budget: any operator may run again, with a proven bound",
    search=search,
    objectives=(Objective.TIME,),
    exact_for=None,
    takes_budget=True,
    automatic=False,
)
