"""Sums, simulated peaks and solve times on the networks of the paper's Table 1, and on NASNet-A Large.

No network runs: sums are counted on the graph, peaks are simulated.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxgc.api import plan_step
from onnxgc.errors import PlanError
from onnxgc.model.read import read_model
from onnxgc.planning.joint_graph import JointGraph
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Solver, SolverOptions
from onnxgc.solvers.registry import SOLVERS
from scripts.benchmarking.command_options import add_only, add_time_limit
from scripts.benchmarking.paper_graphs import PAPER_GRAPHS, paper_problem
from scripts.benchmarking.records import BENCHMARKS, MODELS, Progress, Record, read_records, write_record
from scripts.benchmarking.tables import MEBIBYTE, MEGABYTE, markdown_table, mebibytes, megabytes, print_table

SUMS = (Objective.PAPER, Objective.GENERAL)
# Networks beyond the paper's table: batch and input.
LARGE_NETWORKS = {"nasnetalarge": (8, "3x331x331")}
# Solvers for a sum whose plans are simulated.
_PLANNED = ("acg", "general")
# The objective `peak`, without parameters' gradients.
_PEAK = "peak, activations"
_PAPER_COLUMNS = ("regular_mb", "random_mb", "chen_mb", "optimal_mb", "overhead_pct")
# Published sums are in whole MiB.
_ROUNDING_MEBIBYTES = 0.51


def add_options(parser: argparse.ArgumentParser) -> None:
    add_only(parser)
    add_time_limit(parser, None)


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a law is violated."""
    rows = run_table1(arguments.only, arguments.time_limit, arguments.record, Progress())
    names = [solver.name for solver in sum_solvers()]
    for graph, found in (("traced", rows), ("paper's", [row["paper_graph"] for row in rows])):
        sums = [
            [f"{row['network']}, {row['batch']}", *_sum_cells(figures, names)]
            for row, figures in zip(rows, found, strict=True)
            if figures is not None
        ]
        headings = ("vertices", "total", "published", *names)
        print_table(f"the paper's sum on the {graph} graph, MiB", headings, sums, width=220)
    headings = (
        "regular", "acg", "general", "peak", "paper regular", "random", "chen", "optimal", "extra/step",
        "extra/forward", "paper, time", "bound", "set by", "solve, s", "total, s", "regular+", "peak+",
    )  # fmt: skip
    title = "simulated peak without parameters' gradients, MB; `peak` with them last"
    print_table(title, headings, list(map(_peak_cells, rows)), width=260)
    violations = [violation for row in rows for violation in row["violations"]]
    print("\n".join(violations) or "no violations")
    return 1 if violations else 0


def sum_solvers() -> list[Solver]:
    """The automatic solvers for a sum of checkpoints and heaviest segment without a limit on vertices."""
    return [
        solver
        for solver in SOLVERS.values()
        if solver.automatic and solver.max_vertices is None and set(solver.objectives) & set(SUMS)
    ]


