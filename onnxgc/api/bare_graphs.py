"""Checkpoints of a bare graph, and sequences of a bare operator graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxgc.budget.bounds.peak_bound import PeakBound, floor_of_problem
from onnxgc.budget.least_peak import least_peak
from onnxgc.budget.operator_graph_file import OperatorGraphFile, parse_operator_graph
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS, NoSequence, SearchOptions, ignore_progress, within_budget
from onnxgc.errors import BudgetError, PlanError
from onnxgc.graph.graph_file import GraphFile, parse_graph
from onnxgc.graph.graph_sources import forward_document, graph_document
from onnxgc.planning.memory_budget import Budget, parse_budget_options
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan, Objective, Status, parse_objective
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.report.html.notebook_curve import curve_html
from onnxgc.solvers.base import DEFAULT_DRAWS, PlanSearch, SolverOptions
from onnxgc.solvers.registry import solver_for


@dataclass(frozen=True, repr=False)
class GraphSolution:
    """The result of `solve`.

    Attributes:
        report: the figures in the graph's units, as `onnxgc solve` prints them.
        live: live size while each operator runs, under the plan and under the baseline.
    """

    report: dict[str, Any]
    live: tuple[Sequence[float], Sequence[float]]

    def memory_curve(self, baseline: bool = False) -> npt.NDArray[np.float64]:
        """Live size at each run of an operator, in the graph's units: [runs]."""
        return np.array(self.live[baseline], np.float64)

    def __repr__(self) -> str:
        return f"<GraphSolution of {self.report['solver']}, {self.report['status']}: peak {self.report['peak']:,}>"

    def _repr_html_(self) -> str:
        return curve_html(repr(self), self.memory_curve(), self.memory_curve(baseline=True))


