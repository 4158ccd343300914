"""The difference between two plans for one model."""

from collections.abc import Mapping, Sequence

from onnxgc.report.data.compare_report import DifferenceReport, TensorFates
from onnxgc.report.data.optimize_report import TensorFigures
from onnxgc.report.text.text_table import Cells
from onnxgc.report.text.units import figure, in_module, megabytes

MAX_TENSORS = 10
"""Tensors in a table, unless all are requested."""
_ONCE, _AGAIN = "once", "again"
_NAMES = {"checkpoint": "checkpoint", "held": "kept", _ONCE: "released", _AGAIN: "recomputed"}
_MEANINGS = {
    "held": "not a checkpoint, but live when backward begins: its segment, the last, is not recomputed",
    _ONCE: "computed once, and released before backward",
}


def difference_table(difference: DifferenceReport, *, most: int | None = MAX_TENSORS) -> Cells:
    """Tensors that only one of two plans keeps or recomputes, the largest first, with both fates."""
    modules = difference["modules"]
    differing = [item for item in difference["tensors"] if not _is_kept_by_both(item)]
    rows = [
        (
            item["tensor"] + in_module(item["tensor"], modules),
            *(_NAMES[fate] for fate in item["fates"]),
            figure(item["bytes"]),
        )
        for item in differing[:most]
    ]
    title = f"{len(differing)} tensors are kept or recomputed by one plan only"
    if len(differing) > len(rows):
        title += f", the largest {len(rows)}"
    headings = ("tensor", *(side["name"] for side in difference["plans"]), "MB")
    return Cells(title, headings, rows, text_columns=3)


def _is_kept_by_both(item: TensorFates) -> bool:
    """Whether the tensor is a checkpoint of one plan, and kept by the other as well."""
    return not {_ONCE, _AGAIN}.intersection(item["fates"])


def difference_lines(difference: DifferenceReport) -> list[str]:
    """The table's terms, both peaks, and the change."""
    modules = difference["modules"]
    lines = [
        f"{side['name']}: peak {megabytes(side['simulated_peak_bytes'])} at "
        f"'{side['peak_step']}'{in_module(side['peak_step'], modules)}, "
        f"step {side['peak_step_number']:,} of {side['steps']:,}; "
        f"kept only here: {tensor_sum(side['kept_here_only'])}; "
        f"recomputed only here: {tensor_sum(side['computed_again_here_only'])}; "
        f"largest tensors at the peak: {tensor_list(side['largest_at_peak'][:3], modules)}"
        for side in difference["plans"]
    ]
    one, other = (side["name"] for side in difference["plans"])
    change = difference["peak_change_bytes"]
    if change:
        word = "higher" if change > 0 else "lower"
        lines.append(f"the peak of {other} is {megabytes(abs(change))} {word} than that of {one}")
    else:
        lines.append("both have the same peak")
    return [*_fate_lines(difference), *lines]


def _fate_lines(difference: DifferenceReport) -> list[str]:
    differing = [item for item in difference["tensors"] if not _is_kept_by_both(item)]
    same = [item for item in difference["tensors"] if _is_kept_by_both(item)]
    used = {fate for item in differing for fate in item["fates"]}
    explained = [f"{_NAMES[fate]}: {meaning}" for fate, meaning in _MEANINGS.items() if fate in used]
    lines = ["; ".join(explained)] if explained else []
    if same:
        lines.append(
            f"kept by both: {tensor_sum(same)} that are checkpoints of one plan only; the other does not "
            "recompute its last segment"
        )
    return lines


def tensor_sum(items: Sequence[TensorFigures] | Sequence[TensorFates]) -> str:
    return f"{len(items)} ({megabytes(sum(item['bytes'] for item in items))})" if items else "none"


def tensor_list(items: Sequence[TensorFigures], modules: Mapping[str, str]) -> str:
    named = []
    for item in items:
        detail = f" ({item['detail']})" if "detail" in item else ""
        named.append(f"'{item['tensor']}'{in_module(item['tensor'], modules)} {megabytes(item['bytes'])}{detail}")
    return ", ".join(named)
