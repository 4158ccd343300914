"""Records of `scripts/gpu_check.py`, one for each card."""

from __future__ import annotations

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
    if record["smoke"]:
        return {}
    networks: Mapping[str, Any] = record["steps"]["4"]["networks"]
    return {name: row for name, row in networks.items() if "regular" in row}


def results_section(record: Record) -> str:
    rows = [_document_row(name, row) for name, row in measured_networks(record).items()]
    if not rows:
        return ""
    versions = record["versions"]
    runtime = versions["onnxruntime-gpu"] or versions["onnxruntime"]
    return (
        f"**On CUDA** ({record['card']}, ONNX Runtime {runtime}, {record['date'][:10]}): one training step "
        "in float32. Peaks are requested bytes in MB, parameters' gradients included. Where a measured peak "
        f"exceeds the simulated one, convolutions allocated workspaces:\n\n{markdown_table(HEADINGS, rows)}"
    )


def _document_row(network: str, row: Mapping[str, Any]) -> list[str]:
    graphs = (row["regular"], row["planned"])
    times = [min(figures["step_seconds"]) * 1e3 for figures in graphs]
    peaks = (
        megabytes(figures[f"{kind}_peak_bytes"]) for figures in graphs for kind in ("simulated", "measured")
    )
    return [
        f"{network}, {row['shape'][0]}",
        *peaks,
        f"{row['measured_ratio']:.2f}",
        *(f"{time:.0f}" for time in times),
        f"{times[1] / times[0]:.2f}",
    ]
