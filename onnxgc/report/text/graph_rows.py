"""Plans for a bare graph, a row for each plan."""

from onnxgc.report.data.compare_report import GraphReport
from onnxgc.report.text.text_table import BEST, Cells
from onnxgc.report.text.units import percent


def graph_table(report: GraphReport) -> Cells:
    """A row for each plan, the lowest peak first, in the graph's units."""
    is_budget = report["rows"][0]["sum"] is None
    rows = [
        (
            f"{' ' if number else BEST} {row['name']}",
            _number(row["peak"]),
            percent(row["peak"] / report["baseline_peak"] if report["baseline_peak"] else 0.0),
            percent(row["overhead"] or 0.0) if is_budget else _number(row["sum"] or 0),
            _number(row["lower_bound"]),
            row["status"],
            f"{row['seconds']:.1f} s",
        )
        for number, row in enumerate(report["rows"])
    ]
    value = "extra time" if is_budget else "sum"
    title = f"{report['model']}, {report['vertices']:,} vertices, baseline peak {_number(report['baseline_peak'])}"
    return Cells(title, ("plan", "peak", "share", value, "lower bound", "status", "search"), rows)


def _number(value: float) -> str:
    return f"{value:,.15g}"
