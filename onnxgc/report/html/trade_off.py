"""Extra time against peak for each budget, and the chosen plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.report.html.svg import WIDTH, coordinate, label_beside, level_lines, percent_of_width, stretched, ticks
from onnxgc.report.html.tables import Column, table
from onnxgc.report.html.tags import Html, joined, tag
from onnxgc.report.text.trade_off import FRONTIER_HEADINGS, chosen_point, frontier_cells
from onnxgc.report.text.units import megabytes, percent

HEIGHT = 220
_MARGIN = 0.06


@dataclass(frozen=True, slots=True)
class _Axes:
    """Positions of a peak and an extra time: a share of the width, and units from the top."""

    least_bytes: int
    most_bytes: int
    max_extra: float

    def x(self, peak_bytes: int) -> float:
        span = self.most_bytes - self.least_bytes
        return 0.5 if not span else _MARGIN + (1 - 2 * _MARGIN) * (peak_bytes - self.least_bytes) / span

    def y(self, extra: float) -> float:
        return HEIGHT * (1 - 0.92 * extra / self.max_extra)


def trade_off_figure(report: OptimizeReport) -> Html:
    """Points of the trade-off, the lower envelope of the points, and the chosen plan."""
    plans = [(point["simulated_peak_bytes"], point["extra_time_ratio"]) for point in report["frontier"]]
    chosen = (report["planned"]["simulated_peak_bytes"], report["budget"]["extra_time_ratio"])
    peaks = [peak for peak, _ in (*plans, chosen)]
    axes = _Axes(min(peaks), max(peaks), max(extra for _, extra in (*plans, chosen)) or 1.0)
    levels = [(axes.y(level), percent(level) if level else "0") for level in ticks(axes.max_extra, 4)]
    picture = tag(
        "svg",
        level_lines(levels),
        stretched(HEIGHT, tag("path", d=_line([*plans, chosen], axes), class_="line course-0")),
        *(_point(plan, axes) for plan in dict.fromkeys(plans)),
        *_chosen(chosen, axes),
        _x_label(megabytes(axes.least_bytes), _MARGIN),
        _x_label("peak", 0.5),
        _x_label(megabytes(axes.most_bytes), 1 - _MARGIN),
        class_="plot",
        width="100%",
        height=HEIGHT + 24,
        role="img",
        aria_label=f"Extra time against peak; chosen: {_plan_text(chosen)}. The table below has all points.",
    )
    caption = tag(
        "figcaption",
        "Extra time (vertical) of the best plan found for each peak (horizontal), "
        f"as a share of the baseline's time. Chosen: {_plan_text(chosen)}.",
    )
    return tag("figure", picture, caption, id="trade-off-figure")


def _point(plan: tuple[int, float], axes: _Axes) -> Html:
    x, y = percent_of_width(axes.x(plan[0])), coordinate(axes.y(plan[1]))
    return tag("circle", tag("title", _plan_text(plan)), cx=x, cy=y, r=4)


def _chosen(plan: tuple[int, float], axes: _Axes) -> tuple[Html, Html]:
    share, y = axes.x(plan[0]), axes.y(plan[1])
    title = tag("title", f"chosen: {_plan_text(plan)}")
    circle = tag("circle", title, cx=percent_of_width(share), cy=coordinate(y), r=9, class_="chosen")
    return circle, label_beside("chosen", share, y - 10 if y > 24 else y + 22, 14, "chosen-label")


def _x_label(text: str, share: float) -> Html:
    return tag("text", text, x=percent_of_width(share), y=HEIGHT + 18, text_anchor="middle")


def _plan_text(plan: tuple[int, float]) -> str:
    return f"{megabytes(plan[0])}, {percent(plan[1])} extra time"


def _line(plans: Sequence[tuple[int, float]], axes: _Axes) -> str:
    """The lower envelope: each plan is valid for all larger budgets, until a plan takes less time."""
    path, least = "", math.inf
    for peak, extra in sorted(plans):
        if extra >= least:
            continue
        least = extra
        x, y = coordinate(WIDTH * axes.x(peak)), coordinate(axes.y(extra))
        path += f"H{x}V{y}" if path else f"M{x} {y}"
    return path


def trade_off_table(report: OptimizeReport) -> Html:
    points = sorted(report["frontier"], key=lambda point: -point["budget_bytes"])
    budget, *others = frontier_cells(report, chosen_point(report))
    rows = [[joined(tag("strong", "chosen: "), budget), *others], *(frontier_cells(report, point) for point in points)]
    headings = [Column(heading, megabytes if number else None) for number, heading in enumerate(FRONTIER_HEADINGS)]
    return table("Extra time for each budget", headings, rows)
