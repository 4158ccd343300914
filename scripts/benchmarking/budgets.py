"""Plans under budgets: operator graphs of files, and networks of models/ with measured peaks."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxgc
from onnxgc.errors import BudgetError
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from scripts.benchmarking.command_options import CORES
from scripts.benchmarking.layered import layered_graph
from scripts.benchmarking.peaks import measured
from scripts.benchmarking.records import MODELS, Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes

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

    graphs: Path | None = None
    only: tuple[str, ...] = ()
    time_limit: float = 30.0
    threads: int = CORES
    seed: int = 0

    def includes(self, name: str) -> bool:
        return not self.only or name in self.only


def run(options: Options, progress: Progress) -> dict[str, Any]:
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


def failures(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['network']}, {row['budget']}: the measured peak exceeds the budget of the small batch"
        for row in figures["networks"]
        if row["measured"]["requested_bytes"] > row["measured"]["budget_bytes"]
    ]


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
            row |= {key: found[key] for key in ("status", "overhead")}
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
        row: dict[str, Any] = {"network": entry.network, "batch": entry.batch, "budget": budget}
        row["seconds"] = report["seconds"]["solve"]
        row |= {f"{kind}_peak_bytes": report[kind]["simulated_peak_bytes"] for kind in ("regular", "planned")}
        row |= {key: report["budget"][key] for key in ("timing", "extra_time_ratio", "lower_bound_ratio")}
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
    found = measured(result, options.threads, options.seed, _RUNS)
    return {
        "budget_bytes": budget_bytes,
        "simulated_peak_bytes": result.planned.profile.peak_bytes,
        "requested_bytes": found.requested_peak_bytes,
    }
