"""Solve times over the number of vertices, as a plain SVG with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 150, 40, 52
# Mid-tones that can be read on white and on black.
_INK, _GRID = "#7d8590", "#7d859055"
_COLOURS = {"acg": "#2f81f7", "general": "#3fa45b", "peak": "#d9822b"}
_DASHES = {"chain": "", "random": "2 3", "transformer": "8 4"}


def draw(graphs: Sequence[Mapping[str, Any]]) -> str:
    """One line a solver and family of graphs, one dot a network."""
    lines = {
        (solver, family): _points(graphs, solver, family)
        for solver in _COLOURS
        for family in (*_DASHES, "network")
    }
    everything = [point for points in lines.values() for point in points]
    left, right = _powers(vertices for vertices, _ in everything)
    low, high = _powers(seconds for _, seconds in everything)

    def place(vertices: float, seconds: float) -> tuple[float, float]:
        x = (math.log10(vertices) - left) / (right - left)
        y = (math.log10(seconds) - low) / (high - low)
        return (
            _LEFT + x * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM),
        )

    title = "Seconds of a search over the number of vertices"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{title}</title>",
        f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>',
    ]
    for power in range(low, high + 1):
        _, y = place(10**left, 10.0**power)
        drawn.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>'
        )
    for power in range(left, right + 1):
        x, _ = place(10**power, 10.0**low)
        drawn.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{10**power:,}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">vertices</text>')
    for (solver, family), points in lines.items():
        places = [place(*point) for point in points]
        if family == "network":
            drawn += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{_COLOURS[solver]}"/>' for x, y in places
            ]
        elif places:
            drawn.append(
                f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" '
                f'stroke="{_COLOURS[solver]}" stroke-width="1.8" stroke-dasharray="{_DASHES[family]}"/>'
            )
    return "\n".join([*drawn, *_legend(), "</svg>", ""])


def _points(graphs: Sequence[Mapping[str, Any]], solver: str, family: str) -> list[tuple[int, float]]:
    return [
        (graph["vertices"], graph["seconds"][solver])
        for graph in graphs
        if graph["family"] == family and graph["seconds"].get(solver)
    ]


def _powers(values: Iterable[float]) -> tuple[int, int]:
    """The powers of ten around all values."""
    known = list(values)
    return math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))


def _legend() -> list[str]:
    x = _WIDTH - _RIGHT + 16
    entries = [(f'stroke="{colour}" stroke-width="3"', solver) for solver, colour in _COLOURS.items()]
    entries += [
        (f'stroke="{_INK}" stroke-width="1.8" stroke-dasharray="{dashes}"', family)
        for family, dashes in _DASHES.items()
    ]
    found = []
    for number, (style, label) in enumerate(entries):
        y = _TOP + 20 * number
        found.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" {style}/>'
            f'<text x="{x + 34}" y="{y + 4}">{label}</text>'
        )
    y = _TOP + 20 * len(entries)
    found.append(f'<circle cx="{x + 13}" cy="{y}" r="2"/><text x="{x + 34}" y="{y + 4}">network</text>')
    return found
