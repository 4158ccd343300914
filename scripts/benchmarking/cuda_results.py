"""Records of `scripts/gpu_check.py`, one for each card."""

from collections.abc import Mapping
from typing import Any

from scripts.benchmarking.records import Record
from scripts.benchmarking.tables import markdown_table, megabytes

HEADINGS = (
    "network, batch", "baseline: simulated", "measured", "planned: simulated", "measured", "ratio",
    "step, ms: baseline", "planned", "ratio",
)  # fmt: skip


def measured_networks(record: Record) -> dict[str, Any]:
    """Figures of networks whose peaks were measured; none in a record of a smoke run, without CUDA."""
    return _rows(record, "peak") | _rows(record, "table1")


def networks_in_forms(record: Record, provider: str) -> dict[str, Any]:
    """Figures of networks in the forms of a provider; the first records have those for CPUs only."""
    steps = [_rows(record, step) for step in ("peak", "forms")]
    return {name: row for rows in steps for name, row in rows.items() if row.get("forms", "cpu") == provider}


def step_seconds(figures: Mapping[str, Any]) -> float:
    """Seconds of a step: the median, or the best of the three in records of the first schema."""
    return float(figures.get("median_seconds") or min(figures["step_seconds"]))


def _rows(record: Record, step: str) -> dict[str, Any]:
    if record["smoke"]:
        return {}
    steps = record["groups"].get("steps", {}).get("steps", {})
    networks: Mapping[str, Any] = steps.get(step, {}).get("rows", {})
    return {name: row for name, row in networks.items() if "regular" in row}


def results_section(record: Record) -> str:
    rows = [_document_row(name, row) for name, row in measured_networks(record).items()]
    if not rows:
        return ""
    group = record["groups"]["steps"]
    versions = group["versions"]
    runtime = versions["onnxruntime-gpu"] or versions["onnxruntime"]
    return (
        f"**On CUDA** ({record['card']}, ONNX Runtime {runtime}, {group['date'][:10]}): one training step "
        "in float32. Peaks are requested bytes in MB, parameters' gradients included. Where a measured peak "
        f"exceeds the simulated one, convolutions allocated workspaces:\n\n{markdown_table(HEADINGS, rows)}"
    )


def _document_row(network: str, row: Mapping[str, Any]) -> list[str]:
    graphs = (row["regular"], row["planned"])
    times = [step_seconds(figures) * 1e3 for figures in graphs]
    peaks = (megabytes(figures[f"{kind}_peak_bytes"]) for figures in graphs for kind in ("simulated", "measured"))
    return [
        f"{network}, {row['shape'][0]}",
        *peaks,
        f"{row['measured_ratio']:.2f}",
        *(f"{time:.0f}" for time in times),
        f"{times[1] / times[0]:.2f}",
    ]
