"""Plans of `optimize` without options beside those of the solver `peak`, the default before, in seconds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from onnxgc.api import OptimizeResult, optimize
from onnxgc.api.budget_plans import BudgetRequest
from scripts.benchmarking.command_options import add_only
from scripts.benchmarking.records import MODELS, Progress, Record, read_records, write_record
from scripts.benchmarking.table1 import paper_rows
from scripts.benchmarking.tables import markdown_table, megabytes, print_table

PLANS = {"peak": "peak", "default": None}
_IN_SUMMARY = "resnet50"
_HEADINGS = (
    "network, batch", "baseline, MB", "`peak`: MB", "extra time", "s", "default: MB", "extra time", "s",
    "of `peak`",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add_only(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a plan of the solver `peak` has a lower peak in no more time."""
    progress = Progress()
    known = {} if not arguments.only else _recorded()
    for name, row in paper_rows().items():
        if arguments.only and name not in arguments.only:
            continue
        progress(name)
        shape = (int(row["batch"]), *map(int, row["input"].split("x")))
        known[name] = {"batch": shape[0], **{plan: _figures(name, shape, plan) for plan in PLANS}}
        write_record("default", known, folder=arguments.record)
    print_table("plans without options", _HEADINGS[1:], list(map(list, _rows(known))), width=120)
    worse = [name for name, row in known.items() if _dominates(row["peak"], row["default"])]
    print(f"dominated: {', '.join(worse) or 'none'}")
    return 1 if worse else 0


def _recorded() -> dict[str, Any]:
    return {name: row for record in read_records("default") for name, row in record["figures"].items()}


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
    table = markdown_table(_HEADINGS, list(map(list, _rows(record["figures"]))))
    return (
        "**Plans without options** on the networks of the paper's Table 1, with its batch sizes. `peak` is "
        "the solver's plan by cuts, *default* that of `optimize` without options: the least peak found in ten"
        " seconds within 20% extra time, or that of `peak`. Peaks are simulated for the CPU, extra time is "
        f"by the data sheet of a CPU, seconds include reading the model.\n\n{table}"
    )
