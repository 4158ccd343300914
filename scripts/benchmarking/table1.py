"""Sums, simulated peaks and solve times on the networks of the paper's Table 1, and on NASNet-A Large.

No network runs: sums are counted on the graph, peaks are simulated.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnxgc.api import plan_step
from onnxgc.model.read import read_model
from onnxgc.planning.plan import Objective, Solution
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import SOLVERS
from scripts.benchmarking.paper_graphs import PAPER_GRAPHS, paper_problem
from scripts.benchmarking.records import BENCHMARKS, MODELS, Progress, Record
from scripts.benchmarking.tables import MEBIBYTE, MEGABYTE, markdown_table, mebibytes, megabytes

# Networks beyond the paper's table: batch and input.
LARGE_NETWORKS = {"nasnetalarge": (8, (3, 331, 331))}
# Solvers for a sum of checkpoints and heaviest segment.
_SUMS = {"acg": Objective.PAPER, "general": Objective.GENERAL}
# The objective `peak`, without parameters' gradients.
_PEAK = "peak, activations"
# Published sums are in whole MiB.
_ROUNDING_MEBIBYTES = 0.51


@dataclass(frozen=True, slots=True)
class Options:
    """Without `time_limit`, each solver has its own."""

    only: tuple[str, ...] = ()
    time_limit: float | None = None


def run(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """One row a network.

    The record is written after each network, so that an interrupted run keeps its rows. With `only`, other
    rows of an earlier record stay; without it they are dropped, so that all rows are of one run.

    Raises:
        ValueError: a name of `only` is not a network of the table.
    """
    networks = paper_networks() | LARGE_NETWORKS
    if unknown := set(options.only) - set(networks):
        raise ValueError(f"--only {min(unknown)}: not one of {', '.join(networks)}")
    recorded = {row["network"]: row for row in (progress.recorded() or []) if options.only}
    for network in options.only or networks:
        progress(network)
        batch, pixels = networks[network]
        recorded[network] = _row(network, batch, pixels, options.time_limit)
        progress.record([recorded[network] for network in networks if network in recorded])
    return [recorded[network] for network in networks if network in recorded]


def failures(figures: Any) -> list[str]:
    """Violated laws: values are not below bounds, `general` is not above `acg`, known sums are reached."""
    found = []
    for row in figures:
        name, sums = row["network"], row["sums"]
        bounded = {solver: (sums[solver]["objective_bytes"], sums[solver]["lower_bound_bytes"]) for solver in sums}
        bounded[_PEAK] = row["plans"][_PEAK]["activation_peak_bytes"], row["peaks"][_PEAK]["lower_bound_bytes"]
        found += [
            f"{name}: {solver} is below its own bound" for solver, (value, bound) in bounded.items() if value < bound
        ]
        graphs = {"traced": {solver: bounded[solver][0] for solver in sums}, "paper's": row["paper_graph"]}
        for graph, values in graphs.items():
            if values and values["general"] > values["acg"]:
                found.append(f"{name}, {graph} graph: general is above acg")
        if values := row["paper_graph"]:
            known, where = PAPER_GRAPHS[name], f"{name}, paper's graph"
            if abs(values["acg"] / MEBIBYTE - known.code_mebibytes) > _ROUNDING_MEBIBYTES:
                found.append(f"{where}: acg is not at the {known.code_mebibytes} MiB of the paper's code")
            if values["general"] / MEBIBYTE - known.cuts_mebibytes > _ROUNDING_MEBIBYTES:
                found.append(f"{where}: general is above the known {known.cuts_mebibytes} MiB")
    return found


@cache
def paper_rows() -> dict[str, dict[str, str]]:
    """Table 1 of the paper, by network."""
    with (BENCHMARKS / "paper_table1.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["network"]: row for row in rows}


def paper_networks() -> dict[str, tuple[int, tuple[int, ...]]]:
    """Batch and input of each network, in the order of the table."""
    return {name: (int(row["batch"]), tuple(map(int, row["input"].split("x")))) for name, row in paper_rows().items()}


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


def _row(network: str, batch: int, pixels: tuple[int, ...], time_limit: float | None) -> dict[str, Any]:
    model = read_model(MODELS / f"{network}.onnx", input_shapes={"x": (batch, *pixels)})
    limit = SolverOptions(objective=Objective.ACTIVATIONS, time_limit_seconds=time_limit)
    planned = plan_step(model, "peak", limit)
    problem, peak = planned.traced.problem, planned.solution
    joint = problem.joint()
    sums = _sums(problem, time_limit)
    step, schedule = joint.scheduled(peak.plan)
    return {
        "network": network,
        "batch": batch,
        "vertices": len(problem.graph),
        "total_bytes": problem.total_bytes,
        "sums": {
            solver: {
                "objective_bytes": solution.objective_bytes,
                "lower_bound_bytes": solution.lower_bound_bytes,
                "status": solution.status.value,
            }
            for solver, solution in sums.items()
        },
        "regular": {"activation_peak_bytes": planned.regular_profile.activation_peak_bytes},
        "plans": {
            "acg": {"activation_peak_bytes": joint.profile(sums["acg"].plan).activation_peak_bytes},
            _PEAK: {
                "activation_peak_bytes": joint.profile(peak.plan).activation_peak_bytes,
                "extra_of_forward": schedule.extra_flops / sum(operator.flops for operator in step.forward),
            },
        },
        "peaks": {_PEAK: {"lower_bound_bytes": peak.lower_bound_bytes, "seconds": peak.seconds}},
        # The graph of the paper's code, for which sums are known.
        "paper_graph": {
            solver: solution.objective_bytes for solver, solution in _sums(paper_problem(network), time_limit).items()
        }
        if network in PAPER_GRAPHS
        else None,
    }


def _sums(problem: CheckpointProblem, time_limit: float | None) -> dict[str, Solution]:
    return {
        solver: SOLVERS[solver].solve(problem, SolverOptions(objective=objective, time_limit_seconds=time_limit))
        for solver, objective in _SUMS.items()
    }


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
