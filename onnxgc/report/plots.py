"""Plots in plain characters, for terminals and files alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Labels: TypeAlias = tuple[str, str, str]
"""What stands at the least, the middle and the largest value of an axis."""

POINT, CHOSEN = "o", "X"
WIDTH, HEIGHT = 60, 13
"""Columns and rows between the axes; with labels a plot fits 80 columns."""


def scatter_plot(
    points: Sequence[tuple[tuple[float, float], str]], x_labels: Labels, y_labels: Labels
) -> str:
    """Points, each with its mark, between two axes that end at the outermost of them.

    Of points at the same place the last is seen.
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


def _places(values: Sequence[float], count: int) -> list[int]:
    """For each value one of `count` places, the least in the first and the largest in the last."""
    least = min(values)
    span = (max(values) - least) or 1.0
    return [round((value - least) / span * (count - 1)) for value in values]
