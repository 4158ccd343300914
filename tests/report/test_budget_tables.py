import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from onnxgc.api.comparison import compare
from onnxgc.report.terminal.budget_tables import (
    frontier_plot,
    frontier_table,
    plan_within_budget,
    sizes_plot,
    sizes_table,
    verdict_on_time,
)
from onnxgc.report.terminal.plots import HEIGHT, WIDTH, curve_of, memory_plot, scatter_plot
from onnxgc.report.text.units import duration, percent
from tests.api.chains import chain

FOUND = {
    "bytes": 60_000_000, "most_extra_time_ratio": None, "timing": "data sheet of a card", "order": "free",
    "regular_seconds": 0.25, "extra_time_ratio": 0.04, "lower_bound_ratio": 0.03, "gap": 0.0096,
    "gap_of_extra": 0.25, "order_alone_peak_bytes": None,
}  # fmt: skip


DEVICE = {
    "device_bytes": None, "weight_bytes": 7_000_000, "optimizer_state_bytes": 0, "input_bytes": 2_000_000,
    "runtime_bytes": 0, "regular": {"margin_bytes": 10_000_000, "total_bytes": 119_000_000},
    "planned": {"margin_bytes": 5_800_000, "total_bytes": 72_800_000},
}  # fmt: skip


def report(status: str = "feasible", frontier: list[dict[str, Any]] | None = None, **found: Any) -> Any:
    return {
        "model": "m.onnx",
        "status": status,
        "vertices": 5,
        "operators": 6,
        "regular": {"simulated_peak_bytes": 100_000_000},
        "planned": {"simulated_peak_bytes": 58_000_000},
        "lower_bound_bytes": 40_000_000,
        "device_memory": DEVICE,
        "budget": {**FOUND, **found},
        "frontier": frontier or [],
        "seconds": {"total": 1.5},
    }


