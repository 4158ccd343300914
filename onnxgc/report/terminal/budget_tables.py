"""Tables and lines of `optimize` with a budget."""

from __future__ import annotations

from rich.table import Table

from onnxgc.report.data.optimize_report import FrontierFigures, OptimizeReport
from onnxgc.report.terminal.plots import CHOSEN, POINT, scatter_plot
from onnxgc.report.text.trade_off import FRONTIER_HEADINGS, OPTIMAL, chosen_point, gap_text
from onnxgc.report.text.units import duration, megabytes, percent

_ORDERS = {"free": "free (may differ from the model's)", "fixed": "fixed (the model's)"}


def plan_within_budget(report: OptimizeReport) -> Table:
    """Memory and time of the baseline and the plan."""
    found, planned = report["budget"], report["planned"]["simulated_peak_bytes"]
    regular = report["regular"]["simulated_peak_bytes"]

    def peak_row(label: str, size_bytes: int | None, stored: str = "") -> None:
        if size_bytes is not None:
            share = f"{size_bytes / regular:.0%}" if regular else ""
            table.add_row(label, stored, megabytes(size_bytes), share)

    table = Table(title=f"{report['model']}: one training step", title_justify="left")
    table.add_column("")
    for heading in ("baseline", "planned", ""):
        table.add_column(heading, justify="right")
    peak_row("memory budget", found["bytes"])
    peak_row("simulated peak", planned, megabytes(regular))
    peak_row("  reordering only", found["order_alone_peak_bytes"])
    if found["bytes"] is None:
        peak_row("  lower bound", report["lower_bound_bytes"])
    table.add_section()
    if found["most_extra_time_ratio"] is not None:
        table.add_row("extra time allowed", "", percent(found["most_extra_time_ratio"]), "")
    before, extra = found["regular_seconds"], found["extra_time_ratio"]
    table.add_row("time", duration(before), duration(before * (1 + extra)), "")
    table.add_row("  extra time", "", percent(extra), "")
    table.add_row("  lower bound on extra time", "", percent(found["lower_bound_ratio"]), "")
    if found["gap"] > 0:
        table.add_row("  gap", "", percent(found["gap"]), "of the time")
        table.add_row("", "", percent(found["gap_of_extra"]), "of the extra time")
    return table


def frontier_table(report: OptimizeReport) -> Table:
    """The trade-off, a row for each budget; the chosen plan has a mark."""
    regular = report["regular"]["simulated_peak_bytes"]
    table = Table(title="extra time for each budget", title_justify="left")
    for heading in ("", *FRONTIER_HEADINGS):
        table.add_column(heading, justify="right")
    for budget, mark, point in sorted(_points(report), key=lambda row: (-row[0], row[1])):
        table.add_row(
            mark,
            megabytes(budget),
            f"{budget / regular:.0%}" if regular else "",
            megabytes(point["simulated_peak_bytes"]),
            percent(point["extra_time_ratio"]),
            percent(point["lower_bound_ratio"]),
            gap_text(point),
        )
    return table


def frontier_plot(report: OptimizeReport) -> str:
    """The trade-off as a plot of extra time over simulated peak."""
    marked = [
        ((point["simulated_peak_bytes"], point["extra_time_ratio"]), mark or POINT)
        for _, mark, point in _points(report)
    ]
    peaks = [peak for (peak, _), _ in marked]
    extras = [extra for (_, extra), _ in marked]
    picture = scatter_plot(
        marked,
        (megabytes(min(peaks)), "simulated peak", megabytes(max(peaks))),
        (percent(min(extras)), percent((min(extras) + max(extras)) / 2), percent(max(extras))),
    )
    is_chosen = any(mark == CHOSEN for _, mark in marked)
    return f"extra time of the best plans found{f' ({CHOSEN}: chosen)' if is_chosen else ''}\n{picture}"


def _points(report: OptimizeReport) -> list[tuple[int, str, FrontierFigures]]:
    """Budgets of the trade-off with marks and plans; last the chosen plan, if a budget was given."""
    found = report["budget"]
    points = [(point["budget_bytes"], "", point) for point in report["frontier"]]
    if found["bytes"] is not None or found["most_extra_time_ratio"] is not None:
        chosen = chosen_point(report)
        points.append((chosen["budget_bytes"], CHOSEN, chosen))
    return points


def verdict_on_time(report: OptimizeReport) -> str:
    """The quality of the plan, the time of the search, and the source of durations."""
    found, is_optimal = report["budget"], report["status"] == OPTIMAL
    if found["bytes"] is not None:
        quality = "no plan within the budget takes less time"
        if not is_optimal:
            quality = f"at most {percent(found['gap'])} of the time could still be saved"
    else:
        quality = "no plan has a lower peak, or less time at this peak"
        if not is_optimal:
            quality = "the lowest peak found; a longer search (--time-limit) may find a lower one"
    return (
        f"{report['status']}: {quality} ({report['vertices']} tensors, {report['operators']} operators); "
        f"{report['seconds']['total']:.1f} s\n"
        f"durations: {found['timing']}; operator order: {_ORDERS[found['order']]}"
    )
