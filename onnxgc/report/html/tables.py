"""Tables of a page, which scroll where they are wider than the page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

from onnxgc.report.data.memory_curve import (
    NOT_OUTPUTS,
    ForwardOperator,
    MemoryCurve,
    MemoryRole,
    OperatorKind,
    Phase,
    TensorFate,
)
from onnxgc.report.html.tags import Html, joined, name_in_module, name_tag, tag
from onnxgc.report.text.units import duration, megabytes

MAX_TENSORS = 50


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and the format of the numbers below it."""

    heading: str
    written: Callable[[float], str] | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A number as text, with its value for sorting."""

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
    """A table with a caption; the first cell of a row is its heading, and the last row may be a total."""
    head = tag(
        "tr",
        *(tag("th", column.heading, scope="col", class_="number" if column.written else None) for column in headings),
    )
    written = [_row(headings, row) for row in rows]
    end = len(written) - 1 if footer else len(written)
    # A scrolling region is reachable by keyboard, and has a label.
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
        text: str
        value: float | None
        match cell:
            case str():
                text, value = cell, None
            case Figure():
                text, value = cell.written, cell.value
            case _:
                text, value = (column.written or str)(cell), cell
        cells.append(
            tag(
                "td" if number else "th",
                text,
                scope=None if number else "row",
                class_="number" if column.written else None,
                data_value=value,
            )
        )
    return tag("tr", *cells)


def swatch(area: str) -> Html:
    return _swatch(tag("rect", width=14, height=14, class_=f"area {area}"), 14)


def _swatch(shape: Html, width: int) -> Html:
    return tag("svg", shape, class_="swatch", width=width, height=14, aria_hidden="true")


def line_swatch(style: str) -> Html:
    return _swatch(tag("line", x1=0, x2=32, y1=7, y2=7, class_=style), 32)


def key(entries: Iterable[tuple[Html, str]]) -> Html:
    return tag("ul", *(tag("li", sample, meaning) for sample, meaning in entries), class_="key")


def count(value: float) -> str:
    return f"{value:,.0f}"


def size(value: float) -> str:
    """As `megabytes`, but in bytes below 1,000."""
    return megabytes(value) if value >= 1000 else f"{value:.0f} B" if value else "0"


def nanoseconds(value: float) -> str:
    return duration(value / 1e9) if value else "0"


def kinds_table(kinds: Sequence[OperatorKind], label: str) -> Html:
    """Operators by kind: their number, the bytes they keep for backward, and their time."""
    figures = [astuple(kind)[1:] for kind in kinds]
    rows: list[list[str | int]] = [[name_tag(kind.kind), *row] for kind, row in zip(kinds, figures, strict=True)]
    rows.append(["all", *(sum(row[number] for row in figures) for number in range(6))])
    headings = [
        Column("operator"),
        Column("in forward", count),
        Column("in backward", count),
        Column("kept for backward", size),
        Column("recomputed", count),
        Column("time", nanoseconds),
        Column("of which recomputed", nanoseconds),
    ]
    return table(f"Operators by kind ({label})", headings, rows, footer=True, sortable=True)


def tensors_table(curve: MemoryCurve, network: Sequence[ForwardOperator]) -> Html:
    """The largest tensors of the step with their fates, without recomputed copies."""
    times = {operator.name: operator.recomputations for operator in network}
    firsts = [
        life
        for life in curve.lifetimes
        if life.tensor == life.original and life.role not in (*NOT_OUTPUTS, MemoryRole.RECOMPUTED)
    ]
    firsts.sort(key=lambda life: (-life.size_bytes, life.first))
    rows: list[list[str | int]] = []
    for life in firsts[:MAX_TENSORS]:
        run = curve.runs[life.first]
        again = times.get(run.name, 0) if run.phase is Phase.FORWARD else 0
        fate = TensorFate.RECOMPUTED.value if again else life.role.value
        if again > 1:
            fate += f" {again} times"
        producer = joined(run.kind, " ", name_tag(run.name))
        rows.append([name_in_module(life.tensor, life.module), life.form, life.size_bytes, fate, producer])
    caption = f"The largest tensors ({len(rows):,} of {len(firsts):,}; {curve.label})"
    headings = [Column("tensor"), Column("type"), Column("size", size), Column("fate")]
    return table(caption, [*headings, Column("produced by")], rows, sortable=True)
