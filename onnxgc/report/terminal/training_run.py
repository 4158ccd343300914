"""Lines and tables of `train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from onnxgc.report.text.units import megabytes


def run_line(described: Mapping[str, Any]) -> str:
    """The size of the run, its optimizer, and its memory."""
    return (
        f"{described['parameters']:,} parameters in {described['tensors']} tensors, "
        f"{described['optimizer']}, batches of {described['batch']}"
        + (f", {described['accumulate']} to an update" if described["accumulate"] > 1 else "")
        + f"; simulated peak {megabytes(described['simulated_peak_bytes'])}, including "
        f"{megabytes(described['state_bytes'])} of optimizer state"
    )


def epochs_table(history: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each epoch."""
    table = Table(title="epochs", title_justify="left")
    names = [name for name in ("validation_loss", "validation_accuracy") if any(name in e for e in history)]
    for heading in ("epoch", "updates", "loss", *(name.replace("_", " ") for name in names), "samples/s"):
        table.add_column(heading, justify="right")
    for entry in history:
        speed = entry["samples"] / max(entry["seconds"], 1e-9)
        table.add_row(
            str(entry["epoch"]),
            f"{entry['updates']:,}",
            f"{entry['loss']:.4f}",
            *(_metric(name, entry.get(name)) for name in names),
            f"{speed:,.0f}",
        )
    return table


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"
