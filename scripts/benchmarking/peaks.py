"""The judge beside the runtime: simulated and measured peaks of light models and those of models/."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar

import onnxgc
from onnxgc.api import OptimizeResult
from onnxgc.emission.write import write_model
from onnxgc.errors import BudgetError
from onnxgc.model.core.ir import dtype_name
from onnxgc.planning.allocations import allocations
from onnxgc.planning.arena import simulate_arena
from onnxgc.planning.schedule import Recompute
from onnxgc.runtime.measure import Measurement, measure, random_feeds
from onnxgc.runtime.ort import ARENA, SessionSettings
from onnxgc.runtime.profile import RunProfile
from scripts.benchmarking.networks import light_networks, network_shapes

REGULAR, PLANNED, BUDGET, LEAST = "regular", "planned", "60%", "min"
PLANS = (REGULAR, PLANNED, BUDGET)
# How far simulated bytes may be from requested ones, and the arena's model from bytes in use.
JUDGE_TOLERANCE = 0.01
ARENA_TOLERANCE = 0.03
_STEPS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """Which networks, in which size (their own where none is given), and seconds of a search."""

    only: tuple[str, ...] = ()
    batch: int = 2
    pixels: int | None = None
    time_limit: float = 10.0
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Residual:
    """A node whose own allocations are not what the judge says: `bytes` measured more than simulated."""

    node: str
    operator: str
    tensor: str
    what: str
    bytes: int


def run_peaks(options: Options) -> dict[str, Any]:
    """One row a network and plan, under a progress bar on stderr."""
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


def _row(path: Path, plan: str, options: Options) -> dict[str, Any]:
    found, result = _planned(path, plan, network_shapes(path, options.batch, options.pixels), options)
    planned = result.planned
    (name,) = planned.model.inputs
    measured = _measured(result, options)
    arena = simulate_arena(planned.schedule, planned.step.graph, ARENA, steps=_STEPS)
    return {
        "network": path.stem,
        "input": list(planned.model.types[name].shape),
        "plan": found,
        "simulated_bytes": planned.profile.peak_bytes,
        "requested_bytes": measured.requested_peak_bytes,
        "arena_bytes": arena.peak_bytes,
        "in_use_bytes": measured.in_use_peak_bytes,
        "worst": asdict(max(residuals(result, measured.runs[0]), key=lambda residual: abs(residual.bytes))),
    }


def _planned(
    path: Path, plan: str, shapes: Mapping[str, tuple[int, ...]], options: Options
) -> tuple[str, OptimizeResult]:
    """What was planned, and the plan: where none keeps to the budget, the one of the least peak."""

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
    model = result.planned.model
    described = {
        name: (dtype_name(model.types[name].dtype), model.types[name].shape)
        for name in (*model.inputs, *model.targets)
    }
    feeds = random_feeds(described, options.seed, model.types[model.outputs[0]].shape[1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.onnx"
        write_model(result.training_graph.model, file)
        settings = SessionSettings(threads=options.threads)
        return measure(file, feeds, settings=settings, runs=_STEPS)


def residuals(result: OptimizeResult, run: RunProfile) -> Iterator[Residual]:
    """What each node's outputs take, and its workspace where it was seen, less what the judge counts.

    A workspace is measured with the slack of its chunk: as much as that may have is no residual.
    """
    planned = result.planned
    steps = planned.schedule.steps
    source_of = {step.operator.name: step.source for step in steps if isinstance(step, Recompute)}
    measured = {
        name: figures for name, *figures in zip(run.order, run.held_bytes, run.workspace_bytes, strict=True)
    }
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
            if workspace and not 0 <= over < ARENA.most_dead_bytes:
                yield Residual(operator.name, kind, tensor, "workspace", over)
        simulated -= sum(storage.size_bytes for storage in step.freed)


def deviations(row: Mapping[str, Any]) -> tuple[float, float]:
    """Relative: of the judge from requested bytes, of the arena's model from bytes in use."""
    judge = row["simulated_bytes"] / row["requested_bytes"] - 1
    arena = row["arena_bytes"] / row["in_use_bytes"] - 1
    return judge, arena


def is_close(row: Mapping[str, Any]) -> bool:
    """Whether both are as near as they should be."""
    judge, arena = deviations(row)
    return abs(judge) <= JUDGE_TOLERANCE and abs(arena) <= ARENA_TOLERANCE


HEADINGS = (
    "network, input", "storing everything: simulated", "requested", "planned: simulated", "requested",
    f"within {BUDGET}: simulated", "requested", "off: simulated", "in use",
)  # fmt: skip


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row a network; with a star the least peak, where no plan was found within the budget."""
    networks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        networks.setdefault(f"{row['network']}, {'x'.join(map(str, row['input']))}", []).append(row)
    table = []
    for name, plans in networks.items():
        cells = [name]
        for row in plans:
            star = "*" if row["plan"] == LEAST else ""
            cells += [f"{row[key] / 10**6:,.1f}{star}" for key in ("simulated_bytes", "requested_bytes")]
        judge, arena = zip(*map(deviations, plans), strict=True)
        cells += [f"{max(map(abs, off)):.2%}" for off in (judge, arena)]
        table.append(cells)
    return table


def worst_residuals(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """The largest of all, one line each."""
    ordered = sorted(rows, key=lambda row: -abs(row["worst"]["bytes"]))
    return [
        f"{row['network']}, {row['plan']}: {row['worst']['what']} of {row['worst']['operator']} "
        f"'{row['worst']['node']}' ('{row['worst']['tensor']}'): {row['worst']['bytes']:+,} bytes"
        for row in ordered[:count]
    ]