def run_table1(only: Sequence[str], time_limit: float | None, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """One row a network; `violations` has violated laws.

    The record is written after each network, so that an interrupted run keeps its rows. With `only`, other
    rows of an earlier record stay; without it they are dropped, so that all rows are of one run.

    Raises:
        ValueError: a name of `only` is not a network of the table.
    """
    if unknown := set(only) - set(_networks()):
        raise ValueError(f"--only {min(unknown)}: not one of {', '.join(_networks())}")
    earlier = [row for record in read_records("table1", folder) for row in record["figures"] if only]
    recorded = {row["network"]: row for row in earlier}
    rows = []
    for row in _rows(only, time_limit, progress):
        rows.append(row)
        recorded[row["network"]] = _recorded(row)
        figures = [recorded[network] for network in _networks() if network in recorded]
        write_record("table1", figures, folder=folder)
    return rows


def paper_rows() -> dict[str, dict[str, str]]:
    """Table 1 of the paper, by network."""
    with (BENCHMARKS / "paper_table1.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["network"]: row for row in rows}


def results_section(record: Record) -> str:
    rows = record["figures"]
    headings = [
        "network, batch", "vertices", "sum: all", "`acg`", "`general`", "peak: baseline", "`acg`", "`peak`",
        "lower bound", "paper: baseline", "optimal", "`peak` / optimal", "extra forward", "solve, s",
    ]  # fmt: skip
    return "\n\n".join(
        [
            "**The paper's Table 1**, with its batch sizes and inputs, in float32; the last network is not "
            "part of it. *Sum* is the paper's objective, checkpoints and heaviest segment including source "
            "and target, in MiB of 2^20 bytes; *all* is the sum of all tensors. Brackets contain a lower "
            "bound where the optimum is not proven. *Peak* is simulated for the CPU in MB of 10^6 bytes and "
            "counts activations, their gradients and workspaces, but neither parameters nor their "
            "gradients; *lower bound* is the largest working set of an operator, which no schedule is "
            "below. Peaks of the *paper* were measured on a GPU in PyTorch 1.5, in MB as printed and "
            "without weights, so that megabytes are only roughly comparable. *Extra forward* is the "
            "recomputation of the plan of `peak`, in floating-point operations relative to one forward "
            "pass; *solve* is the time of its search.",
            markdown_table(headings, list(map(_document_row, rows))),
            _paper_graphs_sentence({row["network"]: row["paper_graph"] for row in rows if row["paper_graph"]}),
        ]
    )


def _recorded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row that the documents show."""

    def some(figures: Mapping[str, Any], *keys: str) -> dict[str, Any]:
        return {key: figures[key] for key in keys if key in figures}

    sums = {
        name: some(row["sums"][name], "objective_bytes", "lower_bound_bytes", "status")
        for name in _PLANNED
        if name in row["sums"]
    }
    peak = some(row["plans"][_PEAK], "activation_peak_bytes", "extra_of_forward")
    graph = row["paper_graph"]
    return {
        **some(row, "network", "batch", "vertices", "total_bytes"),
        "sums": sums,
        "regular": some(row["regular"], "activation_peak_bytes"),
        "plans": {"acg": some(row["plans"]["acg"], "activation_peak_bytes"), _PEAK: peak},
        "peaks": {_PEAK: some(row["peaks"][_PEAK], "lower_bound_bytes", "seconds")},
        "paper_graph": graph
        and {name: graph["sums"][name]["objective_bytes"] for name in sums if name in graph["sums"]},
    }


def _networks() -> dict[str, tuple[int, str]]:
    """Batch and input of each network, in the order of the table."""
    sizes = {network: (int(row["batch"]), row["input"]) for network, row in paper_rows().items()}
    return sizes | LARGE_NETWORKS


def _rows(only: Sequence[str], time_limit: float | None, progress: Progress) -> Iterator[dict[str, Any]]:
    paper = paper_rows()
    for network, (batch, pixels) in _networks().items():
        if only and network not in only:
            continue
        progress(f"{network}, batch {batch}, {pixels}")
        row: dict[str, Any] = {"network": network, "batch": batch, "input": pixels}
        row.update(_traced_figures(network, (batch, *map(int, pixels.split("x"))), time_limit))
        row["paper"] = _paper_figures(paper[network]) if network in paper else None
        row["paper_graph"] = _paper_graph_figures(network, time_limit) if network in PAPER_GRAPHS else None
        row["violations"] = list(_violations(row))
        for violation in row["violations"]:
            progress(f"VIOLATION: {violation}")
        yield row


def _paper_figures(row: Mapping[str, str]) -> dict[str, int | None]:
    return {column: int(row[column]) if row[column] else None for column in _PAPER_COLUMNS}


def _traced_figures(network: str, shape: tuple[int, ...], time_limit: float | None) -> dict[str, Any]:
    """Sums and peaks of one network as traced by onnxgc."""
    started = time.perf_counter()
    model = read_model(MODELS / f"{network}.onnx", input_shapes={"x": shape})
    options = SolverOptions(objective=Objective.ACTIVATIONS, time_limit_seconds=time_limit)
    planned = plan_step(model, "peak", options)
    total_seconds = time.perf_counter() - started
    problem = planned.traced.problem
    solved = _sums(problem, time_limit)
    peak = SOLVERS["peak"].solve(problem, SolverOptions(objective=Objective.PEAK, time_limit_seconds=time_limit))
    solutions = {_PEAK: planned.solution, "peak": peak}
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
    """Solutions by solver; solvers that reject the graph or find no plan are omitted."""
    found = {}
    for solver in sum_solvers():
        objective = next(objective for objective in solver.objectives if objective in SUMS)
        options = SolverOptions(objective=objective, time_limit_seconds=time_limit)
        with suppress(PlanError):
            solution = solver.solve(problem, options)
            found[solver.name] = solution, _solution_figures(solution)
    return found


def _solution_figures(solution: Solution) -> dict[str, Any]:
    where = {"bound_operator": solution.bound_operator} if solution.bound_operator else {}
    return {
        "objective_bytes": solution.objective_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        **where,
        "status": solution.status.value,
        "seconds": solution.seconds,
    }


def _plan_figures(joint: JointGraph, plan: CheckpointPlan) -> dict[str, Any]:
    """Simulated peaks of a plan, and its extra operations relative to the step and to forward."""
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
    """The sums on the graph of the paper's code, for which sums are known."""
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
    """Violated laws: values are not below bounds, `general` is not above `acg`, known sums are reached."""
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


def _sum_cells(figures: Mapping[str, Any], solvers: Sequence[str]) -> list[str]:
    known = f"{figures['code_mebibytes']:,}/{figures['cuts_mebibytes']:,}" if "code_mebibytes" in figures else ""
    sums = [_sum_cell(figures["sums"][name]) if name in figures["sums"] else "" for name in solvers]
    return [str(figures["vertices"]), mebibytes(figures["total_bytes"]), known, *sums]


def _sum_cell(figures: Mapping[str, Any]) -> str:
    """Sum, its lower bound if not optimal, seconds."""
    bound = "" if figures["status"] == "optimal" else f" >{mebibytes(figures['lower_bound_bytes'])}"
    return f"{mebibytes(figures['objective_bytes'])}{bound} {figures['seconds']:.2f}s"


def _peak_cells(row: Mapping[str, Any]) -> list[str]:
    plans, paper, solution = row["plans"], row["paper"] or {}, row["peaks"][_PEAK]
    peaks = [plans[name]["activation_peak_bytes"] if name in plans else None for name in (*_PLANNED, _PEAK)]
    return [
        f"{row['network']}, {row['batch']}",
        megabytes(row["regular"]["activation_peak_bytes"]),
        *("" if size is None else megabytes(size) for size in peaks),
        *(str(paper.get(f"{name}_mb") or "") for name in ("regular", "random", "chen", "optimal")),
        *(f"{plans[_PEAK][key]:.0%}" for key in ("extra_of_step", "extra_of_forward")),
        f"{paper['overhead_pct']}%" if paper else "",
        megabytes(solution["lower_bound_bytes"]),
        solution.get("bound_operator", "")[-24:],
        f"{solution['seconds']:.1f}",
        f"{row['total_seconds']:.1f}",
        megabytes(row["regular"]["peak_bytes"]),
        megabytes(plans["peak"]["peak_bytes"]),
    ]


def _document_row(row: Mapping[str, Any]) -> list[str]:
    peak, solution, paper = row["plans"][_PEAK], row["peaks"][_PEAK], paper_rows().get(row["network"])
    general = row["sums"].get("general")
    columns = [f"{row['network']}, {row['batch']}", f"{row['vertices']:,}"]
    columns += [mebibytes(row["total_bytes"]), mebibytes(row["sums"]["acg"]["objective_bytes"])]
    columns.append("" if general is None else _sum_with_bound(general))
    columns += [
        megabytes(row["regular"]["activation_peak_bytes"]),
        megabytes(row["plans"]["acg"]["activation_peak_bytes"]),
        megabytes(peak["activation_peak_bytes"]),
        megabytes(solution["lower_bound_bytes"]),
    ]
    if paper:
        regular, optimal = int(paper["regular_mb"]), int(paper["optimal_mb"])
        ratio = peak["activation_peak_bytes"] / MEGABYTE / optimal
        columns += [f"{regular:,}", f"{optimal:,}", f"{ratio:.2f}"]
    else:
        columns += [""] * 3
    return [*columns, f"{peak['extra_of_forward']:.0%}", f"{solution['seconds']:.1f}"]


def _sum_with_bound(figures: Mapping[str, Any]) -> str:
    bound = "" if figures["status"] == "optimal" else f" (≥ {mebibytes(figures['lower_bound_bytes'])})"
    return f"{mebibytes(figures['objective_bytes'])}{bound}"


def _paper_graphs_sentence(sums: Mapping[str, Mapping[str, int]]) -> str:
    """Sums on the graphs of the paper's code, by network and solver."""
    same = sum(
        abs(found["acg"] / MEBIBYTE - PAPER_GRAPHS[network].code_mebibytes) <= _ROUNDING_MEBIBYTES
        for network, found in sums.items()
    )
    text = (
        "The graphs of the paper's code for the same networks end at the logits, and an operator that "
        "overwrites its input shares its vertex. On these graphs `acg` finds the sum of that code for "
        f"{same} of {len(sums)} networks, within rounding"
    )
    ratios = [found["general"] / found["acg"] for found in sums.values() if "general" in found]
    if lower := [ratio for ratio in ratios if ratio < 1]:
        text += f"; `general` finds a lower sum for {len(lower)}, down to {min(lower):.2f} of it"
    return f"{text}."
