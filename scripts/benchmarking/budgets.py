"""Plans under budgets: operator graphs of files, and networks of models/ with measured peaks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxgc
from onnxgc.api.feeds import feeds_of
from onnxgc.emission.atomic_files import write_model
from onnxgc.errors import BudgetError
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from onnxgc.runtime.measure import measure
from onnxgc.runtime.ort import SessionSettings
from scripts.benchmarking.command_options import add_only, add_threads, add_time_limit, options_of
from scripts.benchmarking.layered import layered_graph
from scripts.benchmarking.records import MODELS, Progress, Record, write_record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes, print_table

SHARES = (0.9, 0.8, 0.6, 0.5, 0.3, 0.2)
ORDERS = ("free", "fixed")
LAYERED_OPERATORS = 1_000
LAYERED_SEEDS = (1, 2, 3)
"""Seeds of random layered graphs, which are solved for the two largest shares only."""
HEADINGS = (
    "network, batch, budget", "baseline, MB", "planned, MB", "extra time, %", "lower bound, %", "search, s",
    "small batch, MB", "measured, MB",
)  # fmt: skip
_RUNS = 3


@dataclass(frozen=True, slots=True)
class NetworkBudgets:
    """A network with its budgets at batch `batch`; steps run at batch `measured_batch`."""

    network: str
    batch: int
    pixels: int
    budgets: tuple[str, ...]
    measured_batch: int


NETWORKS = (
    NetworkBudgets("resnet50", 64, 224, ("3GiB", "2GiB", "1.5GiB", "min"), 8),
    NetworkBudgets("resnet152", 16, 224, ("80%", "50%", "30%"), 2),
    NetworkBudgets("densenet121", 32, 224, ("80%", "50%", "30%"), 4),
)


@dataclass(frozen=True, slots=True)
class Options:
    """`graphs` is a folder of operator graphs; `time_limit` is in seconds for each search."""

    graphs: Path | None
    only: tuple[str, ...]
    time_limit: float
    threads: int
    seed: int = 0

    def includes(self, name: str) -> bool:
        return not self.only or name in self.only


def add_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser)
    add_only(parser, "a graph or network")
    parser.add_argument("--graphs", type=Path, help="a folder of operator graphs (JSON)")
    add_time_limit(parser, 30.0)


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a measured peak exceeds its budget."""
    options = options_of(Options, arguments)
    figures = run_budgets(options, Progress())
    write_record("budgets", figures, threads=options.threads, folder=arguments.record)
    if figures["graphs"]:
        title = "extra time, %, by budget (≥ lower bound where not optimal)"
        print_table(title, [f"{share:.0%}" for share in SHARES], graph_rows(figures), width=140)
    title = "minimised extra time; measured at a small batch"
    print_table(title, HEADINGS[1:], table_rows(figures), width=140)
    return 0 if all(is_within_budget(row) for row in figures["networks"]) else 1


def run_budgets(options: Options, progress: Progress) -> dict[str, Any]:
    """Rows of graphs (files in `options.graphs`, and random ones) and of networks."""
    files = sorted(options.graphs.glob("*.json")) if options.graphs else []
    with tempfile.TemporaryDirectory() as folder:
        layered = [Path(folder) / f"layered-{LAYERED_OPERATORS}-{seed}.json" for seed in LAYERED_SEEDS]
        for path, seed in zip(layered, LAYERED_SEEDS, strict=True):
            path.write_text(json.dumps(layered_graph(LAYERED_OPERATORS, seed)), encoding="utf-8")
        problems = [*((path, SHARES) for path in files), *((path, SHARES[:2]) for path in layered)]
        graphs = [
            row
            for path, shares in problems
            if options.includes(path.stem)
            for row in _graph_rows_of(path, shares, options, progress)
        ]
    networks = [
        row
        for entry in NETWORKS
        if options.includes(entry.network)
        for row in _network_rows_of(entry, options, progress)
    ]
    return {"time_limit_seconds": options.time_limit, "graphs": graphs, "networks": networks}


def is_within_budget(row: Mapping[str, Any]) -> bool:
    """Whether the measured peak is within the budget of the small batch."""
    return int(row["measured"]["requested_bytes"]) <= int(row["measured"]["budget_bytes"])


def table_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """One row for each network and budget: peaks, extra time with its lower bound, measured peak."""
    return [
        [
            f"{row['network']}, {row['batch']}, {row['budget']}",
            megabytes(row["regular_peak_bytes"]),
            megabytes(row["planned_peak_bytes"]),
            f"{100 * row['extra_time_ratio']:.2f}",
            f"{100 * row['lower_bound_ratio']:.2f}",
            f"{row['seconds']:.1f}",
            megabytes(row["measured"]["simulated_peak_bytes"], 1),
            megabytes(row["measured"]["requested_bytes"], 1),
        ]
        for row in figures["networks"]
    ]


