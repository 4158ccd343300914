"""Checkpoints of a bare graph, and sequences of a bare operator graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from onnxgc.budget.bounds.peak_bound import PeakBound, floor_of_problem
from onnxgc.budget.least_peak import least_peak
from onnxgc.budget.operator_graph_file import OperatorGraphFile, read_operator_graph
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS, NoSequence, SearchOptions, ignore_progress, within_budget
from onnxgc.errors import BudgetError, PlanError
from onnxgc.graph.graph_file import read_graph_file
from onnxgc.planning.memory_budget import Budget, parse_budget_options
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import Objective, Status, parse_objective
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.solvers.base import DEFAULT_DRAWS, SolverOptions
from onnxgc.solvers.registry import solver_for


def solve_graph(
    path: str | os.PathLike[str],
    *,
    solver: str | None = None,
    objective: str | None = None,
    checkpoints: Sequence[str] | None = None,
    interior_only: bool = False,
    time_limit: float | None = None,
    seed: int = 0,
    slots: int | None = None,
    draws: int | None = None,
) -> dict[str, Any]:
    """Find checkpoints for a graph file; the result is ready for JSON, with sizes in the file's unit.

    Args:
        path: a file as `onnxgc.graph.graph_file` describes it.
        solver: name of a solver; None for the default of the objective.
        objective: `paper` (the default), `general` or `peak`. The peak is that of
            `onnxgc.planning.joint_graph.joint_of_bare_graph`.
        checkpoints: identifiers of the vertices to keep, as text; selects the solver `manual`.
        interior_only: exclude source and target, which are always kept, from the result.
        time_limit: seconds for the search.
        seed: random seed.
        slots: states that the solver `revolve` may store at once.
        draws: valid sets that the solver `random` compares, by default 10.

    Raises:
        GraphFileError: the file is not a graph of the required form.
        PlanError: unknown solver or checkpoint, or the solver does not apply to this graph.
    """
    wanted = parse_objective(objective)
    chosen = solver_for(solver, wanted or Objective.PAPER)
    _check_solver_options(chosen.name, solver, checkpoints, slots, draws)
    file = read_graph_file(path)
    ends = {file.source, file.target} if interior_only else set()
    # The sum always includes the ends. The peak does not, so for it their size is 0.
    measured = (wanted or chosen.objectives[0]) in (Objective.PEAK, Objective.ACTIVATIONS)
    weightless = ends if measured else set()
    sizes = {vertex: 0 if vertex in weightless else size for vertex, size in file.sizes.items()}
    problem = CheckpointProblem(file.graph, {vertex: TensorCost(size) for vertex, size in sizes.items()})
    identifier = {str(vertex): vertex for vertex in file.graph.vertices}
    kept = tuple(identifier.get(text, text) for text in checkpoints or ())
    options = SolverOptions(kept, wanted, time_limit, seed, DEFAULT_DRAWS if draws is None else draws, slots)
    solution = (solver_for("manual") if checkpoints is not None else chosen).solve(problem, options)

    end_size = sum(sizes[vertex] for vertex in ends)
    return {
        "solver": solution.solver,
        "status": solution.status.value,
        "objective": file.in_file_units(solution.objective_bytes - end_size),
        "lower_bound": file.in_file_units(solution.lower_bound_bytes - end_size),
        "checkpoints": [vertex for vertex in solution.plan.checkpoints if vertex not in ends],
        "seconds": solution.seconds,
    }


def _check_solver_options(
    chosen: str, solver: str | None, checkpoints: Sequence[str] | None, slots: int | None, draws: int | None
) -> None:
    if solver == "manual" and checkpoints is None:
        raise PlanError("the solver 'manual' needs --checkpoints a,b,c")
    if checkpoints is not None and solver not in (None, "manual"):
        raise PlanError(f"--checkpoints selects the solver 'manual', not '{solver}'; leave one of them out")
    if draws is not None and chosen != "random":
        raise PlanError(f"--draws applies to the solver 'random', not '{chosen}'; leave it out")
    if slots is not None and chosen != "revolve":
        raise PlanError(f"--slots applies to the solver 'revolve', not '{chosen}'; leave it out")


def solve_operator_graph(
    path: str | os.PathLike[str],
    *,
    budget: str | float | None = None,
    extra_time: str | float | None = None,
    order: str = Order.FREE.value,
    time_limit: float | None = DEFAULT_TIME_LIMIT_SECONDS,
    step_limit: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The sequence of least duration under a memory budget for an operator graph; ready for JSON.

    Figures are in the file's units. `overhead` is the extra duration as a share of the baseline's,
    `lower_bound` that on the duration, `gap` the distance between the two as a share of the whole duration,
    and `gap_of_extra` as a share of the extra duration.

    Args:
        path: a file as `onnxgc.budget.operator_graph_file` describes it.
        budget: a size in the file's unit (`4.5`, `12`), a share of the peak in node order (`.8`, `80%`), or
            `min`.
        extra_time: a share of the baseline's duration; the lowest peak within it, in place of a budget.
        order: `free`, or `fixed` for the order of the file.
        time_limit: seconds for the search; None for no limit, with a `step_limit`.
        step_limit: rounds of the search; then the result depends on the seed only.
        seed: random seed.
        progress: callback that receives the stage, the best extra time found, and the lower bound.

    Raises:
        GraphFileError: the file is not of the required form.
        BudgetFormError: the budget is not valid.
        BudgetError: no sequence fits, or none was found.
    """
    if budget is None and extra_time is None:
        raise PlanError("an operator graph needs --budget, such as .8, or --extra-time, such as 10%")
    chosen_order = Order.named(order)
    file = read_operator_graph(path)
    wanted = parse_budget_options(budget, extra_time, file.size_scale)
    assert wanted is not None, "one of the two is given"
    options = SearchOptions(chosen_order, time_limit, step_limit, seed, progress=progress or ignore_progress)
    return _search(file, wanted, options)


