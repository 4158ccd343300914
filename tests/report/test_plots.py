"""The memory curve in plain characters."""

from __future__ import annotations

import pytest

from onnxgc.api.comparison import compare
from onnxgc.report.terminal.plots import WIDTH, curve_of, memory_plot
from tests.api.chains import chain

RAMP = ([*range(1, 101), *range(100, 0, -1)], 100)
HALF = ([min(size, 50) for size in RAMP[0]], 100)


def size(value: float) -> str:
    return f"{value:.0f} B"


@pytest.mark.parametrize("is_plain", [False, True])
def test_heights_are_those_of_the_curves(is_plain: bool) -> None:
    full, shade = ("#", ".") if is_plain else ("█", "░")
    head, *rows, axis, names = memory_plot(RAMP, HALF, size, is_plain=is_plain).splitlines()
    assert head == f"memory over one step: {full} planned, {shade} baseline"
    assert len(rows) == 8
    assert all(len(line) <= 80 for line in (head, *rows, axis, names))
    assert [row.partition(" |")[0].strip() for row in rows] == ["100 B", "", "", "", "50 B", "", "", ""]
    above, below = rows[:4], rows[4:]
    assert not any(full in row for row in above)
    # In the middle the baseline reaches all rows, the plan the lower half.
    middle = axis.index("+", axis.index("+") + 1)
    assert all(row[middle] == shade for row in above)
    assert all(row[middle] == full for row in below)
    assert axis.count("+") == 2
    assert names.split() == ["forward", "backward"]
    assert middle - axis.index("+") - 1 == WIDTH // 2


def test_plans_with_more_steps_are_drawn_in_the_same_columns() -> None:
    longer = ([*HALF[0][:100], *([50] * 300), *HALF[0][100:]], 100)
    same, other = (memory_plot(RAMP, curve, size).splitlines() for curve in (HALF, longer))
    assert [row[:38] for row in same[1:9]] == [row[:38] for row in other[1:9]]
    assert same[9:] == other[9:]


@pytest.mark.parametrize("values", [([0, 0], 1), ([5], 1), ([5, 3], 0)])
def test_steps_of_any_number(values: tuple[list[int], int]) -> None:
    assert len(memory_plot(values, values, size).splitlines()) == 11


def test_an_optimizers_state_lifts_the_curve() -> None:
    (row,) = compare(chain(2), solvers=["store-all"]).rows
    live, forward_end = curve_of(row.planned.schedule, row.planned.profile)
    lifted, same_end = curve_of(row.planned.schedule, row.planned.profile, 5)
    assert (list(lifted), same_end) == ([size + 5 for size in live], forward_end)
