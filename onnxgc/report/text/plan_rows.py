"""Plans for one model, a row for each plan."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from onnxgc.report.data.compare_report import PlanRow, PlansReport
from onnxgc.report.text.text_table import BEST, Cells
from onnxgc.report.text.units import bound_text, figure, percent, shape_text

BUDGET, NO_FIT, NO_PLAN = "budget", "no fit", "-"
_TIME = "time"
_ALWAYS_EXPLAINED = ("per-block", "torch-budget", BUDGET)


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """A column of figures: its text, and its value for sorting."""

    heading: str
    written: Callable[[PlanRow], str]
    value: Callable[[PlanRow], float]


def _bound(row: PlanRow) -> str:
    if row["objective"] == _TIME and row["lower_bound_ratio"] is not None:
        return percent(row["lower_bound_ratio"])
    return figure(row["lower_bound_bytes"])


def _column(heading: str, value: Callable[[PlanRow], float], text: Callable[[float], str]) -> PlanColumn:
    return PlanColumn(heading, lambda row: text(value(row)), value)


PLAN_COLUMNS = (
    _column("peak MB", lambda row: row["simulated_peak_bytes"], figure),
    _column("share", lambda row: row["share_of_regular"], percent),
    _column("kept MB", lambda row: row["checkpoint_bytes"], figure),
    _column("extra time", lambda row: row["extra_time_ratio"], percent),
    _column("extra flops", lambda row: row["extra_flops_ratio"], percent),
    PlanColumn("lower bound", _bound, lambda row: row["lower_bound_bytes"]),
    PlanColumn(
        "gap", lambda row: "none" if row["status"] == "optimal" else percent(row["gap"]), lambda row: row["gap"]
    ),
)
"""Columns whose figures are the same in every run, unlike the time of the search."""


def plan_name(row: PlanRow) -> str:
    """The name of a plan, with a mark before the best."""
    return f"{BEST if row['best'] else ' '} {row['name']}"


def plans_title(report: PlansReport) -> str:
    shapes = ", ".join(map(shape_text, report["inputs"].values()))
    return f"{report['model']}, {shapes}: plans for one training step"


def plans_table(report: PlansReport) -> Cells:
    headings = ("plan", *(column.heading for column in PLAN_COLUMNS), "search")
    rows = [
        (
            plan_name(row),
            *(column.written(row) for column in PLAN_COLUMNS),
            "" if row["solve_seconds"] is None else f"{row['solve_seconds']:.1f} s",
        )
        for row in report["rows"]
    ]
    if any(item["name"] == BUDGET for item in report["left_out"]):
        rows.append((f"  {BUDGET}", NO_FIT, *("" for _ in headings[2:])))
    return Cells(plans_title(report), headings, rows)


def plans_lines(report: PlansReport) -> list[str]:
    """The meaning of the table's figures."""
    best = report["rows"][0]
    bound = bound_text(report["lower_bound_bytes"], report["bound_operator"], report["modules"])
    objectives: defaultdict[str, list[str]] = defaultdict(list)
    for row in report["rows"]:
        objectives[row["objective"]].append(row["name"])
    listed = "; ".join(f"{name} ({', '.join(rows)})" for name, rows in objectives.items())
    return [
        f"{BEST} lowest simulated peak; lower bound {bound}: at most {percent(best['peak_gap'])} of the peak "
        "could still be saved",
        "share: of the baseline's peak; kept: checkpoints; extra time and flops: recomputation, "
        f"as a share of the baseline; durations: {report['timing']}",
        f"lower bound and gap: of each row's own objective, in MB (of time: in %): {listed}",
    ]


def left_out_lines(report: PlansReport, *, every: bool) -> list[str]:
    """Reasons why requested rows are missing; without `every`, rows for other kinds of graphs are skipped."""
    shown = [item for item in report["left_out"] if every or item["name"] in _ALWAYS_EXPLAINED]
    return [f"{item['name']}: {item['reason']}" for item in shown]


def detail_lines(report: PlansReport) -> list[str]:
    return [f"{row['name']}: {row['detail']}" for row in report["rows"] if row["detail"]]
