"""The networks of the paper's Table 1, and two larger ones: sums, peaks and times of every solver.

Nothing is run: sums are counted on the graph, peaks are the judge's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from onnxgc.api import plan_step
from onnxgc.errors import PlanError
from onnxgc.model.read import read_model
from onnxgc.planning.joint import JointGraph
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Solver, SolverOptions
from onnxgc.solvers.registry import SOLVERS
from scripts.benchmarking.networks import paper_rows
from scripts.benchmarking.paper_graphs import PAPER_GRAPHS, paper_problem
from scripts.benchmarking.records import MODELS, Progress

MEBIBYTE = 2**20
SUMS = (Objective.PAPER, Objective.GENERAL)
# Beyond the paper's table: batch and input.
LARGE_NETWORKS = {"nasnetalarge": (8, "3x331x331")}
# Of the solvers for a sum, those whose plans are simulated.
_PLANNED = ("acg", "general")
_PAPER_COLUMNS = ("regular_mb", "random_mb", "chen_mb", "optimal_mb", "overhead_pct")
# Sums are published in whole MiB.
_ROUNDING_MEBIBYTES = 0.51


def sum_solvers() -> list[Solver]:
    """The automatic solvers for a sum of checkpoints and heaviest segment that take large graphs."""
    return [
        solver
        for solver in SOLVERS.values()
        if solver.automatic and solver.max_vertices is None and set(solver.objectives) & set(SUMS)
    ]


def run_table1(only: Sequence[str], time_limit: float | None, tell: Progress) -> list[dict[str, Any]]:
    """One row a network; `violations` of what must hold are part of it."""
    return list(_rows(only, time_limit, tell))


def _rows(only: Sequence[str], time_limit: float | None, tell: Progress) -> Iterator[dict[str, Any]]:
    paper = paper_rows()
    sizes = {network: (int(row["batch"]), row["input"]) for network, row in paper.items()}
    for network, (batch, pixels) in (sizes | LARGE_NETWORKS).items():
        if only and network not in only:
            continue
        tell(f"{network}, batch {batch}, {pixels}")
        row: dict[str, Any] = {"network": network, "batch": batch, "input": pixels}
        row.update(_traced_figures(network, (batch, *map(int, pixels.split("x"))), time_limit))
        row["paper"] = _paper_figures(paper[network]) if network in paper else None
        row["paper_graph"] = _paper_graph_figures(network, time_limit) if network in PAPER_GRAPHS else None
        row["violations"] = list(_violations(row))
        for violation in row["violations"]:
            tell(f"VIOLATION: {violation}")
        yield row


def _paper_figures(row: Mapping[str, str]) -> dict[str, int | None]:
    return {column: int(row[column]) if row[column] else None for column in _PAPER_COLUMNS}


def _traced_figures(network: str, shape: tuple[int, ...], time_limit: float | None) -> dict[str, Any]:
    """Sums and peaks of one network as onnxgc traces it."""
    started = time.perf_counter()
    model = read_model(MODELS / f"{network}.onnx", input_shapes={"x": shape})
    options = SolverOptions(objective=Objective.ACTIVATIONS, time_limit_seconds=time_limit)
    planned = plan_step(model, "peak", options)
    total_seconds = time.perf_counter() - started
    problem = planned.traced.problem
    solved = _sums(problem, time_limit)
    peak = SOLVERS["peak"].solve(
        problem, SolverOptions(objective=Objective.PEAK, time_limit_seconds=time_limit)
    )
    solutions = {"peak, activations": planned.solution, "peak": peak}
    plans = {name: solution.plan for name, solution in solutions.items()}
    plans |= {solver: solution.plan for solver, (solution, _) in solved.items() if solver in _PLANNED}
    return {
        "vertices": len(problem.graph),
        "total_bytes": problem.total_bytes,
        "sums": {name: figures for name, (_, figures) in solved.items()},
        "regular": {
            "activation_peak_bytes": planned.regular_profile.activation_peak_bytes,
            "peak_bytes": planned.regular_profile.peak_bytes,
        },
        "plans": {name: _plan_figures(problem.joint(), plan) for name, plan in plans.items()},
        "peaks": {name: _solution_figures(solution) for name, solution in solutions.items()},
        "extra_flops_ratio": planned.extra_flops_ratio,
        "total_seconds": total_seconds,
    }


def _sums(problem: CheckpointProblem, time_limit: float | None) -> dict[str, tuple[Solution, dict[str, Any]]]:
    """What each solver finds, those left out that do not take the graph or find nothing on it."""
    found = {}
    for solver in sum_solvers():
        objective = next(objective for objective in solver.objectives if objective in SUMS)
        options = SolverOptions(objective=objective, time_limit_seconds=time_limit)
        with suppress(PlanError):
            solution = solver.solve(problem, options)
            found[solver.name] = solution, _solution_figures(solution)
    return found


def _solution_figures(solution: Solution) -> dict[str, Any]:
    return {
        "objective": solution.objective.value,
        "objective_bytes": solution.objective_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "bound_operator": solution.bound_operator,
        "status": solution.status.value,
        "seconds": solution.seconds,
    }


def _plan_figures(joint: JointGraph, plan: CheckpointPlan) -> dict[str, Any]:
    """A plan as the judge sees it; floating-point operations as shares of the step's and of forward's."""
    step, schedule = joint.scheduled(plan)
    profile = joint.profile(plan)
    forward = sum(operator.flops for operator in step.forward)
    backward = sum(operator.flops for chunk in step.chunks for operator in chunk)
    return {
        "activation_peak_bytes": profile.activation_peak_bytes,
        "peak_bytes": profile.peak_bytes,
        "extra_of_step": schedule.extra_flops / (forward + backward),
        "extra_of_forward": schedule.extra_flops / forward,
    }


def _paper_graph_figures(network: str, time_limit: float | None) -> dict[str, Any]:
    """The same sums on the graph that the paper's code draws, where sums are known."""
    known = PAPER_GRAPHS[network]
    problem = paper_problem(network)
    return {
        "vertices": len(problem.graph),
        "total_bytes": problem.total_bytes,
        "sums": {name: figures for name, (_, figures) in _sums(problem, time_limit).items()},
        "code_mebibytes": known.code_mebibytes,
        "cuts_mebibytes": known.cuts_mebibytes,
    }


