"""A benchmark's tables: the row of the paper's Table 1, and all figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from onnxgc.report.budgets import duration, percent
from onnxgc.report.comparison import Cells, figure
from onnxgc.report.tables import megabytes

Report = Mapping[str, Any]
_NOT_MEASURED = "-"
_PEAKS = (
    ("peak, simulated", "simulated_peak_bytes"),
    ("  measured", "measured_requested_bytes"),
    ("  in use, with slack", "measured_in_use_bytes"),
    ("without gradients, simulated", "simulated_activation_peak_bytes"),
    ("  measured", "measured_activation_bytes"),
)


def paper_row(report: Report) -> Cells:
    """One row, as in the paper's Table 1: peaks without parameters' gradients, and times of a step."""
    regular, planned = report["regular"], report["planned"]
    # Updates use gradients up: there are none to leave out.
    key = "measured_requested_bytes" if report.get("optimizer") else "measured_activation_bytes"
    peaks = [side[key] for side in (regular, planned)]
    seconds = [side["best_seconds"] for side in (regular, planned)]
    cut_off = None if None in peaks or not peaks[0] else 1 - peaks[1] / peaks[0]
    row = (
        f"{PurePath(report['model']).stem}, {report['batch']}",
        *(_NOT_MEASURED if size is None else figure(size) for size in peaks),
        _share(cut_off),
        *(_NOT_MEASURED if taken is None else duration(taken) for taken in seconds),
        _share(report["extra_time_ratio"]),
    )
    shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in report["inputs"].values())
    headings = ("network, batch", "all MB", "planned MB", "cut off", "all", "planned", "overhead")
    return Cells(f"{report['model']}, {shapes}: one training step", headings, [row])


def figures_table(report: Report) -> Cells:
    """Every figure of both files, and the plan's as a share of the other's."""
    regular, planned = report["regular"], report["planned"]
    rows = []
    for label, key in _PEAKS:
        sizes = [side[key] for side in (regular, planned)]
        shown = [_NOT_MEASURED if size is None else megabytes(size) for size in sizes]
        rows.append((label, *shown, _share(None if None in sizes or not sizes[0] else sizes[1] / sizes[0])))
    for label, key in (("step, best", "best_seconds"), ("  median", "median_seconds")):
        times = [side[key] for side in (regular, planned)]
        shown = [_NOT_MEASURED if taken is None else duration(taken) for taken in times]
        rows.append((label, *shown, _share(None if None in times else times[1] / times[0])))
    rates = [side["samples_per_second"] for side in (regular, planned)]
    rows += [
        ("samples a second", *(_NOT_MEASURED if rate is None else f"{rate:,.3g}" for rate in rates), ""),
        ("extra time, measured", "", _share(report["extra_time_ratio"]), ""),
        ("  predicted", "", percent(report["predicted_extra_time_ratio"]), ""),
    ]
    return Cells("all figures", ("", "stores everything", "planned", "of all"), rows)


def _what_counts(report: Report) -> str:
    optimizer = report.get("optimizer")
    if not optimizer:
        return "without the parameters' gradients"
    state = megabytes(optimizer["state_bytes"])
    return f"with {state} of {optimizer['name']}'s state; each step updates the parameters"


def run_lines(report: Report) -> list[str]:
    """What the tables' figures are, and where they were taken."""
    threads, budget = report["threads"], report["budget_bytes"]
    chosen = "the runtime's own number of threads" if threads is None else f"threads: {threads}"
    within = "" if budget is None else f" in {megabytes(budget)}"
    lines = [
        f"{report['provider'].removesuffix('ExecutionProvider')}: {report['device']}, {chosen}, "
        f"cores: {report['cores']}, ONNX Runtime {report['versions']['onnxruntime']}, "
        f"onnxgc {report['versions']['onnxgc']}",
        f"{report['runs']} steps of each in turns, after {report['warm_up']} to warm up; overhead is the "
        "median of what a turn's planned step takes beyond the other",
        f"first table: best times, and what was requested at once {_what_counts(report)}",
        f"plan: {report['solver']}{within}, {report['status']}; predicted time: {report['timing']}",
    ]
    if report["regular"]["failure"]:
        lines.append(f"storing everything was not measured: {report['regular']['failure']}")
    if report["planned"]["measured_requested_bytes"] is None:
        lines.append(f"no peak was measured: the profile has none of the arena of {report['provider']}")
    return lines


def _share(ratio: float | None) -> str:
    if ratio is None:
        return _NOT_MEASURED
    return percent(ratio) if ratio >= 0 else f"-{percent(-ratio)}"