def rows(table: Table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def test_memory_time_bound_and_gap_have_a_row_each():
    assert rows(plan_within_budget(report())) == [
        ["memory budget", "", "60.0 MB", "60%"],
        ["simulated peak", "100 MB", "58.0 MB", "58%"],
        ["all memory", "119 MB", "72.8 MB", "61%"],
        ["weights", "7.0 MB", "7.0 MB", ""],
        ["inputs", "2.0 MB", "2.0 MB", ""],
        ["margin for the allocator", "10.0 MB", "5.8 MB", ""],
        ["time", "250 ms", "260 ms", ""],
        ["extra time", "", "4.00%", ""],
        ["lower bound on extra time", "", "3.00%", ""],
        ["gap", "", "0.96%", "of the time"],
        ["", "", "25.0%", "of the extra time"],
    ]


def test_the_peak_of_reordering_only_is_shown_if_known():
    table = plan_within_budget(report(order_alone_peak_bytes=75_000_000))
    assert rows(table)[2] == ["reordering only", "", "75.0 MB", "75%"]
    assert "reordering only" not in {row[0] for row in rows(plan_within_budget(report()))}


def test_without_a_memory_budget_the_lower_bound_is_on_memory():
    shown = rows(plan_within_budget(report(bytes=None, most_extra_time_ratio=0.1)))
    assert shown[:2] == [["simulated peak", "100 MB", "58.0 MB", "58%"], ["lower bound", "", "40.0 MB", "40%"]]
    assert ["extra time allowed", "", "10.0%", ""] in shown


def test_the_memory_of_a_device_and_sizes_that_fit_it_are_shown():
    device = {**DEVICE, "device_bytes": 80_000_000, "runtime_bytes": 1_000_000}
    given: Any = {**report(), "device_memory": device}
    shown = rows(plan_within_budget(given))
    assert ["memory of the device", "", "80.0 MB", ""] in shown
    assert ["runtime", "1.0 MB", "1.0 MB", ""] in shown
    points = [
        {"size": size, "total_bytes": 10**8, "extra_time_ratio": 0.1, "seconds": 0.5, "per_second": 2.0 * size}
        for size in (8, 1024)
    ]
    found: Any = {"dimension": "batch (x)", "device_bytes": 10**8, "size": 1024, "points": points}
    assert rows(sizes_table(found))[-1] == ["1,024", "100 MB", "10.0%", "500 ms", "2,048.0"]
    assert sizes_plot(found).splitlines()[-1].split() == ["8", "size", "1,024"]


@pytest.mark.parametrize(
    "status, found, words",
    [
        ("optimal", {"gap": 0.0}, "optimal: no plan within the budget takes less time (5 tensors"),
        ("feasible", {}, "feasible: at most 0.96% of the time could still be saved"),
        ("optimal", {"bytes": None, "gap": 0.0}, "optimal: no plan has a lower peak"),
        ("feasible", {"bytes": None}, "feasible: the lowest peak found"),
        ("feasible", {"order": "fixed"}, "durations: data sheet of a card; operator order: fixed (the model's)"),
    ],
)
def test_the_verdict_states_what_is_proved(status: str, found: dict[str, Any], words: str):
    assert words in verdict_on_time(report(status, **found))


def point(budget: int, extra: float, gap: float = 0.0) -> dict[str, Any]:
    return {
        "budget_bytes": budget, "simulated_peak_bytes": budget, "status": "feasible" if gap else "optimal",
        "extra_time_ratio": extra, "lower_bound_ratio": extra - gap, "gap": gap, "gap_of_extra": 0.0,
    }  # fmt: skip


FRONTIER = [point(100_000_000, 0.0), point(70_000_000, 0.02), point(40_000_000, 0.1, gap=0.01)]


def test_the_trade_off_marks_the_chosen_plan():
    shown = rows(frontier_table(report(frontier=FRONTIER)))
    assert shown == [
        ["", "100 MB", "100%", "100 MB", "0.00%", "0.00%", "optimal"],
        ["", "70.0 MB", "70%", "70.0 MB", "2.00%", "2.00%", "optimal"],
        ["X", "60.0 MB", "60%", "58.0 MB", "4.00%", "3.00%", "0.96%"],
        ["", "40.0 MB", "40%", "40.0 MB", "10.0%", "9.00%", "1.00%"],
    ]
    assert "X" in frontier_plot(report(frontier=FRONTIER))
    without = report(frontier=FRONTIER, bytes=None)
    assert [row[0] for row in rows(frontier_table(without))] == ["", "", ""]
    assert "X" not in frontier_plot(without)


def test_points_of_a_plot_are_in_proportion():
    points = [((0.0, 10.0), "o"), ((5.0, 5.0), "o"), ((10.0, 0.0), "X")]
    lines = scatter_plot(points, ("0", "x", "10"), ("low", "mid", "high")).splitlines()
    assert lines[0] == "high |o"
    assert lines[HEIGHT // 2].startswith(" mid |")
    assert lines[HEIGHT // 2].index("o") - len(" mid |") in (WIDTH // 2 - 1, WIDTH // 2)
    assert lines[HEIGHT - 1] == f" low |{'X':>{WIDTH}}"
    assert lines[-1].split() == ["0", "x", "10"]
    assert len(lines) == HEIGHT + 2
    assert max(map(len, lines)) <= 80


def test_a_plot_of_one_point_is_a_point():
    assert scatter_plot([((3.0, 3.0), "o")], ("3", "", "3"), ("3", "3", "3")).count("o") == 1


def test_figures_have_their_significant_digits():
    assert [percent(value) for value in (0, 0.00123, 0.1234, 1.5)] == ["0.00%", "0.12%", "12.3%", "150%"]
    assert [duration(value) for value in (2e-6, 0.0125, 3.5, 4000)] == ["2 us", "12.5 ms", "3.5 s", "4,000 s"]


RAMP = ([*range(1, 101), *range(100, 0, -1)], 100)
HALF = ([min(size, 50) for size in RAMP[0]], 100)


def in_bytes(value: float) -> str:
    return f"{value:.0f} B"


@pytest.mark.parametrize("is_plain", [False, True])
def test_heights_are_those_of_the_curves(is_plain: bool):
    full, shade = ("#", ".") if is_plain else ("█", "░")
    head, *rows, axis, names = memory_plot(RAMP, HALF, in_bytes, is_plain=is_plain).splitlines()
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


def test_plans_with_more_steps_are_drawn_in_the_same_columns():
    longer = ([*HALF[0][:100], *([50] * 300), *HALF[0][100:]], 100)
    same, other = (memory_plot(RAMP, curve, in_bytes).splitlines() for curve in (HALF, longer))
    assert [row[:38] for row in same[1:9]] == [row[:38] for row in other[1:9]]
    assert same[9:] == other[9:]


@pytest.mark.parametrize("values", [([0, 0], 1), ([5], 1), ([5, 3], 0)])
def test_steps_of_any_number(values: tuple[list[int], int]):
    assert len(memory_plot(values, values, in_bytes).splitlines()) == 11


def test_an_optimizers_state_lifts_the_curve():
    (row,) = compare(chain(2), solvers=["store-all"]).rows
    live, forward_end = curve_of(row.planned.schedule, row.planned.profile)
    lifted, same_end = curve_of(row.planned.schedule, row.planned.profile, 5)
    assert (list(lifted), same_end) == ([size + 5 for size in live], forward_end)
