"""The trade-off between extra time and peak."""

from __future__ import annotations

from onnxgc.report.data.optimize_report import FrontierFigures, OptimizeReport
from onnxgc.report.text.units import percent

FRONTIER_HEADINGS = ("budget", "of baseline", "peak", "extra time", "lower bound", "gap")
OPTIMAL = "optimal"


def chosen_point(report: OptimizeReport) -> FrontierFigures:
    """The chosen plan as a point of the trade-off."""
    found, peak = report["budget"], report["planned"]["simulated_peak_bytes"]
    return {
        "budget_bytes": found["bytes"] or peak,
        "simulated_peak_bytes": peak,
        "status": report["status"],
        "extra_time_ratio": found["extra_time_ratio"],
        "lower_bound_ratio": found["lower_bound_ratio"],
        "gap": found["gap"],
        "gap_of_extra": found["gap_of_extra"],
    }


def gap_text(point: FrontierFigures) -> str:
    return percent(point["gap"]) if point["gap"] > 0 else OPTIMAL
