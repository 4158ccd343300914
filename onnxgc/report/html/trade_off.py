"""Extra time against peak: what each budget costs, and which plan was taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgc.report.budgets import FRONTIER_HEADINGS, percent
from onnxgc.report.html.svg import (
    WIDTH,
    coordinate,
    level_lines,
    percent_of_width,
    stretched,
    ticks,
)
from onnxgc.report.html.tables import Column, table
from onnxgc.report.html.tags import Html, joined, tag
from onnxgc.report.tables import megabytes

HEIGHT = 220
_MARGIN = 0.06


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a peak and an extra time lie: shares of the width, and units from the top."""

    least_bytes: int
    most_bytes: int
    most_extra: float

    def x(self, peak_bytes: int) -> float:
        span = self.most_bytes - self.least_bytes
        return 0.5 if not span else _MARGIN + (1 - 2 * _MARGIN) * (peak_bytes - self.least_bytes) / span

    def y(self, extra: float) -> float:
        return HEIGHT * (1 - 0.92 * extra / self.most_extra)


def trade_off_figure(report: Mapping[str, Any]) -> Html:
    """Points of the trade-off with the line that no point is needed below, and the chosen plan."""
    plans = [(point["simulated_peak_bytes"], point["extra_time_ratio"]) for point in report["frontier"]]
    chosen = (report["planned"]["simulated_peak_bytes"], report["budget"]["extra_time_ratio"])
    peaks = [peak for peak, _ in (*plans, chosen)]
    axes = _Axes(min(peaks), max(peaks), max(extra for _, extra in (*plans, chosen)) or 1.0)
    levels = [(axes.y(level), percent(level) if level else "0") for level in ticks(axes.most_extra, 4)]
    points = [
        tag(
            "circle",
            tag("title", _told(plan)),
            cx=percent_of_width(axes.x(plan[0])),
            cy=coordinate(axes.y(plan[1])),
            r=4,
        )
        for plan in dict.fromkeys(plans)
    ]
    x, y = percent_of_width(axes.x(chosen[0])), axes.y(chosen[1])
    anchor = "end" if axes.x(chosen[0]) > 0.5 else "start"
    picture = tag(
        "svg",
        level_lines(levels),
        stretched(HEIGHT, tag("path", d=_line([*plans, chosen], axes), class_="line course-0")),
        *points,
        tag("circle", tag("title", f"chosen: {_told(chosen)}"), cx=x, cy=coordinate(y), r=9, class_="chosen"),
        tag(
            "text",
            "chosen",
            x=x,
            dx=-14 if anchor == "end" else 14,
            y=coordinate(y - 10 if y > 24 else y + 22),
            text_anchor=anchor,
            class_="chosen-label",
        ),
        tag(
            "text",
            megabytes(axes.least_bytes),
            x=percent_of_width(_MARGIN),
            y=HEIGHT + 18,
            text_anchor="middle",
        ),
        tag("text", "peak", x="50%", y=HEIGHT + 18, text_anchor="middle"),
        tag(
            "text",
            megabytes(axes.most_bytes),
            x=percent_of_width(1 - _MARGIN),
            y=HEIGHT + 18,
            text_anchor="middle",
        ),
        class_="plot",
        width="100%",
        height=HEIGHT + 24,
        role="img",
        aria_label=f"Extra time against peak; chosen: {_told(chosen)}. The table below has all points.",
    )
    caption = tag(
        "figcaption",
        "Extra time (upwards) of the best plan found for each peak (to the right), "
        f"as a share of the time of every operator once. Chosen: {_told(chosen)}.",
    )
    return tag("figure", picture, caption, id="trade-off-figure")


def _told(plan: tuple[int, float]) -> str:
    return f"{megabytes(plan[0])}, {percent(plan[1])} extra time"


def _line(plans: Sequence[tuple[int, float]], axes: _Axes) -> str:
    """From the least peak to the right: a plan serves every larger budget, until one takes less time."""
    path, least = "", math.inf
    for peak, extra in sorted(plans):
        if extra >= least:
            continue
        least = extra
        x, y = coordinate(WIDTH * axes.x(peak)), coordinate(axes.y(extra))
        path += f"H{x}V{y}" if path else f"M{x} {y}"
    return path


def trade_off_table(report: Mapping[str, Any]) -> Html:
    """A row for each budget, and one for the chosen plan."""
    regular = report["regular"]["simulated_peak_bytes"]
    planned = report["planned"]["simulated_peak_bytes"]
    chosen = {
        **report["budget"],
        "budget_bytes": report["budget"]["bytes"] or planned,
        "simulated_peak_bytes": planned,
    }
    rows: list[list[str]] = [
        [
            joined(tag("strong", "chosen: "), megabytes(point["budget_bytes"]))
            if point is chosen
            else megabytes(point["budget_bytes"]),
            f"{point['budget_bytes'] / regular:.0%}" if regular else "",
            megabytes(point["simulated_peak_bytes"]),
            percent(point["extra_time_ratio"]),
            percent(point["lower_bound_ratio"]),
            percent(point["gap"]) if point["gap"] > 0 else "optimal",
        ]
        for point in (chosen, *sorted(report["frontier"], key=lambda point: -int(point["budget_bytes"])))
    ]
    headings = [
        Column(heading, megabytes if number else None) for number, heading in enumerate(FRONTIER_HEADINGS)
    ]
    return table("Extra time for each budget", headings, rows)
