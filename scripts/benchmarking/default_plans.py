"""Plans of `optimize` without options beside those of the solver `peak`, the default before, in seconds."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxgc.api import OptimizeResult, optimize
from onnxgc.api.budget_plans import BudgetRequest
from scripts.benchmarking.records import MODELS, Progress, Record
from scripts.benchmarking.table1 import paper_networks
from scripts.benchmarking.tables import markdown_table, megabytes

PLANS = {"peak": "peak", "default": None}
_IN_SUMMARY = "resnet50"
_HEADINGS = (
    "network, batch", "baseline, MB", "`peak`: MB", "extra time", "s", "default: MB", "extra time", "s",
    "of `peak`",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    only: tuple[str, ...] = ()


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Figures by network and plan; with `only`, rows of an earlier record stay."""
    known = dict(progress.recorded() or {}) if options.only else {}
    for name, (batch, pixels) in paper_networks().items():
        if not options.only or name in options.only:
            progress(name)
            known[name] = {"batch": batch, **{plan: _figures(name, (batch, *pixels), plan) for plan in PLANS}}
            progress.record(known)
    return known


def failures(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: the plan of `peak` has a lower peak in no more time"
        for name, row in figures.items()
        if _dominates(row["peak"], row["default"])
    ]


def _figures(name: str, shape: tuple[int, ...], plan: str) -> dict[str, Any]:
    started = time.perf_counter()
    result: OptimizeResult = optimize(
        MODELS / f"{name}.onnx",
        input_shapes={"x": shape},
        solver=PLANS[plan],
        provider="cpu",
        check=False,
        dry_run=True,
    )
    seconds = time.perf_counter() - started
    planned = result.planned
    durations = BudgetRequest().durations(planned.step)[0]
    return {
        "regular_bytes": planned.regular_profile.peak_bytes,
        "peak_bytes": planned.profile.peak_bytes,
        "extra_time": planned.extra_time_ratio(durations),
        "seconds": seconds,
    }


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["peak_bytes"] < other["peak_bytes"] and one["extra_time"] <= other["extra_time"])


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, row in figures.items():
        cells = [
            cell
            for plan in PLANS
            for cell in (
                megabytes(row[plan]["peak_bytes"]),
                f"{row[plan]['extra_time']:.1%}",
                f"{row[plan]['seconds']:.1f}",
            )
        ]
        share = row["default"]["peak_bytes"] / row["peak"]["peak_bytes"]
        baseline = megabytes(row["peak"]["regular_bytes"])
        rows.append((f"{name}, {row['batch']}", baseline, *cells, f"{share:.2f}"))
    return rows


def summary_line(record: Record) -> str:
    row = record["figures"].get(_IN_SUMMARY)
    if row is None:
        return ""
    peaks = [megabytes(row[plan]["peak_bytes"]) for plan in PLANS]
    return (
        f"- {_IN_SUMMARY} at batch {row['batch']}, simulated: {peaks[0]} MB by `--solver peak`, {peaks[1]} "
        f"by the search of the first command, at {row['default']['extra_time']:.0%} extra time."
    )


def results_section(record: Record) -> str:
    table = markdown_table(_HEADINGS, _rows(record["figures"]))
    return (
        "**Plans without options** on the networks of the paper's Table 1, with its batch sizes. `peak` is "
        "the solver's plan by cuts, *default* that of `optimize` without options: the least peak found in ten"
        " seconds within 20% extra time, or that of `peak`. Peaks are simulated for the CPU, extra time is "
        f"by the data sheet of a CPU, seconds include reading the model.\n\n{table}"
    )
