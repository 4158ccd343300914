"""Tables of the page: each scrolls by itself where it is wider than the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxgc.report.budgets import duration
from onnxgc.report.html.memory_data import (
    NOT_MADE,
    Course,
    ForwardOperator,
    KindOfOperator,
    MemoryRole,
    Phase,
    TensorFate,
)
from onnxgc.report.html.tags import Html, joined, tag
from onnxgc.report.tables import megabytes

LARGEST_TENSORS = 50


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and how numbers below it are written."""

    heading: str
    written: Callable[[float], str] | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is written already, with the value that it is sorted by."""

    written: str
    value: float


def table(
    caption: str,
    headings: Sequence[Column],
    rows: Sequence[Sequence[str | int | float | Figure]],
    *,
    footer: bool = False,
    sortable: bool = False,
    class_: str = "",
    **attributes: str,
) -> Html:
    """A table with a caption; the first cell of a row is its heading, and the last row may be a sum."""
    head = tag(
        "tr",
        *(
            tag("th", column.heading, scope="col", class_="number" if column.written else None)
            for column in headings
        ),
    )
    written = [_row(headings, row) for row in rows]
    end = len(written) - 1 if footer else len(written)
    # A region that scrolls can be reached by keyboard, and says what it is.
    return tag(
        "div",
        tag(
            "table",
            tag("caption", tag("span", caption)),
            tag("thead", head),
            tag("tbody", *written[:end]),
            *([tag("tfoot", *written[end:])] if footer else []),
            class_="sortable" if sortable else None,
        ),
        class_=f"scrolls {class_}".rstrip(),
        tabindex=0,
        role="region",
        aria_label=caption,
        **attributes,
    )


def _row(headings: Sequence[Column], row: Sequence[str | int | float | Figure]) -> Html:
    cells = []
    for number, (column, cell) in enumerate(zip(headings, row, strict=True)):
        value = cell.value if isinstance(cell, Figure) else cell
        if isinstance(cell, Figure):
            text = cell.written
        else:
            text = cell if isinstance(cell, str) else (column.written or str)(cell)
        cells.append(
            tag(
                "th" if number == 0 else "td",
                text,
                scope="row" if number == 0 else None,
                class_="number" if column.written else None,
                data_value=None if isinstance(value, str) else value,
            )
        )
    return tag("tr", *cells)


def swatch(kind: str) -> Html:
    """A small field in the colour and pattern of an area; its name stands beside it."""
    return tag(
        "svg",
        tag("rect", width=14, height=14, class_=f"area {kind}"),
        class_="swatch",
        width=14,
        height=14,
        aria_hidden="true",
    )


def count(value: float) -> str:
    return f"{value:,.0f}"


def size(value: float) -> str:
    """As `megabytes`, but of what is small enough to count, the bytes."""
    return megabytes(value) if value >= 1000 else f"{value:.0f} B" if value else "0"


def nanoseconds(value: float) -> str:
    return duration(value / 1e9) if value else "0"


def kinds_table(kinds: Sequence[KindOfOperator], label: str) -> Html:
    """Operators by kind: how many, what they hold for backward, and what they take."""
    rows: list[list[str | int]] = [
        [
            tag("span", kind.kind, class_="name"),
            kind.forward,
            kind.backward,
            kind.kept_bytes,
            kind.again,
            kind.nanoseconds,
            kind.nanoseconds_again,
        ]
        for kind in kinds
    ]
    sums = [sum(int(row[number]) for row in rows) for number in range(1, 7)]
    rows.append(["all", *sums])
    headings = [
        Column("operator"),
        Column("in forward", count),
        Column("in backward", count),
        Column("kept for backward", size),
        Column("runs again", count),
        Column("time", nanoseconds),
        Column("of it again", nanoseconds),
    ]
    return table(f"Operators by kind ({label})", headings, rows, footer=True, sortable=True)


def tensors_table(course: Course, network: Sequence[ForwardOperator]) -> Html:
    """The largest tensors that the step makes, and what becomes of each; copies are not listed apart."""
    times = {operator.name: operator.times_again for operator in network}
    firsts = [
        life
        for life in course.lifetimes
        if life.tensor == life.original and life.role not in (*NOT_MADE, MemoryRole.AGAIN)
    ]
    firsts.sort(key=lambda life: (-life.size_bytes, life.first))
    rows: list[list[str | int]] = []
    for life in firsts[:LARGEST_TENSORS]:
        run = course.runs[life.first]
        again = times.get(run.name, 0) if run.phase is Phase.FORWARD else 0
        rows.append(
            [
                tag("span", life.tensor, class_="name"),
                life.form,
                life.size_bytes,
                f"computed again, {again} times"
                if again > 1
                else TensorFate.AGAIN.value
                if again
                else life.role.value,
                joined(run.kind, " ", tag("span", run.name, class_="name")),
            ]
        )
    caption = f"The largest tensors ({len(rows):,} of {len(firsts):,}; {course.label})"
    headings = [Column("tensor"), Column("type"), Column("size", size), Column("what becomes of it")]
    return table(caption, [*headings, Column("made by")], rows, sortable=True)
