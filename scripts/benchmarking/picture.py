"""The memory of a training step over time, as a plain SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onnxgc.api import plan_step
from onnxgc.model.read import read_model
from onnxgc.planning.schedule import Release
from scripts.benchmarking.records import MODELS

_POINTS = 240
_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 46, 52
# Mid-tones that can be read on white and on black.
_INK, _GRID = "#7d8590", "#7d859055"
_COLOURS = {"regular": "#d9822b", "planned": "#2f81f7"}
_LABELS = {"regular": "storing everything", "planned": "planned"}
MEGABYTE = 10**6


def simulate_timelines(network: str, batch: int, pixels: int) -> dict[str, Any]:
    """Simulated bytes over the operators of one step, thinned to peaks, for both schedules."""
    path = MODELS / f"{network}.onnx"
    planned = plan_step(read_model(path, input_shapes={"x": (batch, 3, pixels, pixels)}))
    profiles = {"regular": planned.regular_profile, "planned": planned.profile}
    return {
        "network": network,
        "batch": batch,
        "input": f"3x{pixels}x{pixels}",
        "forward_operators": len(planned.step.graph.forward),
        "operators": {
            "regular": sum(not isinstance(step, Release) for step in planned.regular_schedule.steps),
            "planned": sum(not isinstance(step, Release) for step in planned.schedule.steps),
        },
        "peak_bytes": {kind: profile.peak_bytes for kind, profile in profiles.items()},
        "timeline": {kind: list(_thinned(profile.timeline)) for kind, profile in profiles.items()},
    }


def _thinned(timeline: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The largest value of each stretch of operators, with its position; every peak survives."""
    stretch = max(1, len(timeline) // _POINTS)
    for start in range(0, len(timeline), stretch):
        part = timeline[start : start + stretch]
        largest = max(part)
        yield start + part.index(largest), largest


def draw(figures: dict[str, Any]) -> str:
    """The SVG of recorded timelines: operators to the right, MB (10^6 bytes) upwards."""
    peak_megabytes = max(figures["peak_bytes"].values()) / MEGABYTE
    step = _tick(peak_megabytes)
    highest = step * (int(peak_megabytes / step) + 1)
    longest = int(max(figures["operators"].values()))

    def x(operator: float) -> float:
        return _LEFT + operator / longest * (_WIDTH - _LEFT - _RIGHT)

    def y(megabytes: float) -> float:
        return _HEIGHT - _BOTTOM - megabytes / highest * (_HEIGHT - _TOP - _BOTTOM)

    title = (
        f"{figures['network']}, batch {figures['batch']}, {figures['input']}: "
        "simulated memory of one training step"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{title}</title>",
        f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>',
    ]
    for tick in range(0, highest + 1, step):
        lines.append(
            f'<line x1="{_LEFT}" y1="{y(tick):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(tick):.1f}" '
            f'stroke="{_GRID}"/>'
            f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for tick in range(0, longest + 1, _tick(longest)):
        lines.append(
            f'<text x="{x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick}</text>'
        )
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    boundary = x(figures["forward_operators"])
    lines += [
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        "operators, in the order in which they run</text>",
        f'<text transform="translate(20 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        "memory, MB (10^6 bytes)</text>",
        f'<line x1="{boundary:.1f}" y1="{_TOP}" x2="{boundary:.1f}" y2="{_HEIGHT - _BOTTOM}" '
        f'stroke="{_INK}" stroke-dasharray="4 4"/>',
        f'<text x="{boundary - 6:.1f}" y="{_HEIGHT - _BOTTOM - 6}" text-anchor="end">forward</text>',
        f'<text x="{boundary + 6:.1f}" y="{_HEIGHT - _BOTTOM - 6}">backward</text>',
    ]
    for place, (kind, colour) in enumerate(_COLOURS.items()):
        points = " ".join(f"{x(at):.1f},{y(size / MEGABYTE):.1f}" for at, size in figures["timeline"][kind])
        peak = figures["peak_bytes"][kind] / MEGABYTE
        legend_y = 36
        legend_x = _LEFT + place * 260
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8" '
            'stroke-linejoin="round"/>',
            f'<line x1="{legend_x}" y1="{legend_y - 4}" x2="{legend_x + 22}" y2="{legend_y - 4}" '
            f'stroke="{colour}" stroke-width="3"/>',
            f'<text x="{legend_x + 28}" y="{legend_y}">{_LABELS[kind]}: peak {peak:,.0f} MB</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _tick(extent: float) -> int:
    """A round distance that cuts `extent` into four to ten parts."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if extent / (size * factor) <= 8:
                return size * factor
        size *= 10
