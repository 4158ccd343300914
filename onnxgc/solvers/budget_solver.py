"""Least extra time under a memory budget: any operator may be recomputed any number of times."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from onnxgc.budget.bounds.peak_bound import PeakBound, floor_of_problem
from onnxgc.budget.from_step import StepProblem, problem_of
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS, NoSequence, SearchOptions, within_budget
from onnxgc.errors import BudgetError, PlanError
from onnxgc.planning.deadline import FIRST_PLAN_SHARE, Deadline
from onnxgc.planning.plan import CheckpointPlan, Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import StepGraph
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.peak.cut_search import PEAK

PEAK_SECONDS = 10.0
"""Time limit of the solver `peak` for an initial plan, if its share of the time limit is not less."""
_MIN_PEAK_SECONDS = 3.0
"""Its least time if no other plan was found: without it a short time limit leaves no plan at all."""
MAX_LISTED = 4
"""Number of tensors that an error message lists."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise the extra time within `options.budget_bytes` (`onnxgc.budget.search`).

    The search is anytime: it improves a plan and a lower bound until they meet or the limit is reached.

    Args:
        problem: a problem with a joint graph, sizes in bytes.
        options: `budget_bytes` is required; `durations`, `order`, `time_limit_seconds`, `max_rounds`, `seed`
            and `sequences` are used.

    Raises:
        PlanError: there is no budget.
        BudgetError: no plan fits the budget; the message names the least budget and its operator.
    """
    budget = options.budget_bytes
    if budget is None:
        raise PlanError("the solver 'budget' needs --budget, such as 8GiB or 60%")
    step = problem.joint().step
    step_problem = problem_of(step, options.durations or step_flops(step))
    deadline = Deadline(options.time_limit_seconds)
    number = {name: index for index, name in enumerate(step_problem.names)}
    known = [[number[name] for name in names] for names in options.sequences]
    best = within_budget(step_problem.problem, budget, search_options(options), known)
    floor = floor_of_problem(step_problem.problem)
    if isinstance(best, NoSequence) and not best.impossible:
        options.progress("planning: the least peak with one more forward")
        known = plans_of_least_peak(problem, step_problem, options, _MIN_PEAK_SECONDS)
        left, share = deadline.left(), deadline.share(FIRST_PLAN_SHARE)
        if left is not None and share is not None:
            options = replace(options, time_limit_seconds=max(share, left))
        best = within_budget(step_problem.problem, budget, search_options(options), known)
    if isinstance(best, NoSequence):
        raise BudgetError(infeasibility_message(step_problem, step, budget, floor))
    return Finding(
        plan_of(problem, step, step_problem, best.sequence),
        best.status,
        floor.size,
        floor_operator(step_problem, floor),
        best.time,
        best.interrupted,
    )


def plans_of_least_peak(
    problem: CheckpointProblem, step_problem: StepProblem, options: SolverOptions, min_seconds: float = 0.0
) -> list[list[int]]:
    """The plan of the solver `peak` as a sequence, if the step has the same operators in its order.

    The solver gets a share of the time limit, and at least `min_seconds`.
    """
    share = Deadline(options.time_limit_seconds).share(FIRST_PLAN_SHARE)
    seconds = PEAK_SECONDS if share is None else min(PEAK_SECONDS, max(min_seconds, share))
    plan = PEAK.solve(problem, SolverOptions(time_limit_seconds=seconds)).plan
    sequence = sequence_of_plan(problem, step_problem, plan)
    return [] if sequence is None else [sequence]


def sequence_of_plan(problem: CheckpointProblem, step_problem: StepProblem, plan: CheckpointPlan) -> list[int] | None:
    """A plan of checkpoints as a sequence; None if its step has other operators than the problem's."""
    _, schedule = problem.joint().scheduled(plan)
    sequence = step_problem.sequence_of(schedule)
    try:
        simulate_sequence(step_problem.problem, sequence)
    except ValueError:
        # In another order of forward, other operators accumulate the gradients.
        return None
    return sequence


def step_flops(step: StepGraph) -> dict[str, int]:
    """Floating-point operations of each operator plus 1, as durations; views count 0."""
    return {operator.name: 0 if operator.is_view else operator.flops + 1 for operator in step.operators}


def search_options(options: SolverOptions) -> SearchOptions:
    """The options of `onnxgc.budget.search` that correspond to a solver's options."""
    limit = options.time_limit_seconds
    if limit is None and options.max_rounds is None:
        limit = DEFAULT_TIME_LIMIT_SECONDS
    return SearchOptions(
        order=options.order,
        time_limit_seconds=limit,
        max_rounds=options.max_rounds,
        seed=options.seed,
        progress=options.progress,
    )


def plan_of(
    problem: CheckpointProblem, step: StepGraph, step_problem: StepProblem, sequence: Iterable[int]
) -> CheckpointPlan:
    """The plan of a sequence; its checkpoints are the vertices that are never recomputed."""
    names = step_problem.names_of(tuple(sequence))
    repeated = {name for name, count in Counter(names).items() if count > 1}
    recomputed = {tensor for operator in step.operators if operator.name in repeated for tensor in operator.outputs}
    members = problem.joint().members
    kept = (vertex for vertex in problem.graph.vertices if recomputed.isdisjoint(members[vertex]))
    return CheckpointPlan(tuple(kept), keeps_last_segment=False, sequence=names)


def floor_operator(step_problem: StepProblem, floor: PeakBound) -> str:
    """The operator that sets the lower bound; empty if the step's outputs do."""
    return "" if floor.size <= floor.kept_size else step_problem.names[floor.operator]


def infeasibility_message(step_problem: StepProblem, step: StepGraph, budget_bytes: int, floor: PeakBound) -> str:
    """One line: the least budget, the operator that sets it, and remedies."""
    name = floor_operator(step_problem, floor)
    if floor.size <= budget_bytes:
        at = f"at '{name}'" if name else "the step's outputs"
        return (
            f"no plan within {budget_bytes:,} bytes was found; no plan is below {floor.size:,} ({at}); "
            "give more memory or --time-limit, or use --budget min for the least peak that is found"
        )
    if not name:
        return (
            f"no plan fits {budget_bytes:,} bytes: the step's outputs (such as parameter gradients) take "
            f"{floor.kept_size:,}; --freeze for fewer gradients or float16 would lower that"
        )
    operator = next(operator for operator in step.operators if operator.name == name)
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor not in step.resident]
    largest = sorted(dict.fromkeys(tensors), key=lambda tensor: -step.sizes[tensor])[:MAX_LISTED]
    listed = ", ".join(f"'{tensor}' {step.sizes[tensor]:,}" for tensor in largest)
    other_bytes = floor.size - floor.own_size
    # Tensors that are needed later and cannot be recomputed.
    others = f", {other_bytes:,} of them for others such as parameter gradients" if other_bytes else ""
    return (
        f"no plan fits {budget_bytes:,} bytes: "
        f"operator '{name}' needs {floor.size:,} bytes{others} ({listed}); "
        "a smaller batch (--input-shapes), --freeze for fewer gradients, or float16 would lower that"
    )


BUDGET = Solver(
    name="budget",
    summary="least extra time under --budget: any operator may be recomputed, with a proven bound",
    search=search,
    objectives=(Objective.TIME,),
    takes_budget=True,
    automatic=False,
)