def _violations(row: Mapping[str, Any]) -> Iterator[str]:
    """What must hold and does not."""
    graphs = {"traced": row["sums"], "paper's": row["paper_graph"]["sums"] if row["paper_graph"] else {}}
    for graph, sums in graphs.items():
        where = f"{row['network']}, {graph} graph"
        for name, figures in sums.items():
            if figures["objective_bytes"] < figures["lower_bound_bytes"]:
                yield f"{where}: {name} is below its own bound"
        if "general" in sums and sums["general"]["objective_bytes"] > sums["acg"]["objective_bytes"]:
            yield f"{where}: general is above acg"
    for name, figures in row["peaks"].items():
        if figures["objective_bytes"] < figures["lower_bound_bytes"]:
            yield f"{row['network']}: {name} is below its own bound"
    if row["paper_graph"]:
        sums, where = row["paper_graph"]["sums"], f"{row['network']}, paper's graph"
        known = row["paper_graph"]["code_mebibytes"]
        if abs(sums["acg"]["objective_bytes"] / MEBIBYTE - known) > _ROUNDING_MEBIBYTES:
            yield f"{where}: acg is not at the {known} MiB of the paper's code"
        known = row["paper_graph"]["cuts_mebibytes"]
        if "general" in sums and sums["general"]["objective_bytes"] / MEBIBYTE - known > _ROUNDING_MEBIBYTES:
            yield f"{where}: general is above the known {known} MiB"
