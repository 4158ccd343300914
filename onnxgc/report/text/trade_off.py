"""The trade-off between extra time and peak."""

from onnxgc.report.data.optimize_report import FrontierFigures, OptimizeReport
from onnxgc.report.text.units import megabytes, percent

FRONTIER_HEADINGS = ("budget", "of baseline", "peak", "extra time", "lower bound", "gap")
OPTIMAL = "optimal"


def chosen_point(report: OptimizeReport) -> FrontierFigures:
    budget, peak = report["budget"], report["planned"]["simulated_peak_bytes"]
    return {
        "budget_bytes": budget["bytes"] or peak,
        "simulated_peak_bytes": peak,
        "status": report["status"],
        "extra_time_ratio": budget["extra_time_ratio"],
        "lower_bound_ratio": budget["lower_bound_ratio"],
        "gap": budget["gap"],
        "gap_of_extra": budget["gap_of_extra"],
    }


def frontier_cells(report: OptimizeReport, point: FrontierFigures) -> list[str]:
    """A point of the trade-off in the columns of `FRONTIER_HEADINGS`."""
    baseline = report["regular"]["simulated_peak_bytes"]
    return [
        megabytes(point["budget_bytes"]),
        f"{point['budget_bytes'] / baseline:.0%}" if baseline else "",
        megabytes(point["simulated_peak_bytes"]),
        percent(point["extra_time_ratio"]),
        percent(point["lower_bound_ratio"]),
        percent(point["gap"]) if point["gap"] > 0 else OPTIMAL,
    ]
