"""The results in README.md: one table of peaks, and one line for each of the other benchmarks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarking import default_plans, peaks
from scripts.benchmarking.card import expected_line
from scripts.benchmarking.cuda_results import measured_networks, step_seconds
from scripts.benchmarking.records import Record, read_records
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes

# Networks with large and with small savings.
NETWORKS = ("resnet50", "resnet152", "densenet121", "inception_v3", "mobilenet_v2", "nasnet", "vgg16")
CARD_NETWORK = "resnet50"


def summary(folder: Path) -> str:
    table = "".join(map(_peaks, read_records("peaks", folder)))
    lines = "\n".join(
        filter(None, (line(record) for name, line in _LINES.items() for record in read_records(name, folder)))
    )
    return "\n\n".join(filter(None, (table, lines)))


def _peaks(record: Record) -> str:
    rows = [row for row in record["figures"]["rows"] if row["network"] in NETWORKS]
    ordered = sorted(rows, key=lambda row: NETWORKS.index(row["network"]))
    # The last two columns have differences of simulated and measured peaks, for docs/results.md.
    cells = [row[:-2] for row in peaks.table_rows(ordered)]
    headings = [heading.replace("requested", "measured") for heading in peaks.HEADINGS[:-2]]
    return f"{markdown_table(headings, cells)}\n\n({machine_of(record)})"


def _resnet50(record: Record) -> str:
    figures = record["figures"]
    same, times = figures["identical"], figures["step_seconds"]
    measured = figures["measured"]["make_session"]
    regular, planned = (measured[kind]["requested_bytes"] for kind in ("regular", "planned"))
    seconds = {kind: times[kind]["minimum"] for kind in ("regular", "planned", "torch")}
    return (
        f"- {figures['network']} at batch {figures['batch']}: {megabytes(regular)} to {megabytes(planned)} "
        f"MB. A step takes {seconds['planned'] / seconds['regular']:.2f} times the baseline's time, and "
        f"{seconds['planned'] / seconds['torch']:.2f} times torch eager's, on "
        f"{record['environment']['threads']} threads. The loss is "
        f"{'' if same['loss'] else 'NOT '}bit-identical to the baseline's, and so are {same['gradients']} of "
        f"{same['gradients_of']} gradients."
    )


def _card(record: Record) -> str:
    row = measured_networks(record).get(CARD_NETWORK)
    if row is None:
        return ""
    regular, planned = row["regular"], row["planned"]
    ratio = step_seconds(planned) / step_seconds(regular)
    return (
        f"- {CARD_NETWORK} at batch {row['shape'][0]} on one {record['card']}: "
        f"{megabytes(regular['measured_peak_bytes'])} to {megabytes(planned['measured_peak_bytes'])} MB, in "
        f"{ratio:.2f} times the time, with gradients in the forms for "
        f"{'CUDA' if row.get('forms') == 'cuda' else 'CPUs'}."
    )


def _exports(record: Record) -> str:
    rows = record["figures"]["rows"]
    passed = sum(bool(row.get("holds")) for row in rows)
    return (
        f"- Exports of {len({row['model'] for row in rows})} PyTorch models (ResNet, ViT, BERT, GPT-2, "
        f"Llama, T5, LSTM, ...): in {passed} of {len(rows)} files every parameter's gradient is at most "
        "twice as far from float64 as PyTorch's own."
    )


def _torch(record: Record) -> str:
    rows = [row for row in record["figures"]["rows"] if "error" not in row]
    contenders = ("per-block checkpoint", "ours within per-block")
    ratios = [[_time_ratio(row, contender) for row in rows] for contender in contenders]
    by_hand, ours = (f"{min(found):.2f} to {max(found):.2f}" for found in ratios)
    return (
        f"- {len(rows)} unchanged PyTorch modules: `torch.utils.checkpoint` of each block takes {by_hand} "
        f"times eager's time, `onnxgc.torch.checkpoint` in the same memory {ours}."
    )


def _time_ratio(row: Mapping[str, Any], contender: str) -> float:
    return float(row["seconds"][contender] / row["seconds"]["eager"])


_LINES: Mapping[str, Callable[[Record], str]] = {
    "resnet50": _resnet50,
    "default": default_plans.summary_line,
    "gpu": _card,
    "card": expected_line,
    "gradients": _exports,
    "torch": _torch,
}
