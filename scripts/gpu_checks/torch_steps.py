"""Steps with PyTorch: networks in several ways, modules under budgets, and transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict

from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.kernels import kernels_line, kernels_row
from scripts.gpu_checks.profile_reports import counts_line, fallback_report
from scripts.gpu_checks.settings import Json, Network, Sequences
from scripts.gpu_checks.training_files import BASELINE, GRAPHS, Recipe

EAGER = "eager"
WAYS = (EAGER, "channels_last", "channels_last amp", "checkpointed")
FIRST_WAYS = ("compiled", "cuda_graph", "from_onnx")
"""Of the first network only."""
PLANNED_WAYS = (
    EAGER,
    "checkpointed",
    "planned=80%",
    "planned=60%",
    "planned=40%",
    "planned=min",
    "compiled",
    "compiled activation_memory_budget=0.5",
    "compiled planned=60%",
)
ONNX_WAYS = ("from_onnx", "from_onnx planned=60%")
# Compilation needs a compiler and minutes on a CPU.
_SLOW = ("compiled", "80%", "40%", "min")


def torch_step(check: Check) -> Finding:
    """PyTorch on the same card, all networks eager first."""
    networks = check.options.paper_networks
    jobs = [(network, way) for way in WAYS for network in networks]
    jobs += [(networks[0], way) for way in FIRST_WAYS]
    return _ways(check, "torch", jobs)


def modules_step(check: Check) -> Finding:
    """Planned modules beside eager, per-block checkpointing and PyTorch's own budget."""
    network, sequences = check.options.paper_networks[0], check.options.sequences[0]
    jobs: list[tuple[Network | Sequences, str]] = []
    for way in PLANNED_WAYS:
        jobs += [(network, way), (sequences, way)]
    return _ways(check, "modules", [*jobs, *((network, way) for way in ONNX_WAYS)])


def transformers_step(check: Check) -> Finding:
    """ONNX Runtime against PyTorch with its fused attention, and the longest kernels."""
    rows: dict[str, Json] = {}
    check.begin("transformers", {"networks": rows})
    for sequences in check.options.sequences:
        name, recipe = sequences.name, Recipe(sequences)
        for way in (EAGER, "amp", "checkpointed"):
            check.add_row(rows, f"{name}, {way}", functools.partial(_torch_row, check, sequences, way), _line)
        for graph in GRAPHS:
            row = functools.partial(_runtime_row, check, recipe, graph)
            check.add_row(rows, f"{name}, {graph}", row, _runtime_line)
        kernels = functools.partial(kernels_row, check, recipe, BASELINE)
        check.add_row(rows, f"{name}, kernels", kernels, kernels_line)
        check.forget(recipe)
    return _finding(rows, "networks")


def _ways(check: Check, step: str, jobs: Iterable[tuple[Network | Sequences, str]]) -> Finding:
    rows: dict[str, Json] = {}
    check.begin(step, {"rows": rows})
    for network, way in jobs:
        if check.options.smoke and any(word in way for word in _SLOW):
            continue
        row = functools.partial(_torch_row, check, network, way)
        check.add_row(rows, f"{network.name}, {way}", row, _line)
    return _finding(rows, "rows")


def _torch_row(check: Check, network: Network | Sequences, way: str) -> Json:
    return check.worker("torch", {"network": asdict(network), "way": way}, f"torch-{network.name}-{way}")


def _runtime_row(check: Check, recipe: Recipe, graph: str) -> Json:
    measured = check.measured(recipe, graph)
    return {**measured.figures, "fallback": fallback_report(measured.steady, check.options.provider)}


def _finding(rows: Json, key: str) -> Finding:
    """Holds if all figures were measured; one that the provider lacks is no failure."""
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    reached = [name for name, row in rows.items() if row["status"] != "not reached"]
    line = "; ".join([f"{len(reached)} of {len(rows)} figures", *failed])
    return Finding(not failed and bool(reached), line, {key: rows})


def _line(row: Json) -> str:
    if "median_seconds" not in row:
        return str(row["status"])
    parts = [f"{1e3 * row['median_seconds']:.1f} ms"]
    if "allocated_peak_bytes" in row:
        parts.append(f"peak {(row['allocated_peak_bytes'] - row['kept_bytes']) / 1e6:.0f} MB")
    if "simulated_peak_bytes" in row:
        parts.append(f"simulated {row['simulated_peak_bytes'] / 1e6:.0f} MB")
    return ", ".join([*parts, row["source"]])


def _runtime_line(row: Json) -> str:
    return (
        f"{1e3 * row['median_seconds']:.1f} ms, simulated {row['simulated_peak_bytes'] / 1e6:.0f} MB, "
        f"measured {row['measured_peak_bytes'] / 1e6:.0f} MB, compute elsewhere "
        f"{counts_line(row['fallback']['compute_elsewhere'])}"
    )
