"""The memory of a training step over time, as a plain SVG."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgc.api import plan_step
from onnxgc.model.read import read_model
from onnxgc.planning.schedule import Release
from onnxgc.report.text.units import shape_text
from scripts.benchmarking.records import MODELS, ROOT, Progress, Record
from scripts.benchmarking.svg import GRID, INK, svg_document
from scripts.benchmarking.tables import MEGABYTE, megabytes

PICTURE = ROOT / "docs" / "memory.svg"
_POINTS = 120
_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 46, 52
_COLOURS = {"regular": "#d9822b", "planned": "#2f81f7"}
_LABELS = {"regular": "baseline", "planned": "planned"}
_MAX_TICKS = 8


@dataclass(frozen=True, slots=True)
class Options:
    network: str = "resnet50"
    batch: int = 16
    pixels: int = 224


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Simulated bytes over the operators of one step, reduced to peaks, for both schedules."""
    path = MODELS / f"{options.network}.onnx"
    shape = (options.batch, 3, options.pixels, options.pixels)
    planned = plan_step(read_model(path, input_shapes={"x": shape}))
    profiles = {"regular": planned.regular_profile, "planned": planned.profile}
    schedules = {"regular": planned.regular_schedule, "planned": planned.schedule}
    return {
        "network": options.network,
        "batch": options.batch,
        "input": shape_text(shape[1:]),
        "forward_operators": len(planned.step.graph.forward),
        "operators": {
            kind: sum(not isinstance(step, Release) for step in schedule.instructions)
            for kind, schedule in schedules.items()
        },
        "peak_bytes": {kind: profile.peak_bytes for kind, profile in profiles.items()},
        "timeline": {kind: list(_thinned(profile.timeline)) for kind, profile in profiles.items()},
    }


def failures(figures: Any) -> list[str]:
    return []


def results_section(record: Record) -> str:
    """Nothing: the figures are in docs/memory.svg."""
    return ""


def draw(figures: Mapping[str, Any]) -> str:
    """The SVG of recorded timelines: operators to the right, MB (10^6 bytes) upwards."""
    peak_megabytes = max(figures["peak_bytes"].values()) / MEGABYTE
    step = _tick(peak_megabytes)
    highest = step * (int(peak_megabytes / step) + 1)
    longest = int(max(figures["operators"].values()))

    def x(operator: float) -> float:
        return _LEFT + operator / longest * (_WIDTH - _LEFT - _RIGHT)

    def y(size: float) -> float:
        return _HEIGHT - _BOTTOM - size / highest * (_HEIGHT - _TOP - _BOTTOM)

    title = f"{figures['network']}, batch {figures['batch']}, {figures['input']}: simulated memory of one training step"
    lines = [f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>']
    for tick in range(0, highest + 1, step):
        lines.append(
            f'<line x1="{_LEFT}" y1="{y(tick):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(tick):.1f}" '
            f'stroke="{GRID}"/>'
            f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for tick in range(0, longest + 1, _tick(longest)):
        lines.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick}</text>')
    lines += _axis_labels(x(figures["forward_operators"]))
    for place, (kind, colour) in enumerate(_COLOURS.items()):
        points = " ".join(f"{x(at):.1f},{y(size / MEGABYTE):.1f}" for at, size in figures["timeline"][kind])
        legend_x, legend_y = _LEFT + place * 260, 36
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>',
            f'<line x1="{legend_x}" y1="{legend_y - 4}" x2="{legend_x + 22}" y2="{legend_y - 4}" '
            f'stroke="{colour}" stroke-width="3"/>',
            f'<text x="{legend_x + 28}" y="{legend_y}">{_LABELS[kind]}: peak '
            f"{megabytes(figures['peak_bytes'][kind])} MB</text>",
        ]
    return svg_document(_WIDTH, _HEIGHT, title, lines)


def _thinned(timeline: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The largest value of each interval of operators, with its position; all peaks remain."""
    interval = max(1, len(timeline) // _POINTS)
    for start in range(0, len(timeline), interval):
        part = timeline[start : start + interval]
        largest = max(part)
        yield start + part.index(largest), largest


def _axis_labels(boundary: float) -> list[str]:
    """Labels of both axes, and the forward/backward boundary at `boundary`."""
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        "operators in execution order</text>",
        f'<text transform="translate(20 {middle:.1f}) rotate(-90)" text-anchor="middle">memory, MB (10^6 bytes)</text>',
        f'<line x1="{boundary:.1f}" y1="{_TOP}" x2="{boundary:.1f}" y2="{_HEIGHT - _BOTTOM}" '
        f'stroke="{INK}" stroke-dasharray="4 4"/>',
        f'<text x="{boundary - 6:.1f}" y="{_HEIGHT - _BOTTOM - 6}" text-anchor="end">forward</text>',
        f'<text x="{boundary + 6:.1f}" y="{_HEIGHT - _BOTTOM - 6}">backward</text>',
    ]


def _tick(extent: float) -> int:
    """A round distance that divides `extent` into at most `_MAX_TICKS` parts."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if extent / (size * factor) <= _MAX_TICKS:
                return size * factor
        size *= 10
