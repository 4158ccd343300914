import io
from typing import Any, cast

from rich.console import Console

from onnxgc.report.terminal.fitted_table import FittedTable
from onnxgc.report.text.network_pair_lines import checkpoints_table, file_lines, files_title, pair_lines
from onnxgc.report.text.networks_overview import overview_lines, overview_table
from onnxgc.report.text.plan_difference_lines import difference_lines, difference_table
from onnxgc.report.text.plan_rows import plans_lines, plans_table
from onnxgc.report.text.text_table import Cells

LONG = "/encoder/layers/11/self_attention/scaled_dot_product/MatMul_output_0"


def shown(cells: Cells) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(FittedTable(cells))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row(name: str, peak: int, **more: Any) -> Any:
    return {
        "name": name, "kind": "solver", "detail": "", "simulated_peak_bytes": peak, "best": False,
        "share_of_regular": peak / 40_000_000_000, "checkpoint_bytes": 10_000_000_000, "peak_gap": 0.125,
        "extra_time_ratio": 0.2512, "extra_flops_ratio": 0.3011, "objective": "paper", "status": "feasible",
        "lower_bound_bytes": 9_000_000_000, "lower_bound_ratio": None, "gap": 0.5, "solve_seconds": 61.25,
        **more,
    }  # fmt: skip


def report(*rows: Any, **more: Any) -> Any:
    return {
        "model": "a.onnx", "inputs": {"x": [64, 3, 224, 224]}, "timing": "data sheet of a card", "notes": [],
        "lower_bound_bytes": 8_000_000_000, "bound_operator": "conv", "left_out": [], "rows": list(rows),
        "regular": {"simulated_peak_bytes": 40_000_000_000}, "seconds": 3.0, "modules": {}, **more,
    }  # fmt: skip


FEW = report(
    row("budget", 10_000_000_000, best=True, objective="time", lower_bound_ratio=0.0125, gap=0.01),
    row("chen-greedy", 12_345_600_000, status="optimal", gap=0.0),
    row("plan-of-a-colleague.json", 40_000_000_000, solve_seconds=None),
)


def test_a_plan_has_its_figures_in_eighty_columns():
    lines = shown(plans_table(FEW))
    assert all(len(line) <= 80 for line in lines)
    cells = [line.split() for line in lines if line.strip()]
    assert cells[3] == "* budget 10,000 25.0% 10,000 25.1% 30.1% 1.25% 1.00% 61.2 s".split()  # noqa: SIM905
    assert cells[4][-4:] == ["9,000", "none", "61.2", "s"]
    # A long name is broken between its parts.
    assert [line.split()[0] for line in lines if "plan-of" in line or "colleague" in line] == [
        "plan-of-a-",
        "colleague.json",
    ]


def test_lines_state_the_objective_of_each_bound():
    lines = " ".join(plans_lines(FEW))
    assert "lower bound 8,000 MB (the working set of 'conv'): at most 12.5%" in lines
    assert "time (budget); paper (chen-greedy, plan-of-a-colleague.json)" in lines
    assert "working set" not in " ".join(plans_lines(report(*FEW["rows"], bound_operator="")))


def test_headings_are_folded_and_figures_are_not():
    wide = Cells("title", ("plan", "a-plan-with-a-name" * 3, "another-plan-with-a-name" * 3), [("p", "1.0", "2")])
    lines = shown(wide)
    assert all(len(line) <= 80 for line in lines)
    assert lines[-2].split() == ["p", "1.0", "2"]


def test_names_stay_whole_with_many_figures():
    headings = ("network", *(f"plan-\n{number}" for number in range(12)))
    many = Cells("title", headings, [("densenet201", *(["*100.0"] * 12)), ("resnet18", *(["99.5"] * 12))])
    lines = shown(many)
    assert all(len(line) <= 80 for line in lines)
    of_one = [line.split() for line in lines if line.split()[:1] == ["densenet201"]]
    assert len(of_one) == 2
    assert sum(cells.count("*100.0") for cells in of_one) == 12


def test_brackets_in_a_name_are_no_markup():
    assert any("layers[0]" in line for line in shown(Cells("title", ("a", "b"), [("layers[0]", "[/b]")])))


def test_the_title_of_files_states_whether_they_are_one_network():
    def title(*is_same: bool) -> str:
        found: Any = {"pairs": [{"is_same_network": same} for same in is_same]}
        return files_title(found)

    assert title(True, True) == "one network in several files"
    assert title(False, True) == "several files that are not one network: B differs from A"
    assert title(False, True, False).endswith("B, D differ from A")


