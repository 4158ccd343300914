"""Memory over the training step: what is held at each run, by what it is held for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxgc.report.html.memory_data import Course, Lifetime, MemoryRole, Phase, Run, step_number
from onnxgc.report.html.svg import (
    area_path,
    blocks_path,
    columns,
    coordinate,
    level_lines,
    percent_of_width,
    quarters,
    steps_path,
    stretched,
    ticks,
)
from onnxgc.report.html.tables import Column, size, swatch, table
from onnxgc.report.html.tags import Html, joined, tag
from onnxgc.report.tables import megabytes

HEIGHT = 300
_HEADROOM = 1.04
LANE = 14
ROWS_AT_THE_PEAK = 50
"""Tensors that are listed without a script."""
_KEYS = (
    "Left and right arrow: one step. Page up and page down: a twentieth. Home, End: first and last step. "
    "P: the peak. Plus and minus: zoom, 0: all of it. With a pointer: drag to zoom, double click for all."
)


def memory_figure(
    courses: Sequence[Course],
    budget_bytes: int | None = None,
    *,
    name: str = "memory",
    places: Sequence[int] | None = None,
    lists_tensors: bool = True,
) -> Html:
    """The first course in full, a line for each of the others, and the budget.

    The script finds the courses of the figure `name` at these `places` in its data, by default the first.
    What is held at a step is in `alive_table`, or, unless it `lists_tensors`, in a line below the picture.
    """
    shown = courses[0]
    peaks = [int(course.held_bytes().sum(axis=0).max(initial=0)) for course in courses]
    highest = _HEADROOM * max([*peaks, budget_bytes or 0, 1])
    longest = max(len(course.runs) for course in courses)
    at = peak_run(shown)

    def y_of(size_bytes: float) -> float:
        return HEIGHT * (1 - size_bytes / highest)

    plot = tag(
        "svg",
        level_lines([(y_of(level), megabytes(level) if level else "0") for level in ticks(highest)]),
        stretched(
            HEIGHT,
            *_areas(shown, highest, longest),
            *(_line(number, course, highest, longest) for number, course in enumerate(courses)),
        ),
        *_budget(budget_bytes, y_of),
        *_base(shown, y_of),
        tag(
            "circle",
            cx=percent_of_width((at + 0.5) / longest),
            cy=coordinate(y_of(peaks[0])),
            r=5,
            class_="peak",
        ),
        tag(
            "text",
            f"peak {megabytes(peaks[0])}",
            x=percent_of_width((at + 0.5) / longest),
            dx=-6 if at > longest / 2 else 6,
            y=coordinate(y_of(peaks[0]) - 8),
            text_anchor="end" if at > longest / 2 else "start",
            class_="peak-label",
        ),
        class_="plot",
        width="100%",
        height=HEIGHT,
        role="img",
        aria_label=_summary(courses, peaks, budget_bytes),
    )
    caption = tag(
        "figcaption",
        _summary(courses, peaks, budget_bytes),
        " The coloured areas are ",
        tag("span", shown.label, class_="shown"),
        "; below them, what runs.",
    )
    return tag(
        "figure",
        _key(courses, budget_bytes),
        plot,
        _lanes(shown, longest),
        caption,
        tag("p", _KEYS, class_="keys", hidden=True),
        id=name,
        class_="memory",
        data_highest=highest,
        data_courses=" ".join(map(str, places or range(len(courses)))),
        data_table="alive" if lists_tensors else None,
    )


def _key(courses: Sequence[Course], budget_bytes: int | None) -> Html:
    """What each line stands for; the key to the areas is the table of roles."""
    lines = [(f"line course-{min(number, 4)}", course.label) for number, course in enumerate(courses)]
    if budget_bytes is not None:
        lines.append(("budget", f"budget, {megabytes(budget_bytes)}"))
    entries = [
        tag(
            "li",
            tag(
                "svg",
                tag("line", x1=0, x2=32, y1=7, y2=7, class_=kind),
                class_="swatch",
                width=32,
                height=14,
                aria_hidden="true",
            ),
            text,
        )
        for kind, text in lines
    ]
    return tag("ul", *entries, class_="key")


def _areas(course: Course, highest: float, longest: int) -> list[Html]:
    """One area for each role, the topmost first, so that each is seen above the next."""
    held = course.held_bytes()
    # A column shows its highest run, whatever lies beside it.
    highest_runs = [
        place.start + int(np.argmax(held[:, place.start : place.stop].sum(axis=0)))
        for place in columns(len(course.runs))
    ]
    tops = np.cumsum(held[:, highest_runs], axis=0)
    share = len(course.runs) / longest
    found = []
    for number in reversed(range(len(MemoryRole))):
        heights = HEIGHT * (1 - tops[number] / highest)
        path = area_path(heights.tolist(), HEIGHT, share) if held[number].any() else ""
        found.append(tag("path", d=path, class_=f"area role-{number}", data_role=number))
    return found


def _line(number: int, course: Course, highest: float, longest: int) -> Html:
    total = course.held_bytes().sum(axis=0)
    heights = [
        HEIGHT * (1 - int(total[place.start : place.stop].max()) / highest)
        for place in columns(len(course.runs))
    ]
    path = steps_path(heights, len(course.runs) / longest)
    return tag("path", d=path, class_=f"line course-{min(number, 4)}", data_course=number)


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


def _base(course: Course, y_of: Callable[[float], float]) -> list[Html]:
    """The name of what is held throughout, on its level."""
    state = state_bytes(course)
    if not state:
        return []
    level = y_of(state)
    # Below the level, where the lines are not, as long as there is room.
    y = coordinate(level + 15 if level < HEIGHT - 20 else level - 5)
    return [tag("text", f"{MemoryRole.STATE.value} {megabytes(state)}", x=6, y=y, class_="base-label")]


def state_bytes(course: Course) -> int:
    """What an optimizer holds, whatever runs."""
    return sum(life.size_bytes for life in course.lifetimes if life.role is MemoryRole.STATE)


def _lanes(course: Course, longest: int) -> Html:
    """A row for each phase: place tells them apart, colour only helps."""
    share = len(course.runs) / longest
    places = columns(len(course.runs))
    rows, labels = [], []
    for number, phase in enumerate(Phase):
        filled = [any(course.runs[run].phase is phase for run in place) for place in places]
        path = blocks_path(filled, number * LANE + 1, LANE - 2, share)
        rows.append(tag("path", d=path, class_=f"lane phase-{number}", data_phase=number))
        y = coordinate((number + 0.8) * LANE)
        labels.append(tag("text", phase.value, x=-8, y=y, text_anchor="end"))
    height = LANE * len(Phase)
    marks = [
        tag(
            "text",
            place if number else f"step {place}",
            x=percent_of_width(number / 4),
            y=height + 16,
            text_anchor="start" if not number else "end" if number == 4 else "middle",
            class_="mark between" if number % 2 else "mark",
        )
        for number, place in enumerate(quarters(longest))
    ]
    return tag(
        "svg",
        *labels,
        stretched(height, *rows),
        *marks,
        class_="lanes",
        width="100%",
        height=height + 22,
        aria_hidden="true",
    )


def _summary(courses: Sequence[Course], peaks: Sequence[int], budget_bytes: int | None) -> str:
    told = [
        f"{course.label}: peak {megabytes(peak)} at {course.step_text(peak_run(course))}, "
        f"{_run_text(course.runs[peak_run(course)])}."
        for course, peak in zip(courses, peaks, strict=True)
        if course.runs
    ]
    if budget_bytes is not None:
        told.append(f"Budget: {megabytes(budget_bytes)}.")
    if state_bytes(courses[0]):
        told.append(
            f"The {MemoryRole.STATE.value}, {megabytes(state_bytes(courses[0]))}, is held throughout."
        )
    return " ".join(told)


def peak_run(course: Course) -> int:
    """The first run at which most is held."""
    held = course.held_bytes().sum(axis=0)
    return int(np.argmax(held)) if len(held) else 0


def _run_text(run: Run) -> str:
    """An operator with what it is run for."""
    reason = {
        Phase.FORWARD: "in forward",
        Phase.AGAIN: f"which runs '{run.source}' again",
        Phase.BACKWARD: f"in the backward of '{run.source}'",
    }[run.phase]
    return f"{run.kind} '{run.name}' {reason}"


def roles_table(courses: Sequence[Course]) -> Html:
    """What is held at the peak of each course, by role: the key to the colours as well."""
    peaks = [course.held_bytes()[:, peak_run(course)] for course in courses if course.runs]
    shown = [
        (number, role)
        for number, role in enumerate(MemoryRole)
        if any(course.held_bytes()[number].any() for course in courses)
    ]
    rows: list[list[str | int]] = [
        [joined(swatch(f"role-{number}"), role.value), *(int(peak[number]) for peak in peaks)]
        for number, role in reversed(shown)
    ]
    rows.append(["all", *(int(peak.sum()) for peak in peaks)])
    headings = [Column(course.label, size) for course in courses]
    caption = "What memory is held for, each at its peak"
    return table(caption, [Column("held for"), *headings], rows, footer=True, class_="wraps")


def alive_table(course: Course) -> Html:
    """The tensors at the peak, the largest first; a script shows those of other steps here."""
    at = peak_run(course)
    alive = course.alive_at(at)
    listed, left = alive[:ROWS_AT_THE_PEAK], alive[ROWS_AT_THE_PEAK:]
    rows: list[list[str | int]] = [_alive_row(life) for life in listed]
    if left:
        rest = sum(life.size_bytes for life in left)
        rows.append([f"{len(left):,} more", "", "", rest, ""])
    rows.append(["all", "", "", sum(life.size_bytes for life in alive), ""])
    run = course.runs[at] if course.runs else Run("nothing", "", Phase.FORWARD)
    caption = f"Held at {course.step_text(at)} ({course.label}, the peak): {_run_text(run)}"
    headings = [Column("tensor"), Column("type"), Column("held for"), Column("size", size)]
    return table(caption, [*headings, Column("from, to step")], rows, footer=True, id="alive")


def _alive_row(life: Lifetime) -> list[str | int]:
    held_for = joined(swatch(f"role-{list(MemoryRole).index(life.role)}"), life.role.value)
    return [
        tag("span", life.tensor, class_="name"),
        life.form,
        held_for,
        life.size_bytes,
        f"{step_number(life.first):,} to {step_number(life.last):,}",
    ]
