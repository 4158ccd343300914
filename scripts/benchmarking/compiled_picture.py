"""Time over peak of compiled modules, one panel a model, as a plain SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from scripts.benchmarking.records import ROOT
from scripts.benchmarking.svg import GRID, svg_document

PICTURE = ROOT / "docs" / "compiled.svg"
_WIDTH, _HEIGHT, _MARGIN = 260, 190, 34
_COLOURS = {"activation_memory_budget": "#d9822b", "checkpoint of each block": "#3fa45b", "onnxgc": "#2f81f7"}
_TITLE = "Time of a step (ms) over its peak (MB) under torch.compile"


def draw(rows: Sequence[Mapping[str, Any]], shares: Sequence[str]) -> str:
    """One panel for each model that ran; a line joins PyTorch's budgets as they fall, and another our plans."""
    known = [row for row in rows if "error" not in row]
    drawn = [f'<text x="8" y="16" font-size="14">{_TITLE}</text>']
    for index, (name, colour) in enumerate(_COLOURS.items()):
        drawn.append(f'<text x="{8 + 190 * index}" y="34" fill="{colour}">{name}</text>')
    for index, row in enumerate(known):
        drawn += _panel(row, shares, (index % 3) * _WIDTH, 40 + (index // 3) * _HEIGHT)
    height = 40 + -(-len(known) // 3) * _HEIGHT
    return svg_document(3 * _WIDTH, height, _TITLE, drawn)


def _panel(row: Mapping[str, Any], shares: Sequence[str], left: int, top: int) -> Iterator[str]:
    by_hand = "checkpoint of each block"
    series = ([row["rivals"][one] for one in shares], [row["rivals"][by_hand]], row["ours"])
    points = [[(one["peak_bytes"] / 1e6, 1000 * one["seconds"]) for one in part] for part in series]
    (low, high), (fast, slow) = ((min(each), max(each)) for each in zip(*chain(*points), strict=True))

    def place(peak: float, time: float) -> str:
        x = left + _MARGIN + (peak - low) / (high - low or 1) * (_WIDTH - 2 * _MARGIN)
        y = top + _HEIGHT - _MARGIN - (time - fast) / (slow - fast or 1) * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.0f},{y:.0f}"

    box = f'x="{left + _MARGIN - 8}" y="{top + _MARGIN - 8}" width="{_WIDTH - 2 * _MARGIN + 16}"'
    yield f'<rect {box} height="{_HEIGHT - 2 * _MARGIN + 16}" fill="none" stroke="{GRID}"/>'
    text = f"{row['model']}: {low:.0f} to {high:.0f} MB, {fast:.0f} to {slow:.0f} ms"
    yield f'<text x="{left + _MARGIN - 8}" y="{top + 20}">{text}</text>'
    for colour, part in zip(_COLOURS.values(), points, strict=True):
        line = " ".join(place(*point) for point in part)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}"/>'
        for point in line.split():
            x, y = point.split(",")
            yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
