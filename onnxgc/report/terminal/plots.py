"""Plots in plain characters, for terminals and files."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from onnxgc.planning.schedule import Compute, Release, Schedule
from onnxgc.planning.simulate import MemoryProfile

Labels: TypeAlias = tuple[str, str, str]
"""Labels at the least, the middle and the largest value of an axis."""

POINT, CHOSEN = "o", "X"
WIDTH, HEIGHT = 60, 13
"""Columns and rows between the axes; with labels a plot fits 80 columns."""


def scatter_plot(points: Sequence[tuple[tuple[float, float], str]], x_labels: Labels, y_labels: Labels) -> str:
    """Points with their marks between two axes that end at the outermost points.

    Of points at the same place the last is visible.
    """
    columns = _places([x for (x, _), _ in points], WIDTH)
    rows = _places([y for (_, y), _ in points], HEIGHT)
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for (_, mark), column, row in zip(points, columns, rows, strict=True):
        cells[row][column] = mark
    label_of = dict(zip((0, HEIGHT // 2, HEIGHT - 1), y_labels, strict=True))
    margin = max(map(len, y_labels))
    lines = [f"{label_of.get(row, ''):>{margin}} |{''.join(cells[row])}" for row in reversed(range(HEIGHT))]
    left, middle, right = x_labels
    between = WIDTH - len(left) - len(right)
    lines += [f"{'':>{margin}} +{'-' * WIDTH}", f"{'':>{margin}}  {left}{middle:^{between}}{right}"]
    return "\n".join(line.rstrip() for line in lines)


Curve: TypeAlias = tuple[Sequence[int], int]
"""Live bytes at each step of a schedule, and the number of the step at which backward begins."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ABOVE = "░"
_CURVE_HEIGHT = 8


def curve_of(schedule: Schedule, profile: MemoryProfile, state_bytes: int = 0) -> Curve:
    """The simulated memory of a schedule on top of an optimizer's state."""
    steps = [step for step in schedule.instructions if not isinstance(step, Release)]
    backward = (at for at, step in enumerate(steps) if isinstance(step, Compute) and step.chunk is not None)
    return [live + state_bytes for live in profile.timeline], next(backward, len(steps))


def memory_plot(regular: Curve, planned: Curve, size: Callable[[float], str], *, is_plain: bool = False) -> str:
    """Memory over one step: the plan's is filled, the baseline's above it is shaded.

    Forward and backward have the same columns in both, in proportion to the baseline's steps; a column shows
    the maximum of its steps. `size` formats bytes; `is_plain` restricts the plot to ASCII.
    """
    steps, forward_end = len(regular[0]), regular[1]
    forward = min(max(round(WIDTH * forward_end / steps), 1), WIDTH - 1)
    before, after = (_binned(curve, forward) for curve in (regular, planned))
    peaks = [max(curve[0]) for curve in (regular, planned)]
    top = max(peaks) or 1
    labels = {_row_of(peak, top): size(peak) for peak in peaks}
    margin = max(map(len, labels.values()))
    fill, shade = ("#", ".") if is_plain else (_EIGHTHS[-1], _ABOVE)
    lines = [f"memory over one step: {fill} planned, {shade} baseline"]
    for row in reversed(range(_CURVE_HEIGHT)):
        cells = [_cell(one, other, row, top, is_plain) for one, other in zip(before, after, strict=True)]
        lines.append(f"{labels.get(row, ''):>{margin}} |{''.join(cells)}".rstrip())
    lines.append(f"{'':>{margin}} +{'-' * forward}+{'-' * (WIDTH - forward - 1)}")
    names = ("forward" if forward > len("forward") else "", "backward")
    lines.append(f"{'':>{margin}}  {names[0]:<{forward}} {names[1]}".rstrip())
    return "\n".join(lines)


def _binned(curve: Curve, forward: int) -> list[int]:
    """The maximum of each column: `forward` columns for forward, the others for backward."""
    values, forward_end = curve
    found = []
    for part, columns in ((values[:forward_end], forward), (values[forward_end:], WIDTH - forward)):
        for column in range(columns):
            first = column * len(part) // columns
            found.append(max(part[first : max((column + 1) * len(part) // columns, first + 1)], default=0))
    return found


def _row_of(size_bytes: int, top: int) -> int:
    return max(-(-_CURVE_HEIGHT * size_bytes // top) - 1, 0)


def _cell(regular: int, planned: int, row: int, top: int, is_plain: bool) -> str:
    """One character: the part of the row that the plan fills, or whether the baseline reaches the row."""
    filled, reached = (8 * _CURVE_HEIGHT * size / top - 8 * row for size in (planned, regular))
    if is_plain:
        return "#" if filled >= 4 else "." if reached >= 4 else " "
    eighths = min(max(round(filled), 0), 8)
    return _EIGHTHS[eighths] if eighths else _ABOVE if reached >= 4 else " "


def _places(values: Sequence[float], count: int) -> list[int]:
    """For each value one of `count` places, the least in the first and the largest in the last."""
    least = min(values)
    span = (max(values) - least) or 1.0
    return [round((value - least) / span * (count - 1)) for value in values]
