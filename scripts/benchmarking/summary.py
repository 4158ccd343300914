"""The one table of README.md, and what else is told there in a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarking import peaks
from scripts.benchmarking.records import read_record
from scripts.benchmarking.tables import markdown_table, megabytes, where

# Networks with much and with little to save; the last one has next to nothing without a budget.
NETWORKS = ("resnet50", "resnet152", "densenet121", "inception_v3", "mobilenet_v2", "nasnet", "vgg16")
CARD_NETWORK = "resnet50"


def summary(folder: Path) -> str:
    """Peaks of some networks, and below them equality, time and the other tables in a line each."""
    parts = [
        _peaks(folder),
        "\n".join(filter(None, (line(folder) for line in (_resnet50, _card, _exports, _torch)))),
    ]
    return "\n\n".join(part for part in parts if part)


def _peaks(folder: Path) -> str:
    record = read_record("peaks", folder)
    if record is None:
        return ""
    rows = [row for row in record["figures"]["rows"] if row["network"] in NETWORKS]
    ordered = sorted(rows, key=lambda row: NETWORKS.index(row["network"]))
    # The last two columns are how far the figures are off, which docs/results.md has.
    cells = [row[:-2] for row in peaks.table_rows(ordered)]
    headings = [heading.replace("requested", "measured") for heading in peaks.HEADINGS[:-2]]
    return f"{markdown_table(headings, cells)}\n\n({where(record)})"


def _resnet50(folder: Path) -> str:
    record = read_record("resnet50", folder)
    if record is None:
        return ""
    figures = record["figures"]
    same, times = figures["identical"], figures["step_seconds"]
    measured = figures["measured"]["make_session"]
    regular, planned = (measured[kind]["requested_bytes"] for kind in ("regular", "planned"))
    seconds = {kind: times[kind]["minimum"] for kind in ("regular", "planned", "torch")}
    return (
        f"- {figures['network']} at batch {figures['batch']}: {megabytes(regular)} to {megabytes(planned)} "
        f"MB, and a step takes {seconds['planned'] / seconds['regular']:.2f} times as long, which is "
        f"{seconds['planned'] / seconds['torch']:.2f} of torch eager's time on "
        f"{record['environment']['threads']} threads. The loss is "
        f"{'' if same['loss'] else 'NOT '}bit-identical to storing everything, and so are "
        f"{same['gradients']} of {same['gradients_of']} gradients."
    )


def _card(folder: Path) -> str:
    lines = []
    for path in sorted(folder.glob("gpu/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        row = record["steps"]["4"]["networks"].get(CARD_NETWORK, {})
        if record["smoke"] or "regular" not in row:
            continue
        regular, planned = row["regular"], row["planned"]
        longer = min(planned["step_seconds"]) / min(regular["step_seconds"])
        lines.append(
            f"- {CARD_NETWORK} at batch {row['shape'][0]} on one {record['card']}: "
            f"{megabytes(regular['measured_peak_bytes'])} to {megabytes(planned['measured_peak_bytes'])} MB, "
            f"in {longer:.2f} times the time."
        )
    return "\n".join(lines)


def _exports(folder: Path) -> str:
    record = read_record("gradients", folder)
    if record is None:
        return ""
    rows = record["figures"]["rows"]
    models = {row["model"] for row in rows}
    right = sum(bool(row.get("holds")) for row in rows)
    return (
        f"- Exports of {len(models)} PyTorch models (ResNet, ViT, BERT, GPT-2, Llama, T5, LSTM, ...): "
        f"in {right} of {len(rows)} files no parameter's gradient is more than twice as far from float64 as "
        "PyTorch's own."
    )


def _torch(folder: Path) -> str:
    record = read_record("torch", folder)
    if record is None:
        return ""
    rows = [row for row in record["figures"]["rows"] if "error" not in row]
    extra = {name: [_extra(row, name) for row in rows] for name in _BESIDE_CHECKPOINTS}
    by_hand, ours = (f"{min(found):.2f} to {max(found):.2f}" for found in extra.values())
    return (
        f"- In PyTorch, {len(rows)} models as they are: `torch.utils.checkpoint` of each block takes "
        f"{by_hand} times eager's time, `onnxgc.torch.checkpoint` in the same memory {ours}."
    )


_BESIDE_CHECKPOINTS = ("per-block checkpoint", "ours within per-block")


def _extra(row: Mapping[str, Any], contender: str) -> float:
    best = {name: min(seconds) for name, seconds in row["seconds"].items()}
    return float(best[contender] / best["eager"])
