"""Tables and lines of `optimize` with a budget."""

from rich.table import Table

from onnxgc.report.data.optimize_report import FrontierFigures, LargestReport, OptimizeReport
from onnxgc.report.terminal.command_tables import add_device_memory, figure_columns, step_table, titled_table
from onnxgc.report.terminal.plots import CHOSEN, POINT, scatter_plot
from onnxgc.report.text.trade_off import FRONTIER_HEADINGS, OPTIMAL, chosen_point, frontier_cells
from onnxgc.report.text.units import duration, megabytes, percent

_ORDERS = {"free": "free (may differ from the model's)", "fixed": "fixed (the model's)"}


def plan_within_budget(report: OptimizeReport) -> Table:
    budget, planned = report["budget"], report["planned"]["simulated_peak_bytes"]
    baseline = report["regular"]["simulated_peak_bytes"]
    table = step_table(report)

    def peak_row(label: str, size_bytes: int | None, before: str = "") -> None:
        if size_bytes is not None:
            share = f"{size_bytes / baseline:.0%}" if baseline else ""
            table.add_row(label, before, megabytes(size_bytes), share)

    peak_row("memory budget", budget["bytes"])
    peak_row("simulated peak", planned, megabytes(baseline))
    peak_row("  reordering only", budget["order_alone_peak_bytes"])
    if budget["bytes"] is None:
        peak_row("  lower bound", report["lower_bound_bytes"])
    table.add_section()
    add_device_memory(table, report)
    table.add_section()
    if budget["most_extra_time_ratio"] is not None:
        table.add_row("extra time allowed", "", percent(budget["most_extra_time_ratio"]), "")
    before, extra = budget["regular_seconds"], budget["extra_time_ratio"]
    table.add_row("time", duration(before), duration(before * (1 + extra)), "")
    table.add_row("  extra time", "", percent(extra), "")
    table.add_row("  lower bound on extra time", "", percent(budget["lower_bound_ratio"]), "")
    if budget["gap"] > 0:
        table.add_row("  gap", "", percent(budget["gap"]), "of the time")
        table.add_row("", "", percent(budget["gap_of_extra"]), "of the extra time")
    return table


def frontier_table(report: OptimizeReport) -> Table:
    """The trade-off, a row for each budget; the chosen plan has a mark."""
    table = titled_table("extra time for each budget", *figure_columns("", *FRONTIER_HEADINGS))
    for mark, point in sorted(_points(report), key=lambda row: (-row[1]["budget_bytes"], row[0])):
        table.add_row(mark, *frontier_cells(report, point))
    return table


def frontier_plot(report: OptimizeReport) -> str:
    marked = [
        ((point["simulated_peak_bytes"], point["extra_time_ratio"]), mark or POINT) for mark, point in _points(report)
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


def _points(report: OptimizeReport) -> list[tuple[str, FrontierFigures]]:
    """Points of the trade-off with marks; last the chosen plan, if a budget was given."""
    budget = report["budget"]
    points = [("", point) for point in report["frontier"]]
    if budget["bytes"] is not None or budget["most_extra_time_ratio"] is not None:
        points.append((CHOSEN, chosen_point(report)))
    return points


def sizes_table(report: LargestReport) -> Table:
    title = f"{report['dimension']} in {megabytes(report['device_bytes'])}"
    table = titled_table(title, *figure_columns("size", "all memory", "extra time", "step", "sizes a second"))
    for point in report["points"]:
        table.add_row(
            f"{point['size']:,}",
            megabytes(point["total_bytes"]),
            percent(point["extra_time_ratio"]),
            duration(point["seconds"]),
            f"{point['per_second']:,.1f}",
        )
    return table


def sizes_plot(report: LargestReport) -> str:
    points = [((point["size"], point["per_second"]), POINT) for point in report["points"]]
    sizes, rates = ([place[axis] for place, _ in points] for axis in (0, 1))
    picture = scatter_plot(
        points, (f"{min(sizes):,}", "size", f"{max(sizes):,}"), (f"{min(rates):,.1f}", "", f"{max(rates):,.1f}")
    )
    return f"sizes a second, expected\n{picture}"


def verdict_on_time(report: OptimizeReport) -> str:
    """The quality of the plan, the time of the search, and the source of durations."""
    budget, is_optimal = report["budget"], report["status"] == OPTIMAL
    if budget["bytes"] is not None:
        quality = "no plan within the budget takes less time"
        if not is_optimal:
            quality = f"at most {percent(budget['gap'])} of the time could still be saved"
    else:
        quality = "no plan has a lower peak, or less time at this peak"
        if not is_optimal:
            quality = "the lowest peak found; a longer search (--time-limit) may find a lower one"
    return (
        f"{report['status']}: {quality} ({report['vertices']} tensors, {report['operators']} operators); "
        f"{report['seconds']['total']:.1f} s\n"
        f"durations: {budget['timing']}; operator order: {_ORDERS[budget['order']]}"
    )
