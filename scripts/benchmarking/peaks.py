"""Simulated and measured peaks of light models and of models/."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

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
from scripts.benchmarking.records import MODELS, Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes

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
LIGHT_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@dataclass(frozen=True, slots=True)
class Options:
    """`only` has names of networks; `pixels` is each network's own size if `None`."""

    only: tuple[str, ...] = ()
    batch: int = 2
    pixels: int | None = None
    time_limit: float = 10.0
    threads: int = 1
    seed: int = 0


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """One row for each plan of the networks of the `onnx` package and of models/."""
    rows = []
    for path in (*sorted(LIGHT_FOLDER.glob("*.onnx")), *sorted(MODELS.glob("*.onnx"))):
        if options.only and path.stem not in options.only:
            continue
        for plan in PLANS:
            progress(f"{path.stem}, {plan}")
            rows.append(_row(path, plan, options))
    return {"steps": _STEPS, "rows": rows}


def failures(figures: Mapping[str, Any]) -> list[str]:
    """Networks whose peaks differ by more than the tolerances, each with its node of the largest difference."""
    found = []
    for row in figures["rows"]:
        if not is_close(row):
            where, worst = f"{row['network']}, {row['plan']}", row["worst"]
            named = f"{worst['what']} of '{worst['node']}': {worst['bytes']:+,} bytes" if worst else "no node differs"
            found.append(f"{where}: {named}")
    return found


def network_shapes(path: Path, batch: int, pixels: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs for `batch` images; none for the packaged models, whose batch is 1."""
    if path.parent != MODELS:
        return {}
    (value,) = onnx.load(path).graph.input
    channels, *size = (dim.dim_value for dim in value.type.tensor_type.shape.dim[1:])
    return {value.name: (batch, channels, *((pixels, pixels) if pixels else size))}


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
            yield Residual(operator.name, kind, "outputs", more)
            over = workspace - operator.workspace_bytes
            if workspace and not 0 <= over < ARENA.max_dead_bytes:
                yield Residual(operator.name, kind, "workspace", over)
        simulated -= sum(storage.size_bytes for storage in step.freed)


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
    run = measured(result, options.threads, options.seed, _STEPS)
    arena = simulate_arena(planned.schedule, planned.step.graph, ARENA, steps=_STEPS)
    worst = max(residuals(result, run.runs[0]), key=lambda residual: abs(residual.bytes))
    return {
        "network": path.stem,
        "input": list(planned.model.types[name].shape),
        "plan": found,
        "simulated_bytes": planned.profile.peak_bytes,
        "requested_bytes": run.requested_peak_bytes,
        "arena_bytes": arena.peak_bytes,
        "in_use_bytes": run.in_use_peak_bytes,
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
        return plan, optimize(solver="peak")
    try:
        return plan, optimize(budget=plan)
    except BudgetError:
        return LEAST, optimize(budget=LEAST)


def measured(result: OptimizeResult, threads: int, seed: int, runs: int) -> Measurement:
    """The peaks of a plan's training file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.onnx"
        write_model(result.training_graph.model, file)
        settings = SessionSettings(threads=threads)
        return measure(file, feeds_of(result.planned, seed), settings=settings, runs=runs, keep_outputs=False)