def _search(file: OperatorGraphFile, budget: Budget, options: SearchOptions) -> dict[str, Any]:
    problem, size, duration = file.problem, file.size_scale, file.duration_scale
    baseline, floor = simulate_sequence(problem, range(len(problem))), floor_of_problem(problem)
    limit, lowest = None, floor.size
    if budget.is_least:
        most = None if budget.max_extra is None else int(budget.max_extra * problem.duration)
        least = least_peak(problem, floor.size, options, max_extra=most)
        found, lowest = least.best, least.floor
        # Optimal in time, and in peak as well.
        status = found.status if found.peak <= lowest else Status.FEASIBLE
    else:
        limit = budget.bytes_of(baseline.peak)
        result = within_budget(problem, limit, options)
        if isinstance(result, NoSequence):
            raise BudgetError(_no_sequence_text(file, limit, floor))
        found, status = result, result.status
    time = found.time
    return {
        "solver": "budget",
        "status": status.value,
        "order": options.order.value,
        "budget": None if limit is None else _in_units(limit, size),
        "sequence": [file.nodes[index] for index in found.sequence],
        "peak": _in_units(found.peak, size),
        "duration": _in_units(found.duration, duration),
        "overhead": time.extra_ratio,
        "lower_bound": _in_units(time.regular + time.lower_bound, duration),
        "gap": time.gap,
        "gap_of_extra": time.gap_of_extra,
        "floor": _in_units(lowest, size),
        "regular": {"peak": _in_units(baseline.peak, size), "duration": _in_units(problem.duration, duration)},
        "seconds": found.seconds,
    }


def _no_sequence_text(file: OperatorGraphFile, limit: int, floor: PeakBound) -> str:
    node = file.nodes[floor.operator]
    needed, given = _in_units(floor.size, file.size_scale), _in_units(limit, file.size_scale)
    is_kept = floor.size <= floor.kept_size
    if floor.size > limit and is_kept:
        return f"no sequence fits {given}: unread outputs are kept, {needed} in total; give at least that"
    if floor.size > limit:
        operation = file.problem.operators[floor.operator]
        touched = sorted((*operation.reads, *operation.writes), key=lambda s: -file.problem.sizes[s])[:4]
        named = ", ".join(
            f"{file.nodes[storage]!r} {_in_units(file.problem.sizes[storage], file.size_scale)}" for storage in touched
        )
        return f"no sequence fits {given}: node {node!r} alone needs {needed}: {named}; give at least that"
    at = "outputs that are kept" if is_kept else f"node {node!r}"
    return (
        f"no sequence within {given} was found; lower bound {needed} ({at}); "
        "give more memory or --time-limit, or use --budget min for the lowest peak found"
    )


def _in_units(value: int, scale: int) -> int | float:
    return value // scale if value % scale == 0 else value / scale
