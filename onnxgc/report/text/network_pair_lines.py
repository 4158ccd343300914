"""One network in several files."""

from collections.abc import Sequence
from pathlib import PurePath

from onnxgc.report.data.compare_report import FileReport, NetworksReport, PairReport, PeakFigures, TransferredPlan
from onnxgc.report.text.plan_difference_lines import tensor_list, tensor_sum
from onnxgc.report.text.text_table import Cells
from onnxgc.report.text.units import figure, in_module, megabytes

_MAX_DIVERGENCES = 3


def file_label(place: int) -> str:
    """The short name of a file after the first table: A, B, ..."""
    return chr(ord("A") + place) if place < 26 else f"file {place + 1}"


def files_title(report: NetworksReport) -> str:
    others = [file_label(number) for number, pair in enumerate(report["pairs"], start=1) if not pair["is_same_network"]]
    if not others:
        return "one network in several files"
    verb = "differs" if len(others) == 1 else "differ"
    return f"several files that are not one network: {', '.join(others)} {verb} from {file_label(0)}"


def files_table(report: NetworksReport) -> Cells:
    rows = [
        (
            f"{file_label(place)}: {PurePath(file['model']).name}",
            str(file["operators"]),
            str(file["read_by_backward"]["count"]),
            figure(file["read_by_backward"]["bytes"]),
            figure(file["regular"]["simulated_peak_bytes"]),
            figure(file["planned"]["simulated_peak_bytes"]),
            str(file["planned"]["checkpoints"]),
            figure(file["planned"]["checkpoint_bytes"]),
        )
        for place, file in enumerate(report["files"])
    ]
    headings = ("file", "nodes", "read", "read\nMB", "base\nMB", "plan\nMB", "kept", "kept\nMB")
    return Cells(files_title(report), headings, rows)


def file_lines(report: NetworksReport) -> list[str]:
    """The meaning of the table's figures, and the peaks of each file."""
    return [
        "read: tensors that backward reads; base and plan: simulated peaks of the baseline and of the plan; "
        "kept: checkpoints",
        *(
            f"{file_label(place)}: the baseline's peak is at {_peak(file, file['regular'])}; "
            f"the plan's at {_peak(file, file['planned'])}"
            for place, file in enumerate(report["files"])
        ),
    ]


def _peak(file: FileReport, side: PeakFigures) -> str:
    step, modules = side["peak_step"], file["modules"]
    return f"'{step}'{in_module(step, modules)} with {tensor_list(side['largest_at_peak'][:3], modules)}"


def checkpoints_table(report: NetworksReport, number: int) -> Cells:
    """The fate of each file's own checkpoints in the other file, for the pair of this number."""
    checkpoints = report["pairs"][number]["checkpoints"]
    sides = [checkpoints["a"], checkpoints["b"]]
    labels = (file_label(0), file_label(number + 1))

    def row(label: str, counts: Sequence[int]) -> tuple[str, ...]:
        return (label, *(_of(count, side["count"]) for count, side in zip(counts, sides, strict=True)))

    rows = [
        ("checkpoints", *(str(side["count"]) for side in sides)),
        row("  matched in the other file", [side["same_tensor"] for side in sides]),
        row("    and kept there too", [side["kept_by_both"] for side in sides]),
        row("  ambiguous", [len(side["ambiguous"]) for side in sides]),
        row("  on this side only", [len(side["one_side"]) for side in sides]),
        row("  where the networks differ", [len(side["parted"]) for side in sides]),
    ]
    return Cells(f"{labels[0]} and {labels[1]}: plans", ("", *labels), rows)


def _of(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})" if total else str(count)


def pair_lines(report: NetworksReport, number: int) -> list[str]:
    """How the files match, the transferred plan's peak, and why one file needs more memory."""
    pair, a, b = report["pairs"][number], file_label(0), file_label(number + 1)
    lines = [_match_line(pair)]
    lines += [f"{other['what']}: {other['a']} in {a}, {other['b']} in {b}" for other in pair["differences"]]
    if not pair["is_same_network"]:
        lines += _tensor_pairs("equal up to", pair["part_behind"])
        lines += _operators_after(pair, a, b)
        lines += _tensor_pairs("equal again from", pair["meet_again_at"])
    lines.append(_transfer_line(pair["carried_over"], a, b))
    lines += [
        f"{extra['kind']}: {extra['count_a']} ({megabytes(extra['bytes_a'])}) in {a}, "
        f"{extra['count_b']} ({megabytes(extra['bytes_b'])}) in {b}"
        for extra in pair["extras"]
    ]
    for side, name, file in (("a", a, report["files"][0]), ("b", b, report["files"][number + 1])):
        here_only = pair["read_by_backward_here_only"][side]
        if here_only:
            examples = tensor_list(here_only[:3], file["modules"])
            lines.append(f"backward reads in {name} only: {tensor_sum(here_only)}, such as {examples}")
    return lines


def _match_line(pair: PairReport) -> str:
    kind = "the same network" if pair["is_same_network"] else "not the same network"
    if pair["is_same_network"] and not pair["has_same_biases"]:
        kind += ", except for biases or normalisations that only one of them has"
    line = f"{kind}: {pair['matched_tensors']} tensors are matched"
    if pair["rearranged_tensors"]:
        line += f", {pair['rearranged_tensors']} of them in another layout"
    if pair["multiplied_tensors"]:
        line += f", {pair['multiplied_tensors']} up to a constant factor"
    return line


def _transfer_line(plan: TransferredPlan, a: str, b: str) -> str:
    adapted = ""
    if plan["simulated_peak_bytes"] != plan["as_it_is_simulated_peak_bytes"]:
        overruled = f" ({plan['overruled']} of {plan['decided']} decisions differ from {a}'s)"
        adapted = (
            f" after adaptation{overruled if plan['overruled'] else ''}, "
            f"{megabytes(plan['as_it_is_simulated_peak_bytes'])} before"
        )
    lost = f", {len(plan['lost'])} checkpoints lost" if plan["lost"] else ""
    part = " (its checkpoints, without the sequence of operators)" * plan["is_without_sequence"]
    return (
        f"the plan of {a} in {b}{part}: peak {megabytes(plan['simulated_peak_bytes'])}{adapted}{lost}; "
        f"its own plan {megabytes(plan['own_simulated_peak_bytes'])}, "
        f"baseline {megabytes(plan['regular_simulated_peak_bytes'])}"
    )


def _tensor_pairs(words: str, pairs: Sequence[Sequence[str]]) -> list[str]:
    if not pairs:
        return []
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return [f"{words} {', '.join(f'{a!r} = {b!r}' for a, b in pairs[:3])}{more}"]


def _operators_after(pair: PairReport, a: str, b: str) -> list[str]:
    """The operators at which the files diverge; they may be two forms of one function.

    Layers and windows of equal sizes on both sides belong to other branches and are left out.
    """
    lines: dict[str, str] = {}
    for (one, _), (first, second) in zip(pair["part_behind"], pair["operators_behind"], strict=True):
        common = {operator for operator in first if " " in operator and operator in second}
        sides = ([operator for operator in side if operator not in common] for side in (first, second))
        here, there = (", ".join(side) or "no other operators" for side in sides)
        if here != there:
            lines.setdefault(here + there, f"after {one!r} {a} continues with {here}, and {b} with {there}")
    if not lines and pair["part_behind"]:
        return ["the same operators follow on both sides, in another arrangement"]
    return list(lines.values())[:_MAX_DIVERGENCES]
