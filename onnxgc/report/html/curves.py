"""Memory over the training step, by roles."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from onnxgc.report.data.memory_curve import Lifetime, MemoryCurve, MemoryRole, Phase, Run, step_number
from onnxgc.report.html.svg import (
    area_path,
    blocks_path,
    columns,
    coordinate,
    label_beside,
    level_lines,
    percent_of_width,
    place_marks,
    steps_path,
    stretched,
    ticks,
)
from onnxgc.report.html.tables import Column, key, line_swatch, size, swatch, table
from onnxgc.report.html.tags import Html, joined, name_in_module, tag
from onnxgc.report.text.units import in_module, megabytes

HEIGHT = 300
_HEADROOM = 1.04
LANE = 14
MAX_ROWS = 50
"""Rows of the table of live tensors without a script."""
_KEYS = (
    "Left and right arrow: one step. Page up and page down: a twentieth. Home, End: first and last step. "
    "P: the peak. Plus and minus: zoom, 0: all of it. With a pointer: drag to zoom, double click for all."
)


def memory_figure(
    curves: Sequence[MemoryCurve],
    budget_bytes: int | None = None,
    *,
    name: str = "memory",
    places: Sequence[int] | None = None,
    lists_tensors: bool = True,
) -> Html:
    """The first curve by roles, a line for each of the others, and the budget.

    The script finds the curves of the figure `name` at these `places` of its data, by default the first.
    Live tensors at a step are in `alive_table`, or, unless it `lists_tensors`, in a line below the picture.
    """
    shown = curves[0]
    peaks = [int(curve.live_bytes().sum(axis=0).max(initial=0)) for curve in curves]
    highest = _HEADROOM * max([*peaks, budget_bytes or 0, 1])
    longest = max(len(curve.runs) for curve in curves)
    summary = _summary(curves, peaks, budget_bytes)

    def y_of(size_bytes: float) -> float:
        return HEIGHT * (1 - size_bytes / highest)

    plot = tag(
        "svg",
        level_lines([(y_of(level), megabytes(level) if level else "0") for level in ticks(highest)]),
        stretched(
            HEIGHT,
            *_areas(shown, highest, longest),
            *(_line(number, curve, highest, longest) for number, curve in enumerate(curves)),
        ),
        *_budget(budget_bytes, y_of),
        *_base(shown, y_of),
        *_peak(peaks[0], (peak_run(shown) + 0.5) / longest, y_of(peaks[0])),
        class_="plot",
        width="100%",
        height=HEIGHT,
        role="img",
        aria_label=summary,
    )
    areas = (" The coloured areas are ", tag("span", shown.label, class_="shown"), "; the rows below are phases.")
    return tag(
        "figure",
        _key(curves, budget_bytes),
        plot,
        _lanes(shown, longest),
        tag("figcaption", summary, *areas),
        tag("p", _KEYS, class_="keys", hidden=True),
        id=name,
        class_="memory",
        data_highest=highest,
        data_courses=" ".join(map(str, places or range(len(curves)))),
        data_table="alive" if lists_tensors else None,
    )


def _peak(peak_bytes: int, share: float, y: float) -> tuple[Html, Html]:
    """The mark and the label of the peak at a share of the width."""
    circle = tag("circle", cx=percent_of_width(share), cy=coordinate(y), r=5, class_="peak")
    return circle, label_beside(f"peak {megabytes(peak_bytes)}", share, y - 8, 6, "peak-label")


def _key(curves: Sequence[MemoryCurve], budget_bytes: int | None) -> Html:
    """The key to the lines; the table of roles is the key to the areas."""
    lines = [(_line_style(number), curve.label) for number, curve in enumerate(curves)]
    if budget_bytes is not None:
        lines.append(("budget", f"budget, {megabytes(budget_bytes)}"))
    return key((line_swatch(style), text) for style, text in lines)


def _line_style(number: int) -> str:
    return f"line course-{min(number, 4)}"


def _highest_runs(curve: MemoryCurve) -> npt.NDArray[np.int64]:
    """Bytes by role and column: a column shows its highest run."""
    live = curve.live_bytes()
    totals = live.sum(axis=0)
    columns_of_runs = columns(len(curve.runs))
    return live[:, [runs.start + int(totals[runs.start : runs.stop].argmax()) for runs in columns_of_runs]]


def _areas(curve: MemoryCurve, highest: float, longest: int) -> list[Html]:
    """One area for each role, the topmost first, so that none hides another."""
    shown = _highest_runs(curve)
    heights = HEIGHT * (1 - np.cumsum(shown, axis=0) / highest)
    share = len(curve.runs) / longest
    used = curve.live_bytes().sum(axis=1)
    return [
        tag(
            "path",
            d=area_path(heights[number].tolist(), HEIGHT, share) if used[number] else "",
            class_=f"area role-{number}",
            data_role=number,
        )
        for number in reversed(range(len(MemoryRole)))
    ]


def _line(number: int, curve: MemoryCurve, highest: float, longest: int) -> Html:
    heights = HEIGHT * (1 - _highest_runs(curve).sum(axis=0) / highest)
    path = steps_path(heights.tolist(), len(curve.runs) / longest)
    return tag("path", d=path, class_=_line_style(number), data_course=number)


def _budget(budget_bytes: int | None, y_of: Callable[[float], float]) -> list[Html]:
    if budget_bytes is None:
        return []
    y = y_of(budget_bytes)
    label_y = y + 14 if y < 16 else y - 5
    return [
        tag("line", x1=0, x2="100%", y1=coordinate(y), y2=coordinate(y), class_="budget"),
        tag(
            "text",
            f"budget {megabytes(budget_bytes)}",
            x="100%",
            y=coordinate(label_y),
            text_anchor="end",
            class_="budget-label",
        ),
    ]


def _base(curve: MemoryCurve, y_of: Callable[[float], float]) -> list[Html]:
    """The label of the optimizer state, at its level."""
    state = state_bytes(curve)
    if not state:
        return []
    level = y_of(state)
    # Lines are above the level, so the label is below it if there is room.
    y = coordinate(level + 15 if level < HEIGHT - 20 else level - 5)
    return [tag("text", f"{MemoryRole.STATE.value} {megabytes(state)}", x=6, y=y, class_="base-label")]


def state_bytes(curve: MemoryCurve) -> int:
    """Bytes of the optimizer state, which is live throughout."""
    return sum(life.size_bytes for life in curve.lifetimes if life.role is MemoryRole.STATE)


def _lanes(curve: MemoryCurve, longest: int) -> Html:
    """A row for each phase, distinguished by position as well as colour."""
    share = len(curve.runs) / longest
    places = columns(len(curve.runs))
    rows, labels = [], []
    for number, phase in enumerate(Phase):
        filled = [any(curve.runs[run].phase is phase for run in place) for place in places]
        path = blocks_path(filled, number * LANE + 1, LANE - 2, share)
        rows.append(tag("path", d=path, class_=f"lane phase-{number}", data_phase=number))
        y = coordinate((number + 0.8) * LANE)
        labels.append(tag("text", phase.value, x=-8, y=y, text_anchor="end"))
    height = LANE * len(Phase)
    return tag(
        "svg",
        *labels,
        stretched(height, *rows),
        *place_marks(longest, "step", height + 16),
        class_="lanes",
        width="100%",
        height=height + 22,
        aria_hidden="true",
    )


def _summary(curves: Sequence[MemoryCurve], peaks: Sequence[int], budget_bytes: int | None) -> str:
    sentences = [
        f"{curve.label}: peak {megabytes(peak)} at {curve.step_text(peak_run(curve))}, "
        f"{_run_text(curve.runs[peak_run(curve)])}."
        for curve, peak in zip(curves, peaks, strict=True)
        if curve.runs
    ]
    if budget_bytes is not None:
        sentences.append(f"Budget: {megabytes(budget_bytes)}.")
    if state_bytes(curves[0]):
        sentences.append(f"The {MemoryRole.STATE.value}, {megabytes(state_bytes(curves[0]))}, is live throughout.")
    return " ".join(sentences)


def peak_run(curve: MemoryCurve) -> int:
    """The first run at the peak."""
    live = curve.live_bytes().sum(axis=0)
    return int(np.argmax(live)) if len(live) else 0


def _run_text(run: Run) -> str:
    reason = {
        Phase.FORWARD: "in forward",
        Phase.RECOMPUTATION: f"which recomputes '{run.source}'",
        Phase.BACKWARD: f"in the backward of '{run.source}'",
    }[run.phase]
    return f"{run.kind} '{run.name}'{in_module(run.name, {run.name: run.module})} {reason}"


def roles_table(curves: Sequence[MemoryCurve]) -> Html:
    """Live bytes at the peak of each curve, by role; also the key to the colours."""
    peaks = [curve.live_bytes()[:, peak_run(curve)] for curve in curves if curve.runs]
    shown = [
        (number, role)
        for number, role in enumerate(MemoryRole)
        if any(curve.live_bytes()[number].any() for curve in curves)
    ]
    rows: list[list[str | int]] = [
        [joined(swatch(f"role-{number}"), role.value), *(int(peak[number]) for peak in peaks)]
        for number, role in reversed(shown)
    ]
    rows.append(["all", *(int(peak.sum()) for peak in peaks)])
    headings = [Column(curve.label, size) for curve in curves]
    caption = "Memory at the peak of each curve, by role"
    return table(caption, [Column("role"), *headings], rows, footer=True, class_="wraps")


def alive_table(curve: MemoryCurve) -> Html:
    """Live tensors at the peak, the largest first; the script replaces them by those of other steps."""
    at = peak_run(curve)
    alive = curve.alive_at(at)
    listed, others = alive[:MAX_ROWS], alive[MAX_ROWS:]
    rows: list[list[str | int]] = [_alive_row(life) for life in listed]
    if others:
        rest = sum(life.size_bytes for life in others)
        rows.append([f"{len(others):,} more", "", "", rest, ""])
    rows.append(["all", "", "", sum(life.size_bytes for life in alive), ""])
    run = curve.runs[at] if curve.runs else Run("nothing", "", Phase.FORWARD)
    caption = f"Live at {curve.step_text(at)} ({curve.label}, the peak): {_run_text(run)}"
    headings = [Column("tensor"), Column("type"), Column("role"), Column("size", size)]
    return table(caption, [*headings, Column("from, to step")], rows, footer=True, id="alive")


def _alive_row(life: Lifetime) -> list[str | int]:
    role = joined(swatch(f"role-{list(MemoryRole).index(life.role)}"), life.role.value)
    return [
        name_in_module(life.tensor, life.module),
        life.form,
        role,
        life.size_bytes,
        f"{step_number(life.first):,} to {step_number(life.last):,}",
    ]