def test_markdown_escapes_bars():
    cells = Cells("title", ("a|b", "per-\nblock\nMB"), [("x|y\nz", "1")])
    assert cells.markdown() == "**title**\n\n| a\\|b | per-block MB |\n| --- | ---: |\n| x\\|y z | 1 |"


def test_the_overview_lists_its_omissions():
    one = report(row("peak", 10_000_000_000, best=True), row("acg", 11_000_000_000), row("lcg", 12_000_000_000))
    others = [report(row("acg", 10_000_000_000, best=True), row("peak", 20_000_000_000)) for _ in range(2)]
    broken = {"model": "b.onnx", "error": "not found"}
    each: Any = {"comparisons": [one, *others, broken], "seconds": 12.0}
    few, every = overview_table(each), overview_table(each, all_columns=True)
    assert list(few.headings) == ["network", "baseline MB", "acg", "peak"]
    assert list(every.headings) == ["network", "baseline MB", "acg", "peak", "lcg"]
    assert list(few.rows[0]) == ["a", "40,000", "27.5", "*25.0"]
    assert list(every.rows[1]) == ["a", "40,000", "*25.0", "50.0", "-"]
    lines = overview_lines(each)
    assert "not shown, since few networks have them: lcg" in lines
    assert "3 networks in 12 s" in lines
    assert lines[-1] == "b.onnx: not found"
    assert not any(line.startswith("- no plan") for line in lines)
    lines = overview_lines(each, all_columns=True)
    assert "- no plan of this kind for the network; -v shows the reasons" in lines
    assert not any("not shown" in line for line in lines)


def test_a_budget_without_a_plan_has_a_column():
    left = {"left_out": [{"name": "budget", "reason": "no plan fits 10 bytes"}]}
    one = report(row("acg", 11_000_000_000, best=True), **left)
    each: Any = {"comparisons": [one], "seconds": 1.0}
    table = overview_table(each)
    assert list(table.headings) == ["network", "baseline MB", "acg", "budget"]
    assert table.rows[0][-1] == "no fit"
    assert "a.onnx: no plan fits 10 bytes" in overview_lines(each)
    assert list(plans_table(one).rows[-1])[:3] == ["  budget", "no fit", ""]


def side(name: str, kept: list[str], again: list[str]) -> dict[str, Any]:
    def items(names: list[str]) -> list[dict[str, Any]]:
        return [{"tensor": tensor, "bytes": 1_000_000 * len(tensor)} for tensor in names]

    return {
        "name": name, "simulated_peak_bytes": 5_000_000 * len(name), "peak_step": "s", "peak_step_number": 3,
        "steps": 9, "largest_at_peak": items(["u", "vv"]), "kept_here_only": items(kept),
        "computed_again_here_only": items(again),
    }  # fmt: skip


def test_two_plans_differ_by_tensor():
    tensors = [
        (LONG, "again", "checkpoint"), ("uu", "once", "again"), ("t", "held", "again"),
        ("vvv", "held", "checkpoint"),
    ]  # fmt: skip
    difference: Any = {
        "plans": [side("a", ["t"], [LONG]), side("bb", [LONG], ["t", "uu"])],
        "tensors": [{"tensor": name, "bytes": 1_000_000 * len(name), "fates": fates} for name, *fates in tensors],
        "peak_change_bytes": 5_000_000,
        "modules": {"uu": "blocks.1", "s": "blocks.2", "vv": "blocks.3"},
    }
    table = difference_table(difference)
    # A tensor that both keep is not a difference, even if it is a checkpoint of one only.
    assert [line[:3] for line in table.rows] == [
        (LONG, "recomputed", "checkpoint"),
        ("uu in 'blocks.1'", "released", "recomputed"),
        ("t", "kept", "recomputed"),
    ]
    assert table.title == "3 tensors are kept or recomputed by one plan only"
    assert all(len(line) <= 80 for line in shown(table))
    assert difference_table(difference, most=1).title.endswith("the largest 1")
    terms, same, *lines = difference_lines(difference)
    assert terms == (
        "kept: not a checkpoint, but live when backward begins: its segment, the last, is not recomputed; "
        "released: computed once, and released before backward"
    )
    assert same.startswith("kept by both: 1 (3.0 MB) that are checkpoints of one plan only")
    assert lines[0] == (
        "a: peak 5.0 MB at 's' in 'blocks.2', step 3 of 9; kept only here: 1 (1.0 MB); recomputed only "
        "here: 1 (68.0 MB); largest tensors at the peak: 'u' 1.0 MB, 'vv' in 'blocks.3' 2.0 MB"
    )
    assert lines[-1] == "the peak of bb is 5.0 MB higher than that of a"
    assert difference_lines(cast(Any, {**difference, "peak_change_bytes": 0}))[-1] == "both have the same peak"


