"""Tables of plans side by side: they fit, they hide nothing without a word, and Markdown is Markdown."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from onnxgc.report.comparison import (
    Cells,
    checkpoints_table,
    difference_lines,
    difference_table,
    file_lines,
    overview_lines,
    overview_table,
    pair_lines,
    plans_lines,
    plans_table,
)

LONG = "/encoder/layers/11/self_attention/scaled_dot_product/MatMul_output_0"


def shown(cells: Cells) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(cells.for_terminal())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row(name: str, peak: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "kind": "solver", "detail": "", "simulated_peak_bytes": peak, "best": False,
        "share_of_regular": peak / 40_000_000_000, "checkpoint_bytes": 10_000_000_000, "peak_gap": 0.125,
        "extra_time_ratio": 0.2512, "extra_flops_ratio": 0.3011, "objective": "paper", "status": "feasible",
        "lower_bound_bytes": 9_000_000_000, "lower_bound_ratio": None, "gap": 0.5, "solve_seconds": 61.25,
        **more,
    }  # fmt: skip


def report(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "a.onnx", "inputs": {"x": [64, 3, 224, 224]}, "timing": "data sheet of a card", "notes": [],
        "lower_bound_bytes": 8_000_000_000, "bound_operator": "conv", "left_out": [], "rows": list(rows),
        "regular": {"simulated_peak_bytes": 40_000_000_000}, "seconds": 3.0, **more,
    }  # fmt: skip


FEW = report(
    row("budget", 10_000_000_000, best=True, objective="time", lower_bound_ratio=0.0125, gap=0.01),
    row("chen-greedy", 12_345_600_000, status="optimal", gap=0.0),
    row("plan-of-a-colleague.json", 40_000_000_000, solve_seconds=None),
)


def test_a_plan_has_its_figures_in_eighty_columns() -> None:
    lines = shown(plans_table(FEW))
    assert all(len(line) <= 80 for line in lines)
    cells = [line.split() for line in lines if line.strip()]
    assert cells[2] == "* budget 10,000.0 25.0% 10,000.0 25.1% 30.1% 1.25% 1.00% 61.2 s".split()  # noqa: SIM905
    assert cells[3][-4:] == ["9,000.0", "none", "61.2", "s"]
    assert any("plan-of-a" in line for line in lines)


def test_what_bounds_are_of_is_told() -> None:
    told = " ".join(plans_lines(FEW))
    assert "below 8,000 MB, which 'conv' alone takes: at most 12.5%" in told
    assert "time (budget); paper (chen-greedy, plan-of-a-colleague.json)" in told
    assert "alone" not in " ".join(plans_lines({**FEW, "bound_operator": ""}))


def test_headings_are_folded_and_figures_are_not() -> None:
    wide = Cells(
        "title", ("plan", "a-plan-with-a-name" * 3, "another-plan-with-a-name" * 3), [("p", "1.0", "2")]
    )
    lines = shown(wide)
    assert all(len(line) <= 80 for line in lines)
    assert lines[-2].split() == ["p", "1.0", "2"]


def test_markdown_escapes_bars() -> None:
    cells = Cells("title", ("a|b", "MB"), [("x|y\nz", "1")])
    assert cells.markdown() == "**title**\n\n| a\\|b | MB |\n| --- | ---: |\n| x\\|y z | 1 |"


def test_the_overview_says_what_it_leaves_out() -> None:
    one = report(
        row("peak", 10_000_000_000, best=True), row("acg", 11_000_000_000), row("lcg", 12_000_000_000)
    )
    others = [report(row("acg", 10_000_000_000, best=True), row("peak", 20_000_000_000)) for _ in range(2)]
    broken = {"model": "b.onnx", "error": "no such thing"}
    each = {"comparisons": [one, *others, broken], "seconds": 12.0}
    few, every = overview_table(each), overview_table(each, all_columns=True)
    assert list(few.headings) == ["network", "all MB", "acg", "peak"]
    assert list(every.headings) == ["network", "all MB", "acg", "peak", "lcg"]
    assert list(few.rows[0]) == ["a", "40,000.0", "27.5", "*25.0"]
    assert list(every.rows[1]) == ["a", "40,000.0", "*25.0", "50.0", ""]
    told = overview_lines(each)
    assert "for few of the networks, and not shown: lcg" in told
    assert "3 networks in 12 s" in told
    assert told[-1] == "b.onnx: no such thing"
    assert not any("not shown" in line for line in overview_lines(each, all_columns=True))


def side(name: str, kept: list[str], again: list[str]) -> dict[str, Any]:
    def items(names: list[str]) -> list[dict[str, Any]]:
        return [{"tensor": tensor, "bytes": 1_000_000 * len(tensor)} for tensor in names]

    return {
        "name": name, "simulated_peak_bytes": 5_000_000 * len(name), "peak_step": "s", "peak_step_number": 3,
        "steps": 9, "largest_at_peak": items(["u", "vv"]), "kept_here_only": items(kept),
        "computed_again_here_only": items(again),
    }  # fmt: skip


def test_two_plans_differ_by_tensor() -> None:
    difference = {
        "plans": [side("a", ["t"], [LONG]), side("bb", [LONG], ["t", "uu"])],
        "peak_change_bytes": 5_000_000,
    }
    table = difference_table(difference)
    assert [list(line)[:3] for line in table.rows] == [
        [LONG, "again", "kept"],
        ["uu", "", "again"],
        ["t", "kept", "again"],
    ]
    assert all(len(line) <= 80 for line in shown(table))
    assert difference_table(difference, most=1).title.endswith("the largest 1")
    told = difference_lines(difference)
    assert told[0] == (
        "a: peak 5.0 MB at 's', step 3 of 9; kept only here: 1 (1.0 MB); computed again only here: 1 "
        "(68.0 MB); held there are most of all 'u' 1.0 MB, 'vv' 2.0 MB"
    )
    assert told[-1] == "the peak of bb is 5.0 MB higher than that of a"
    assert difference_lines({**difference, "peak_change_bytes": 0})[-1] == "both have the same peak"


PAIR: dict[str, Any] = {
    "a": "keras/a.onnx", "b": "torch/b.onnx", "is_same_network": True, "has_same_biases": False,
    "matched_tensors": 7, "rearranged_tensors": 2, "part_behind": [["p", "q"]],
    "operators_behind": [[["Relu"], ["Elu", "Neg"]]], "meet_again_at": [],
    "checkpoints": {
        "a": {"count": 4, "same_tensor": 3, "kept_by_both": 2, "ambiguous": ["k"], "one_side": [],
              "parted": []},
        "b": {"count": 0, "same_tensor": 0, "kept_by_both": 0, "ambiguous": [], "one_side": [],
              "parted": []},
    },
    "extras": [{"kind": "transposed copies", "count_a": 0, "count_b": 2, "bytes_a": 0, "bytes_b": 3_000_000}],
    "read_by_backward_here_only": {
        "a": [], "b": [{"tensor": "t", "bytes": 2_000_000, "detail": "a copy"}]
    },
    "carried_over": {
        "checkpoints": 3, "lost": ["k"], "undecided": 2, "decided": 5, "overruled": 1,
        "simulated_peak_bytes": 30_000_000, "as_it_is_simulated_peak_bytes": 31_000_000,
        "own_simulated_peak_bytes": 25_000_000, "regular_simulated_peak_bytes": 50_000_000,
    },
}  # fmt: skip


def test_where_peaks_of_files_are_is_told() -> None:
    peak = {"peak_step": "s", "largest_at_peak": [{"tensor": "t", "bytes": 1_000_000}]}
    assert file_lines({"files": [{"regular": peak, "planned": {**peak, "peak_step": "p"}}]}) == [
        "A: storing everything peaks at 's', where most of all 't' 1.0 MB are held; "
        "planned at 'p' with 't' 1.0 MB"
    ]


def test_a_pair_of_files_is_told_in_words() -> None:
    assert [list(line) for line in checkpoints_table({"pairs": [{}, PAIR]}, 1).rows][:3] == [
        ["checkpoints", "4", "0"],
        ["  the same tensor is in the other", "3 (75%)", "0"],
        ["    and is kept there too", "2 (50%)", "0"],
    ]
    told = pair_lines({"pairs": [{}, PAIR]}, 1)
    assert told == [
        "the same network, but for biases or normalisations that one of them has alone: 7 tensors are "
        "matched, 2 of them in another layout",
        "the plan of A in C: peak 30.0 MB made to fit (1 of 5 decisions are not those of A), "
        "31.0 MB as it is, 1 checkpoints lost; its own plan "
        "25.0 MB, storing everything 50.0 MB",
        "transposed copies: 0 (0.000 MB) in A, 2 (3.0 MB) in C",
        "backward reads in C only: 1 (2.0 MB), such as 't' 2.0 MB (a copy)",
    ]
    parted = pair_lines({"pairs": [{**PAIR, "is_same_network": False}]}, 0)
    assert parted[0].startswith("not the same network: 7 tensors")
    assert parted[1] == "alike up to 'p' = 'q'"
    assert parted[2] == "behind 'p' A goes on with Relu, and B with Elu, Neg"
