"""Simulated and measured peaks of light models and of models/."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar

import onnxgc
from onnxgc.api import OptimizeResult
from onnxgc.api.feeds import feeds_of
from onnxgc.emission.atomic_files import write_model
from onnxgc.errors import BudgetError
from onnxgc.planning.allocations import allocations
from onnxgc.planning.schedule import Recompute
from onnxgc.report.text.units import shape_text
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings
from onnxgc.runtime.profile import RunProfile
from scripts.benchmarking.arena import ARENA, simulate_arena
from scripts.benchmarking.command_options import add_only, add_threads, add_time_limit, options_of
from scripts.benchmarking.light_networks import light_networks, network_shapes
from scripts.benchmarking.records import Record, write_record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes, print_table

REGULAR, PLANNED, BUDGET, LEAST = "regular", "planned", "60%", "min"
PLANS = (REGULAR, PLANNED, BUDGET)
SIMULATOR_TOLERANCE = 0.01
"""Relative difference of simulated and requested bytes."""
ARENA_TOLERANCE = 0.03
"""Relative difference of the arena's simulation and bytes in use."""
HEADINGS = (
    "network, input", "baseline: simulated", "requested", "planned: simulated", "requested",
    f"within {BUDGET}: simulated", "requested", "difference: simulated", "in use",
)  # fmt: skip
_MIN_RESIDUAL = 256
_STEPS = 2
_RESIDUALS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Options:
    """`only` has names of networks; `pixels` is each network's own size if `None`."""

    only: tuple[str, ...] = ()
    batch: int = 2
    pixels: int | None = None
    time_limit: float = 10.0
    threads: int = 1
    seed: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser, 1)
    add_only(parser)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pixels", type=int, help="image size (default: each network's own)")
    add_time_limit(parser, 10.0)


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a difference exceeds its tolerance."""
    options = options_of(Options, arguments)
    figures = run_peaks(options)
    rows = figures["rows"]
    write_record("peaks", figures, threads=options.threads, folder=arguments.record)
    headings = ("simulated", "requested", "difference", "simulated arena", "in use", "difference")
    print_table("peaks, MB", headings, list(map(_terminal_row, rows)), width=140)
    print("nodes with the largest differences:", *largest_residuals(rows, _RESIDUALS_SHOWN), sep="\n")
    return 0 if all(is_close(row) for row in rows) else 1


def run_peaks(options: Options) -> dict[str, Any]:
    """One row for each network and plan, with a progress bar on stderr."""
    paths = [path for path in light_networks().values() if not options.only or path.stem in options.only]
    rows = []
    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(paths) * len(PLANS))
        for path in paths:
            for plan in PLANS:
                bar.update(task, description=f"{path.stem}, {plan}")
                rows.append(_row(path, plan, options))
                bar.advance(task)
    return {"steps": _STEPS, "rows": rows}


def deviations(row: Mapping[str, Any]) -> tuple[float, float]:
    """Relative differences: simulated from requested bytes, and the arena's simulation from bytes in use."""
    simulated = row["simulated_bytes"] / row["requested_bytes"] - 1
    arena = row["arena_bytes"] / row["in_use_bytes"] - 1
    return simulated, arena


def is_close(row: Mapping[str, Any]) -> bool:
    simulated, arena = deviations(row)
    return abs(simulated) <= SIMULATOR_TOLERANCE and abs(arena) <= ARENA_TOLERANCE


@dataclass(frozen=True, slots=True)
class Residual:
    """A node with other allocations than simulated; `bytes` is measured minus simulated."""

    node: str
    operator: str
    tensor: str
    what: str
    bytes: int


def residuals(result: OptimizeResult, run: RunProfile) -> Iterator[Residual]:
    """Differences of each node's outputs, and of its workspace where the profile shows it.

    A measured workspace includes the slack of its chunk, so differences within the largest slack are omitted.
    """
    planned = result.planned
    steps = planned.schedule.instructions
    source_of = {step.operator.name: step.source for step in steps if isinstance(step, Recompute)}
    measured = {name: figures for name, *figures in zip(run.order, run.held_bytes, run.workspace_bytes, strict=True)}
    simulated = difference = 0
    for step in allocations(planned.schedule, planned.step.graph):
        operator = step.operator
        simulated += sum(storage.size_bytes for storage in step.made)
        if operator.name in measured:
            held, workspace = measured[operator.name]
            more = held - simulated - difference
            difference += more
            kind = planned.step.nodes[source_of.get(operator.name, operator.name)].op
            tensor = operator.outputs[0]
            yield Residual(operator.name, kind, tensor, "outputs", more)
            over = workspace - operator.workspace_bytes
            if workspace and not 0 <= over < ARENA.max_dead_bytes:
                yield Residual(operator.name, kind, tensor, "workspace", over)
        simulated -= sum(storage.size_bytes for storage in step.freed)


def largest_residuals(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """One line for each of the largest residuals of at least 256 bytes."""
    ordered = sorted(filter(itemgetter("worst"), rows), key=lambda row: -abs(row["worst"]["bytes"]))
    return [
        f"{row['network']}, {row['plan']}: {row['worst']['what']} of '{row['worst']['node']}': "
        f"{row['worst']['bytes']:+,} bytes"
        for row in ordered[:count]
    ]


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row a network; a star marks the least peak, where no plan was within the budget."""
    networks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        networks.setdefault(f"{row['network']}, {shape_text(row['input'])}", []).append(row)
    table = []
    for name, plans in networks.items():
        cells = [name]
        for row in plans:
            star = "*" if row["plan"] == LEAST else ""
            cells += [f"{megabytes(row[key], 1)}{star}" for key in ("simulated_bytes", "requested_bytes")]
        cells += [f"{max(map(abs, off)):.2%}" for off in zip(*map(deviations, plans), strict=True)]
        table.append(cells)
    return table


def results_section(record: Record) -> str:
    rows = record["figures"]["rows"]
    simulated, arena = (max(map(abs, off)) for off in zip(*map(deviations, rows), strict=True))
    return (
        "**Simulated and measured** peaks of light networks in MB, parameters' gradients included. "
        "*Requested* is the highest sum of bytes requested from ONNX Runtime's allocator during "
        f"{record['figures']['steps']} steps. Simulated and requested peaks differ by at most "
        f"{simulated:.2%}. Bytes *in use* include the arena's slack; the simulation of the arena, which has "
        f"no fitted constant, differs from them by at most {arena:.2%}. A star marks the least peak found, "
        f"where no plan was within {BUDGET} of the baseline "
        f"({machine_of(record)}).\n\n{markdown_table(HEADINGS, table_rows(rows))}"
    )


def _row(path: Path, plan: str, options: Options) -> dict[str, Any]:
    found, result = _planned(path, plan, network_shapes(path, options.batch, options.pixels), options)
    planned = result.planned
    (name,) = planned.model.inputs
    measured = _measured(result, options)
    arena = simulate_arena(planned.schedule, planned.step.graph, ARENA, steps=_STEPS)
    worst = max(residuals(result, measured.runs[0]), key=lambda residual: abs(residual.bytes))
    return {
        "network": path.stem,
        "input": list(planned.model.types[name].shape),
        "plan": found,
        "simulated_bytes": planned.profile.peak_bytes,
        "requested_bytes": measured.requested_peak_bytes,
        "arena_bytes": arena.peak_bytes,
        "in_use_bytes": measured.in_use_peak_bytes,
        "worst": {"node": worst.node, "what": worst.what, "bytes": worst.bytes}
        if abs(worst.bytes) >= _MIN_RESIDUAL
        else None,
    }


def _planned(
    path: Path, plan: str, shapes: Mapping[str, tuple[int, ...]], options: Options
) -> tuple[str, OptimizeResult]:
    """The plan and its kind: `LEAST` if no plan is within the budget."""

    def optimize(solver: str | None = None, budget: str | None = None) -> OptimizeResult:
        return onnxgc.optimize(
            path,
            solver=solver,
            budget=budget,
            input_shapes=shapes,
            check=False,
            time_limit=options.time_limit,
            seed=options.seed,
        )

    if plan == REGULAR:
        return plan, optimize(solver="store-all")
    if plan == PLANNED:
        return plan, optimize()
    try:
        return plan, optimize(budget=plan)
    except BudgetError:
        return LEAST, optimize(budget=LEAST)


def _measured(result: OptimizeResult, options: Options) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.onnx"
        write_model(result.training_graph.model, file)
        settings = SessionSettings(threads=options.threads)
        return measure(file, feeds_of(result.planned, options.seed), settings=settings, runs=_STEPS)


def _terminal_row(row: Mapping[str, Any]) -> list[str]:
    kinds = ("simulated", "requested", "arena", "in_use")
    simulated, requested, arena, in_use = (megabytes(row[f"{kind}_bytes"], 3) for kind in kinds)
    simulated_off, arena_off = deviations(row)
    label = f"{row['network']}, {shape_text(row['input'])}, {row['plan']}"
    return [label, simulated, requested, f"{simulated_off:+.2%}", arena, in_use, f"{arena_off:+.2%}"]