def graph_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """One row for each graph and order: extra time by budget, with its lower bound where not optimal."""
    rows: dict[tuple[str, int, str], dict[float, str]] = {}
    for row in figures["graphs"]:
        key = row["graph"], row["operators"], row["order"]
        extra, bound = 100 * row["overhead"], 100 * row["lower_bound"]
        text = f"{extra:.3f}" if row["status"] == "optimal" else f"{extra:.3f} (≥ {bound:.3f})"
        rows.setdefault(key, {})[row["share"]] = text
    return [
        [f"{graph}, {operators}, {order}", *(found.get(share, "") for share in SHARES)]
        for (graph, operators, order), found in rows.items()
    ]


def results_section(record: Record) -> str:
    figures = record["figures"]
    timing = next((row["timing"] for row in figures["networks"]), "")
    text = (
        "**Budgets.** Minimised extra time within a memory budget, relative to the baseline's time, by "
        f"estimated durations ({timing}). No plan within the budget is below the lower bound. The last two "
        "columns are simulated and measured peaks of a plan for a smaller batch, within a budget reduced "
        f"accordingly ({machine_of(record)}).\n\n{markdown_table(HEADINGS, table_rows(figures))}"
    )
    if figures["graphs"]:
        headings = ("graph", *(f"{share:.0%}" for share in SHARES))
        text += (
            "\n\nPublic problem graphs (number of operators, operator order): extra time in % by budget, "
            f"searched for {figures['time_limit_seconds']:.0f} s each. Brackets contain the lower bound "
            f"where a plan is not proven optimal.\n\n{markdown_table(headings, graph_rows(figures))}"
        )
    return text


def _graph_rows_of(path: Path, shares: Sequence[float], options: Options, progress: Progress) -> list[dict[str, Any]]:
    rows = []
    for order in ORDERS:
        for share in shares:
            progress(f"{path.stem} at {share:.0%}, {order} order")
            row: dict[str, Any] = {"graph": path.stem, "order": order, "share": share}
            try:
                found = onnxgc.solve(
                    path, budget=share, order=order, time_limit=options.time_limit, seed=options.seed
                ).report
            except BudgetError:
                continue
            row["operators"] = len(set(found["sequence"]))
            row |= {key: found[key] for key in ("status", "overhead", "gap", "gap_of_extra", "seconds")}
            row["lower_bound"] = found["lower_bound"] / found["regular"]["duration"] - 1
            rows.append(row)
    return rows


def _network_rows_of(entry: NetworkBudgets, options: Options, progress: Progress) -> list[dict[str, Any]]:
    path = MODELS / f"{entry.network}.onnx"
    rows = []
    for budget in entry.budgets:
        progress(f"{entry.network}, batch {entry.batch}, {budget}")
        result = onnxgc.optimize(
            path,
            budget=budget,
            input_shapes={"x": (entry.batch, 3, entry.pixels, entry.pixels)},
            check=False,
            time_limit=options.time_limit,
            seed=options.seed,
        )
        report = result.report
        row: dict[str, Any] = {**dataclasses.asdict(entry), "budget": budget}
        del row["budgets"]
        row["operators"] = len(set(result.plan.sequence))
        row["status"], row["seconds"] = report["status"], report["seconds"]["solve"]
        row["regular_peak_bytes"] = report["regular"]["simulated_peak_bytes"]
        row["planned_peak_bytes"] = report["planned"]["simulated_peak_bytes"]
        row["budget_bytes"], row["timing"] = report["budget"]["bytes"], report["budget"]["timing"]
        row |= {key: report["budget"][key] for key in ("extra_time_ratio", "lower_bound_ratio", "gap", "gap_of_extra")}
        # Parameters' gradients do not depend on the batch.
        kept = result.planned.profile.parameter_gradient_bytes
        over = (report["budget"]["bytes"] or row["planned_peak_bytes"]) - kept
        scaled = kept + over * entry.measured_batch // entry.batch
        progress(f"  batch {entry.measured_batch} in {megabytes(scaled)} MB, measured")
        row["measured"] = _measured(entry, scaled, path, options)
        rows.append(row)
    return rows


def _measured(entry: NetworkBudgets, budget_bytes: int, path: Path, options: Options) -> Mapping[str, int]:
    """Simulated and measured peaks of a plan for the small batch."""
    shapes = {"x": (entry.measured_batch, 3, entry.pixels, entry.pixels)}
    result = onnxgc.optimize(
        path,
        budget=budget_bytes,
        input_shapes=shapes,
        check=False,
        time_limit=options.time_limit,
        seed=options.seed,
        values=draw_weights(read_model(path, input_shapes=shapes), options.seed),
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "planned.onnx"
        write_model(result.training_graph.model, file)
        found = measure(
            file,
            feeds_of(result.planned, options.seed),
            settings=SessionSettings(threads=options.threads),
            runs=_RUNS,
            keep_outputs=False,
        )
    return {
        "budget_bytes": budget_bytes,
        "simulated_peak_bytes": result.planned.profile.peak_bytes,
        "requested_bytes": found.requested_peak_bytes,
        "in_use_bytes": found.in_use_peak_bytes,
    }