PAIR: dict[str, Any] = {
    "a": "keras/a.onnx", "b": "torch/b.onnx", "is_same_network": True, "has_same_biases": False,
    "differences": [{"what": "epsilon", "a": "1e-05", "b": "0.001"}],
    "matched_tensors": 7, "rearranged_tensors": 2, "multiplied_tensors": 1, "part_behind": [["p", "q"]],
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
        "checkpoints": 3, "is_without_sequence": False, "lost": ["k"],
        "undecided": 2, "decided": 5, "overruled": 1,
        "simulated_peak_bytes": 30_000_000, "as_it_is_simulated_peak_bytes": 31_000_000,
        "own_simulated_peak_bytes": 25_000_000, "regular_simulated_peak_bytes": 50_000_000,
    },
}  # fmt: skip


def pairs(*pairs: Any) -> Any:
    return {"pairs": list(pairs), "files": [{"modules": {}}] * (len(pairs) + 1)}


def test_the_peaks_of_files_are_described():
    peak = {"peak_step": "s", "largest_at_peak": [{"tensor": "t", "bytes": 1_000_000}]}
    found: Any = {"files": [{"regular": peak, "planned": {**peak, "peak_step": "p"}, "modules": {"p": "n"}}]}
    assert file_lines(found)[1:] == [
        "A: the baseline's peak is at 's' with 't' 1.0 MB; the plan's at 'p' in 'n' with 't' 1.0 MB"
    ]


def test_a_pair_of_files_is_described():
    assert [list(line) for line in checkpoints_table(pairs({}, PAIR), 1).rows][:3] == [
        ["checkpoints", "4", "0"],
        ["  matched in the other file", "3 (75%)", "0"],
        ["    and kept there too", "2 (50%)", "0"],
    ]
    assert pair_lines(pairs({}, PAIR), 1) == [
        "the same network, except for biases or normalisations that only one of them has: 7 tensors are "
        "matched, 2 of them in another layout, 1 up to a constant factor",
        "epsilon: 1e-05 in A, 0.001 in C",
        "the plan of A in C: peak 30.0 MB after adaptation (1 of 5 decisions differ from A's), "
        "31.0 MB before, 1 checkpoints lost; its own plan 25.0 MB, baseline 50.0 MB",
        "transposed copies: 0 (0.000 MB) in A, 2 (3.0 MB) in C",
        "backward reads in C only: 1 (2.0 MB), such as 't' 2.0 MB (a copy)",
    ]
    parted = pair_lines(pairs({**PAIR, "is_same_network": False}), 0)
    assert parted[0].startswith("not the same network: 7 tensors")
    assert parted[2] == "equal up to 'p' = 'q'"
    assert parted[3] == "after 'p' A continues with Relu, and B with Elu, Neg"


def test_a_divergence_is_described_by_the_operators_that_differ():
    """Layers of equal sizes on both sides belong to other branches; one side may have no other operators."""
    layer, window = "Conv 1x1 4 to 4", "AveragePool 3x3 pads 1"
    pair = {
        **PAIR, "is_same_network": False, "part_behind": [["p", "q"], ["r", "s"], ["t", "u"], ["v", "w"]],
        "operators_behind": [
            [["Add", layer], ["Add", layer]], [[layer, window], [f"{window} counting pads", layer]],
            [["Pad"], []], [[window], [f"{window} counting pads"]],
        ],
    }  # fmt: skip
    lines = [line for line in pair_lines(pairs(pair), 0) if line.startswith("after")]
    assert lines == [
        f"after 'r' A continues with {window}, and B with {window} counting pads",
        "after 't' A continues with Pad, and B with no other operators",
    ]
    same = {**pair, "operators_behind": [[["Add"], ["Add"]]] * 4}
    assert "the same operators follow on both sides, in another arrangement" in pair_lines(pairs(same), 0)
