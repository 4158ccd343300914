"""The network as a strip: its operators in order, their outputs, and the operators that read these."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from onnxgc.report.data.memory_curve import ForwardOperator, TensorFate, step_number
from onnxgc.report.html.svg import WIDTH, blocks_path, columns, coordinate, place_marks, stretched
from onnxgc.report.html.tables import Column, count, key, size, swatch, table
from onnxgc.report.html.tags import Html, name_in_module, name_tag, tag
from onnxgc.report.text.units import megabytes

ARCS, MARKS, BARS, SEGMENTS = 80, 18, 90, 18
"""Heights of the rows, from the top."""
_BOTTOM = ARCS + MARKS + BARS
"""The bottom of the bars."""
HEIGHT = _BOTTOM + SEGMENTS
MAX_ARCS = 1500
_FATES = {fate: number for number, fate in enumerate(TensorFate) if fate is not TensorFate.SHARED}
"""Fates of outputs that occupy memory of their own, with the numbers of their colours."""
_KEYS = (
    "Left and right arrow: one operator. Page up and page down: a twentieth. Home, End: first and last. "
    "C: the next checkpoint. Plus and minus: zoom, 0: all of it."
)


def network_figure(network: Sequence[ForwardOperator]) -> Html:
    """Arcs for later reads, marks for checkpoints, bars for bytes, blocks for segments."""
    places = columns(len(network))
    largest = max((operator.size_bytes for operator in network), default=0) or 1
    picture = tag(
        "svg",
        *_row_labels(largest),
        tag("line", x1=0, x2="100%", y1=_BOTTOM, y2=_BOTTOM, class_="grid"),
        stretched(
            HEIGHT,
            tag("path", d=_arcs(network, places), class_="arcs"),
            tag("path", d=_marks(network, places), class_="checkpoints"),
            *_bars(network, places, largest),
            *(
                tag("path", d=path, class_=f"segment segment-{parity}", data_parity=parity)
                for parity, path in enumerate(_segment_blocks(network, places))
            ),
        ),
        *place_marks(len(network), "operator", HEIGHT + 16),
        class_="plot",
        width="100%",
        height=HEIGHT + 22,
        role="img",
        aria_label=network_summary(network),
    )
    return tag(
        "figure",
        key((swatch(f"fate-{number}"), f"output {fate.value}") for fate, number in _FATES.items()),
        picture,
        tag("figcaption", network_summary(network)),
        tag("p", _KEYS, class_="keys", hidden=True),
        id="network",
    )


def _row_labels(largest: int) -> list[Html]:
    rows = (
        ("read later", ARCS / 2),
        ("checkpoint", ARCS + 13),
        (megabytes(largest), ARCS + MARKS + 10),
        ("0", _BOTTOM),
        ("segment", HEIGHT - 5),
    )
    return [tag("text", text, x=-8, y=y, text_anchor="end") for text, y in rows]


def network_summary(network: Sequence[ForwardOperator]) -> str:
    checkpoints = sum(operator.is_checkpoint for operator in network)
    again = sum(operator.recomputations > 0 for operator in network)
    segments = len({operator.segment for operator in network if operator.segment is not None})
    return (
        f"{len(network):,} operators in execution order: {checkpoints:,} produce checkpoints, {again:,} are "
        f"recomputed, in {segments:,} segments."
    )


def _bars(network: Sequence[ForwardOperator], places: Sequence[range], largest: int) -> list[Html]:
    """The bars of each fate, at the columns whose largest operator has this fate."""
    paths = dict.fromkeys(_FATES, "")
    for number, place in enumerate(places):
        operator = max((network[index] for index in place), key=lambda operator: operator.size_bytes)
        if operator.size_bytes and operator.fate in paths:
            left, right = (coordinate(edge * WIDTH / len(places)) for edge in (number, number + 1))
            top = coordinate(_BOTTOM - BARS * operator.size_bytes / largest)
            paths[operator.fate] += f"M{left} {_BOTTOM}V{top}H{right}V{_BOTTOM}Z"
    return [
        tag("path", d=paths[fate], class_=f"area fate-{number}", data_fate=number) for fate, number in _FATES.items()
    ]


def _arcs(network: Sequence[ForwardOperator], places: Sequence[range]) -> str:
    """Reads by operators other than the next one; the longest if there are many."""
    column_of = [number for number, place in enumerate(places) for _ in place]
    pairs = dict.fromkeys(
        (column_of[source], column_of[reader])
        for reader, operator in enumerate(network)
        for source in operator.reads
        if reader - source > 1 and column_of[reader] - column_of[source] > 0
    )
    longest = sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))[:MAX_ARCS]
    path = ""
    for source, reader in sorted(longest):
        left, right = (coordinate((place + 0.5) * WIDTH / len(places)) for place in (source, reader))
        share = math.log(1 + reader - source) / math.log(1 + len(places))
        top = coordinate(ARCS - ARCS * 1.3 * share)
        path += f"M{left} {ARCS}C{left} {top} {right} {top} {right} {ARCS}"
    return path


def _marks(network: Sequence[ForwardOperator], places: Sequence[range]) -> str:
    return "".join(
        f"M{coordinate((number + 0.5) * WIDTH / len(places))} {ARCS + 2}v{MARKS - 4}"
        for number, place in enumerate(places)
        if any(network[index].is_checkpoint for index in place)
    )


def _segment_blocks(network: Sequence[ForwardOperator], places: Sequence[range]) -> tuple[str, str]:
    """Blocks of operators that are recomputed together, alternating between two paths."""
    parity_of, number = [], 0
    for segment, operators in groupby(network, key=lambda operator: operator.segment):
        parity_of += [None if segment is None else number % 2 for _ in operators]
        number += segment is not None

    def blocks(parity: int) -> str:
        filled = [any(parity_of[index] == parity for index in place) for place in places]
        return blocks_path(filled, _BOTTOM + 4, SEGMENTS - 4)

    return blocks(0), blocks(1)


def checkpoints_table(network: Sequence[ForwardOperator]) -> Html:
    rows: list[list[str | int]] = [
        [
            name_in_module(operator.tensor, operator.module),
            operator.form,
            operator.kind,
            name_tag(operator.name),
            step_number(index),
        ]
        for index, operator in enumerate(network)
        if operator.is_checkpoint
    ]
    headings = [*map(Column, ("tensor", "type", "kind", "produced by")), Column("operator", count)]
    return table(f"Checkpoints ({len(rows):,})", headings, rows)


def segments_table(network: Sequence[ForwardOperator]) -> Html:
    members: defaultdict[int, list[ForwardOperator]] = defaultdict(list)
    for operator in network:
        if operator.segment is not None:
            members[operator.segment].append(operator)
    rows: list[list[str | int]] = []
    for segment, operators in sorted(members.items()):
        sizes = [operator.size_bytes for operator in operators if operator.recomputations]
        ends = (name_tag(operators[end].name) for end in (0, -1))
        rows.append([str(segment), *ends, len(operators), len(sizes), sum(sizes)])
    headings = [Column("segment"), Column("from"), Column("to"), Column("operators", count)]
    headings += [Column("recomputed", count), Column("recomputed size", size)]
    return table(f"Segments ({len(rows):,})", headings, rows)
