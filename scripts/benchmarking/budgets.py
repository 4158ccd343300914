"""Plans under budgets: operator graphs from files, and networks of models/ whose peaks are measured."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxgc
from onnxgc.api.solving import solve_operator_graph
from onnxgc.emission.write import write_model
from onnxgc.errors import BudgetError
from onnxgc.model.core.ir import dtype_name
from onnxgc.model.read import read_model
from onnxgc.model.weight_roles.initialization import draw_weights
from onnxgc.runtime.measure import measure, random_feeds
from onnxgc.runtime.ort import SessionSettings
from scripts.benchmarking.layered import layered_graph
from scripts.benchmarking.records import MODELS, Progress

GIBIBYTE = 2**30
SHARES = (0.9, 0.8, 0.6, 0.5, 0.3, 0.2)
ORDERS = ("free", "fixed")
LAYERED_OPERATORS = 1_000
LAYERED_SEEDS = (1, 2, 3)
"""Random layered graphs; at the two largest of the shares alone."""
_RUNS = 3


@dataclass(frozen=True, slots=True)
class NetworkBudgets:
    """A network at the batch that is planned for, the budgets, and the smaller batch that is run."""

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
    """What is run, and how long each search may take, in seconds."""

    graphs: Path | None
    only: tuple[str, ...]
    time_limit: float
    threads: int
    seed: int = 0


def run_budgets(options: Options, tell: Progress) -> dict[str, Any]:
    """Rows of graphs (the files in `options.graphs`, where given, and random ones) and of networks."""
    files = sorted(options.graphs.glob("*.json")) if options.graphs else []
    with tempfile.TemporaryDirectory() as folder:
        layered = [Path(folder) / f"layered-{LAYERED_OPERATORS}-{seed}.json" for seed in LAYERED_SEEDS]
        for path, seed in zip(layered, LAYERED_SEEDS, strict=True):
            path.write_text(json.dumps(layered_graph(LAYERED_OPERATORS, seed)), encoding="utf-8")
        graphs = [
            row
            for path, shares in (
                *((path, SHARES) for path in files),
                *((path, SHARES[:2]) for path in layered),
            )
            if _is_wanted(path.stem, options)
            for row in _graph(path, shares, options, tell)
        ]
    return {
        "time_limit_seconds": options.time_limit,
        "graphs": graphs,
        "networks": [
            row
            for entry in NETWORKS
            if _is_wanted(entry.network, options)
            for row in _network(entry, options, tell)
        ],
    }


def _is_wanted(name: str, options: Options) -> bool:
    return not options.only or name in options.only


def _graph(path: Path, shares: Sequence[float], options: Options, tell: Progress) -> list[dict[str, Any]]:
    rows = []
    for order in ORDERS:
        for share in shares:
            tell(f"{path.stem} at {share:.0%}, {order} order")
            row: dict[str, Any] = {"graph": path.stem, "order": order, "share": share}
            try:
                found = solve_operator_graph(
                    path, budget=share, order=order, time_limit=options.time_limit, seed=options.seed
                )
            except BudgetError:
                continue
            row["operators"] = len(set(found["sequence"]))
            row |= {key: found[key] for key in ("status", "overhead", "gap", "gap_of_extra", "seconds")}
            row["lower_bound"] = found["lower_bound"] / found["regular"]["duration"] - 1
            rows.append(row)
    return rows


def _network(entry: NetworkBudgets, options: Options, tell: Progress) -> list[dict[str, Any]]:
    path = MODELS / f"{entry.network}.onnx"
    rows = []
    for budget in entry.budgets:
        tell(f"{entry.network}, batch {entry.batch}, {budget}")
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
        row |= {
            key: report["budget"][key]
            for key in ("extra_time_ratio", "lower_bound_ratio", "gap", "gap_of_extra")
        }
        kept = result.planned.profile.parameter_gradient_bytes
        over = (report["budget"]["bytes"] or row["planned_peak_bytes"]) - kept
        scaled = kept + over * entry.measured_batch // entry.batch
        tell(f"  batch {entry.measured_batch} in {scaled / 10**6:,.0f} MB, measured")
        row["measured"] = _measured(entry, scaled, path, options)
        rows.append(row)
    return rows


def _measured(entry: NetworkBudgets, budget_bytes: int, path: Path, options: Options) -> Mapping[str, int]:
    """A plan for fewer images in a budget as much smaller: simulated peak, and what the allocator gave.

    Parameters' gradients do not get smaller with the batch.
    """
    shape = (entry.measured_batch, 3, entry.pixels, entry.pixels)
    model = read_model(path, input_shapes={"x": shape})
    result = onnxgc.optimize(
        path,
        budget=budget_bytes,
        input_shapes={"x": shape},
        check=False,
        time_limit=options.time_limit,
        seed=options.seed,
        values=draw_weights(model, options.seed),
    )
    described = {
        name: (dtype_name(model.types[name].dtype), model.types[name].shape)
        for name in (*model.inputs, *model.targets)
    }
    classes = model.types[model.outputs[0]].shape[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "planned.onnx"
        write_model(result.training_graph.model, file)
        found = measure(
            file,
            random_feeds(described, options.seed, classes),
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


HEADINGS = (
    "network, batch, budget",
    "all, MB",
    "plan, MB",
    "extra, %",
    "bound, %",
    "s",
    "few, MB",
    "run, MB",
)


def keeps_to_budget(row: Mapping[str, Any]) -> bool:
    """Whether what was measured stays within the smaller budget."""
    return int(row["measured"]["requested_bytes"]) <= int(row["measured"]["budget_bytes"])


def table_rows(figures: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Networks as people read them: budget, peaks, extra time with its bound, measured beside simulated."""
    rows = []
    for row in figures["networks"]:
        measured = row["measured"]
        rows.append(
            [
                f"{row['network']}, {row['batch']}, {row['budget']}",
                f"{row['regular_peak_bytes'] / 10**6:,.0f}",
                f"{row['planned_peak_bytes'] / 10**6:,.0f}",
                f"{100 * row['extra_time_ratio']:.2f}",
                f"{100 * row['lower_bound_ratio']:.2f}",
                f"{row['seconds']:.1f}",
                f"{measured['simulated_peak_bytes'] / 10**6:,.1f}",
                f"{measured['requested_bytes'] / 10**6:,.1f}",
            ]
        )
    return rows


def graph_rows(figures: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Graphs as people read them: extra time over its bound, by budget."""
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