def solve(
    graph: Any,
    *,
    budget: str | float | None = None,
    extra_time: str | float | None = None,
    order: str | None = None,
    solver: str | PlanSearch | None = None,
    objective: str | None = None,
    checkpoints: Sequence[Any] | None = None,
    interior_only: bool = False,
    time_limit: float | None = None,
    step_limit: int | None = None,
    seed: int = 0,
    slots: int | None = None,
    draws: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> GraphSolution:
    """Plan a bare graph: checkpoints of a forward graph, or with a budget a sequence of an operator graph.

    With a budget the report's `overhead` is the extra duration as a share of the baseline's, `lower_bound`
    that on the duration, `gap` the distance between the two as a share of the whole duration, and
    `gap_of_extra` as a share of the extra duration.

    Args:
        graph: a networkx.DiGraph, a dictionary or JSON file as `onnxgc.graph.graph_sources` describes them,
            or a graph of Checkmate or Moccasin.
        budget: a size in the graph's unit (`4.5`, `12`), a share of the peak in node order (`.8`, `80%`), or
            `min`: the sequence of least duration within it.
        extra_time: a share of the baseline's duration; the lowest peak within it, in place of a budget.
        order: with a budget `free` (the default), or `fixed` for the order of the graph.
        solver: name of a solver, or an object as `onnxgc.solvers.base.PlanSearch` describes it; None for the
            default of the objective.
        objective: `paper` (the default), `general` or `peak`. The peak is that of
            `onnxgc.planning.joint_graph.joint_of_bare_graph`.
        checkpoints: identifiers of the vertices to keep; selects the solver `manual`.
        interior_only: exclude source and target, which are always kept, from the result.
        time_limit: seconds for the search; by default 30 with a budget.
        step_limit: rounds of the search with a budget; then the result depends on the seed only.
        seed: random seed.
        slots: states that the solver `revolve` may store at once.
        draws: valid sets that the solver `random` compares, by default 10.
        progress: callback that receives the stage; with a budget also the best extra time and the lower bound.

    Raises:
        GraphFileError: the graph is not of a known form.
        PlanError: unknown solver or checkpoint, an option that does not apply, or a solver that does not
            apply to this graph.
        BudgetFormError: the budget is not valid.
        BudgetError: no sequence fits, or none was found.

    >>> import networkx
    >>> chain = networkx.path_graph(5, networkx.DiGraph)
    >>> networkx.set_node_attributes(chain, 3, "size")
    >>> solve(chain).report["checkpoints"]
    [0, 2, 4]
    """
    notify = progress or ignore_progress
    if budget is None and extra_time is None:
        only_with_budget = {"--order": order, "--step-limit": step_limit}
        _refuse(only_with_budget, "needs --budget, such as --budget .8")
        file = parse_graph(forward_document(graph_document(graph)))
        return _checkpoints(file, solver, objective, checkpoints, interior_only, time_limit, seed, slots, draws)
    only_for_checkpoints = {
        "--objective": objective,
        "--solver": None if solver == "budget" else solver,
        "--checkpoints": checkpoints,
        "--interior-only": interior_only or None,
        "--slots": slots,
        "--draws": draws,
    }
    _refuse(only_for_checkpoints, "applies to checkpoints of a forward graph; drop it or --budget")
    chosen_order = Order.FREE if order is None else Order.named(order)
    operators = parse_operator_graph(graph_document(graph))
    wanted = parse_budget_options(budget, extra_time, operators.size_scale)
    assert wanted is not None, "one of the two is given"
    if time_limit is None and step_limit is None:
        time_limit = DEFAULT_TIME_LIMIT_SECONDS
    return _search(operators, wanted, SearchOptions(chosen_order, time_limit, step_limit, seed, progress=notify))


def _refuse(options: Mapping[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise PlanError(f"{option} {why}")


def _checkpoints(
    file: GraphFile,
    solver: str | PlanSearch | None,
    objective: str | None,
    checkpoints: Sequence[Any] | None,
    interior_only: bool,
    time_limit: float | None,
    seed: int,
    slots: int | None,
    draws: int | None,
) -> GraphSolution:
    wanted = parse_objective(objective)
    chosen = solver_for(solver, wanted or Objective.PAPER)
    _check_solver_options(chosen.name, solver, checkpoints, slots, draws)
    ends = {file.source, file.target} if interior_only else set()
    # The sum always includes the ends. The peak does not, so for it their size is 0.
    measured = (wanted or chosen.objectives[0]) in (Objective.PEAK, Objective.ACTIVATIONS)
    weightless = ends if measured else set()
    sizes = {vertex: 0 if vertex in weightless else size for vertex, size in file.sizes.items()}
    problem = CheckpointProblem(file.graph, {vertex: TensorCost(size) for vertex, size in sizes.items()})
    identifier = {str(vertex): vertex for vertex in file.graph.vertices}
    kept = tuple(identifier.get(str(vertex), vertex) for vertex in (() if checkpoints is None else checkpoints))
    options = SolverOptions(kept, wanted, time_limit, seed, DEFAULT_DRAWS if draws is None else draws, slots)
    solution = (solver_for("manual") if checkpoints is not None else chosen).solve(problem, options)

    end_size = sum(sizes[vertex] for vertex in ends)
    plans = (solution.plan, CheckpointPlan(file.graph.vertices))
    profiles = [problem.joint().profile(plan) for plan in plans]
    report = {
        "solver": solution.solver,
        "status": solution.status.value,
        "objective": file.in_file_units(solution.objective_bytes - end_size),
        "lower_bound": file.in_file_units(solution.lower_bound_bytes - end_size),
        "peak": file.in_file_units(profiles[0].peak_bytes),
        "sum": file.in_file_units(paper_objective(problem, solution.plan).total_bytes - end_size),
        "checkpoints": [vertex for vertex in solution.plan.checkpoints if vertex not in ends],
        "seconds": solution.seconds,
    }
    curves = [[size / file.scale for size in profile.timeline] for profile in profiles]
    return GraphSolution(report, (curves[0], curves[1]))


def _check_solver_options(
    chosen: str, solver: Any, checkpoints: Sequence[Any] | None, slots: int | None, draws: int | None
) -> None:
    if solver == "manual" and checkpoints is None:
        raise PlanError("the solver 'manual' needs --checkpoints a,b,c")
    if checkpoints is not None and solver not in (None, "manual"):
        raise PlanError(f"--checkpoints selects the solver 'manual', not '{chosen}'; leave one of them out")
    if draws is not None and chosen != "random":
        raise PlanError(f"--draws applies to the solver 'random', not '{chosen}'; leave it out")
    if slots is not None and chosen != "revolve":
        raise PlanError(f"--slots applies to the solver 'revolve', not '{chosen}'; leave it out")


def _search(file: OperatorGraphFile, budget: Budget, options: SearchOptions) -> GraphSolution:
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
    timelines = (simulate_sequence(problem, found.sequence).timeline, baseline.timeline)
    report = {
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
    curves = [[live / size for live in timeline] for timeline in timelines]
    return GraphSolution(report, (curves[0], curves[1]))


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
