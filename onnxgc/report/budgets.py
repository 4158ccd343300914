"""What the command line shows of plans under a budget of memory or of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from onnxgc.report.plots import CHOSEN, POINT, scatter_plot
from onnxgc.report.tables import megabytes

Figures = Mapping[str, Any]
_OPTIMAL = "optimal"
_ORDERS = {"free": "in any order", "fixed": "in the model's order"}


def percent(ratio: float) -> str:
    """A share with as many digits as say something."""
    size = 100 * ratio
    return f"{size:.0f}%" if size >= 100 else f"{size:.1f}%" if size >= 10 else f"{size:.2f}%"


def duration(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, three digits each."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} us"


def plan_within_budget(report: Figures) -> Table:
    """The result of `optimize` with a budget: memory and time, storing everything against the plan."""
    found, planned = report["budget"], report["planned"]["simulated_peak_bytes"]
    regular = report["regular"]["simulated_peak_bytes"]

    def peak_row(label: str, size_bytes: int | None, stored: str = "") -> None:
        if size_bytes is not None:
            share = f"{size_bytes / regular:.0%}" if regular else ""
            table.add_row(label, stored, megabytes(size_bytes), share)

    table = Table(title=f"{report['model']}: one training step", title_justify="left")
    table.add_column("")
    for heading in ("stores everything", "planned", ""):
        table.add_column(heading, justify="right")
    peak_row("memory budget", found["bytes"])
    peak_row("simulated peak", planned, megabytes(regular))
    peak_row("  by reordering alone", found["order_alone_peak_bytes"])
    if found["bytes"] is None:
        peak_row("  no plan is below", report["lower_bound_bytes"])
    table.add_section()
    if found["most_extra_time_ratio"] is not None:
        table.add_row("extra time allowed", "", percent(found["most_extra_time_ratio"]), "")
    before, extra = found["regular_seconds"], found["extra_time_ratio"]
    table.add_row("time", duration(before), duration(before * (1 + extra)), "")
    table.add_row("  extra", "", percent(extra), "")
    table.add_row("  no plan adds less than", "", percent(found["lower_bound_ratio"]), "")
    if found["gap"] > 0:
        table.add_row("  gap", "", percent(found["gap"]), "of the time")
        table.add_row("", "", percent(found["gap_of_extra"]), "of the extra")
    return table


FRONTIER_HEADINGS = ("budget", "of all", "peak", "extra time", "at least", "gap")


def frontier_table(report: Figures) -> Table:
    """The trade-off, a row for each budget; what is chosen has a mark."""
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
            percent(point["gap"]) if point["gap"] > 0 else _OPTIMAL,
        )
    return table


def frontier_plot(report: Figures) -> str:
    """The trade-off as a picture: simulated peak to the right, extra time up."""
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


def _points(report: Figures) -> list[tuple[int, str, Figures]]:
    """Budgets of the trade-off with what was found for each; last the chosen plan, if one was asked for."""
    found = report["budget"]
    points = [(point["budget_bytes"], "", point) for point in report["frontier"]]
    peak = report["planned"]["simulated_peak_bytes"]
    if found["bytes"] is not None or found["most_extra_time_ratio"] is not None:
        points.append((found["bytes"] or peak, CHOSEN, {**found, "simulated_peak_bytes": peak}))
    return points


def verdict_on_time(report: Figures) -> str:
    """How good the plan is, what times are taken from, and how long it took to find."""
    found, is_optimal = report["budget"], report["status"] == _OPTIMAL
    if found["bytes"] is not None:
        quality = "no plan within the budget takes less time"
        if not is_optimal:
            quality = f"at most {percent(found['gap'])} of the time could still be saved"
    else:
        quality = "no plan has a lower peak, and none of this peak takes less time"
        if not is_optimal:
            quality = "the least peak found; more time (--time-limit) may find a lower one"
    return (
        f"{report['status']}: {quality} ({report['vertices']} tensors, {report['operators']} operators); "
        f"{report['seconds']['total']:.1f} s\n"
        f"times: {found['timing']}; first runs: {_ORDERS[found['order']]}"
    )
