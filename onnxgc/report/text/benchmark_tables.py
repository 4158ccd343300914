"""Tables of a benchmark: the row of the paper's Table 1, and all figures."""

from collections.abc import Callable
from pathlib import PurePath

from onnxgc.report.data.bench_report import BenchReport
from onnxgc.report.text.text_table import Cells
from onnxgc.report.text.units import duration, figure, megabytes, percent, shape_text

_NOT_MEASURED = "-"


def paper_row(report: BenchReport) -> Cells:
    """One row, as in the paper's Table 1: peaks without parameter gradients, and times of a step."""
    regular, planned = report["regular"], report["planned"]
    # A step with updates returns no gradients to exclude.
    if report.get("optimizer"):
        peaks = [regular["measured_requested_bytes"], planned["measured_requested_bytes"]]
    else:
        peaks = [regular["measured_activation_bytes"], planned["measured_activation_bytes"]]
    seconds = [side["best_seconds"] for side in (regular, planned)]
    share = _quotient(peaks[1], peaks[0])
    row = (
        f"{PurePath(report['model']).stem}, {report['batch']}",
        *(_written(size, figure) for size in peaks),
        _share(None if share is None else 1 - share),
        *(_written(time, duration) for time in seconds),
        _share(report["extra_time_ratio"]),
    )
    shapes = ", ".join(map(shape_text, report["inputs"].values()))
    headings = ("network, batch", "baseline MB", "planned MB", "peak reduction", "baseline", "planned", "extra time")
    return Cells(f"{report['model']}, {shapes}: one training step", headings, [row])


def figures_table(report: BenchReport) -> Cells:
    regular, planned = report["regular"], report["planned"]

    def row(label: str, before: float | None, after: float | None, text: Callable[[float], str]) -> None:
        rows.append((label, _written(before, text), _written(after, text), _share(_quotient(after, before))))

    rows: list[tuple[str, ...]] = []
    row("peak, simulated", regular["simulated_peak_bytes"], planned["simulated_peak_bytes"], megabytes)
    row("  measured", regular["measured_requested_bytes"], planned["measured_requested_bytes"], megabytes)
    row("  in use, with slack", regular["measured_in_use_bytes"], planned["measured_in_use_bytes"], megabytes)
    before, after = (side["simulated_activation_peak_bytes"] for side in (regular, planned))
    row("without gradients, simulated", before, after, megabytes)
    row("  measured", regular["measured_activation_bytes"], planned["measured_activation_bytes"], megabytes)
    row("step, best", regular["best_seconds"], planned["best_seconds"], duration)
    row("  median", regular["median_seconds"], planned["median_seconds"], duration)
    rates = [side["samples_per_second"] for side in (regular, planned)]
    rows += [
        ("samples per second", *(_written(rate, lambda value: f"{value:,.3g}") for rate in rates), ""),
        ("extra time, measured", "", _share(report["extra_time_ratio"]), ""),
        ("  predicted", "", percent(report["predicted_extra_time_ratio"]), ""),
    ]
    return Cells("all figures", ("", "baseline", "planned", "of baseline"), rows)


def run_lines(report: BenchReport) -> list[str]:
    """The meaning of the tables' figures, and the conditions of the run."""
    threads, budget = report["threads"], report["budget_bytes"]
    chosen = "the runtime's own number of threads" if threads is None else f"threads: {threads}"
    within = "" if budget is None else f" within {megabytes(budget)}"
    lines = [
        f"{report['provider'].removesuffix('ExecutionProvider')}: {report['device']}, {chosen}, "
        f"cores: {report['cores']}, ONNX Runtime {report['versions']['onnxruntime']}, "
        f"onnxgc {report['versions']['onnxgc']}",
        f"{report['runs']} interleaved steps of each, after {report['warm_up']} to warm up; extra time is "
        "the median over pairs of steps",
        f"first table: best times, and the peak of requested memory {_what_counts(report)}",
        f"plan: {report['solver']}{within}, {report['status']}; predicted time: {report['timing']}",
    ]
    if report["regular"]["failure"]:
        lines.append(f"the baseline was not measured: {report['regular']['failure']}")
    if report["planned"]["measured_requested_bytes"] is None:
        lines.append(f"no peak was measured: the profile does not cover the arena of {report['provider']}")
    return lines


def _what_counts(report: BenchReport) -> str:
    optimizer = report.get("optimizer")
    if not optimizer:
        return "without parameter gradients"
    state = megabytes(optimizer["state_bytes"])
    return f"including {state} of {optimizer['name']} state; each step updates the parameters"


def _quotient(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference


def _written(value: float | None, text: Callable[[float], str]) -> str:
    return _NOT_MEASURED if value is None else text(value)


def _share(ratio: float | None) -> str:
    if ratio is None:
        return _NOT_MEASURED
    return percent(ratio) if ratio >= 0 else f"-{percent(-ratio)}"
