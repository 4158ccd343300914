"""Solve times over the number of vertices, as a plain SVG with logarithmic axes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.benchmarking.records import ROOT
from scripts.benchmarking.svg import GRID, INK, svg_document

PICTURE = ROOT / "docs" / "growth.svg"
_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 150, 40, 52
_COLOURS = {"acg": "#2f81f7", "general": "#3fa45b", "peak": "#d9822b"}
_DASHES = {"chain": "", "random": "2 3", "transformer": "8 4"}
_TITLE = "Seconds of a search over the number of vertices"
_Place = Callable[[float, float], tuple[float, float]]
"""Coordinates of vertices and seconds."""


def draw(graphs: Sequence[Mapping[str, Any]]) -> str:
    """One line for each solver and family of graphs, one dot for each network."""
    lines = {
        (solver, family): _points(graphs, solver, family) for solver in _COLOURS for family in (*_DASHES, "network")
    }
    everything = [point for points in lines.values() for point in points]
    left, right = _powers(vertices for vertices, _ in everything)
    low, high = _powers(seconds for _, seconds in everything)

    def place(vertices: float, seconds: float) -> tuple[float, float]:
        x = (math.log10(vertices) - left) / (right - left)
        y = (math.log10(seconds) - low) / (high - low)
        return (_LEFT + x * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM))

    drawn = [f'<text x="{_LEFT}" y="18" font-size="14">{_TITLE}</text>']
    drawn += _axes(place, range(left, right + 1), range(low, high + 1))
    for (solver, family), points in lines.items():
        places = [place(*point) for point in points]
        if family == "network":
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
            drawn.append(f'<path stroke="{_COLOURS[solver]}" stroke-width="4" stroke-linecap="round" d="{dots}"/>')
        elif places:
            drawn.append(
                f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" '
                f'stroke="{_COLOURS[solver]}" stroke-width="1.8" stroke-dasharray="{_DASHES[family]}"/>'
            )
    return svg_document(_WIDTH, _HEIGHT, _TITLE, [*drawn, *_legend()])


def _points(graphs: Sequence[Mapping[str, Any]], solver: str, family: str) -> list[tuple[int, float]]:
    return [
        (graph["vertices"], graph["seconds"][solver])
        for graph in graphs
        if graph["family"] == family and graph["seconds"].get(solver)
    ]


def _powers(values: Iterable[float]) -> tuple[int, int]:
    """The powers of ten that enclose all values."""
    known = list(values)
    return math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))


def _axes(place: _Place, vertices: range, seconds: range) -> list[str]:
    """Grid lines and labels; the ranges are powers of ten."""
    drawn = []
    for power in seconds:
        _, y = place(10 ** vertices[0], 10.0**power)
        drawn.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>'
        )
    for power in vertices:
        x, _ = place(10**power, 10.0 ** seconds[0])
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{10**power:,}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">vertices</text>')
    return drawn


def _legend() -> list[str]:
    x = _WIDTH - _RIGHT + 16
    entries = [(f'stroke="{colour}" stroke-width="3"', solver) for solver, colour in _COLOURS.items()]
    entries += [
        (f'stroke="{INK}" stroke-width="1.8" stroke-dasharray="{dashes}"', family) for family, dashes in _DASHES.items()
    ]
    found = []
    for number, (style, label) in enumerate(entries):
        y = _TOP + 20 * number
        found.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" {style}/><text x="{x + 34}" y="{y + 4}">{label}</text>'
        )
    y = _TOP + 20 * len(entries)
    found.append(f'<circle cx="{x + 13}" cy="{y}" r="2"/><text x="{x + 34}" y="{y + 4}">network</text>')
    return found
