"""Tables of plans side by side, for terminals and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich import box
from rich.table import Table

from onnxgc.report.budgets import percent
from onnxgc.report.tables import MEGABYTE, megabytes

Report = Mapping[str, Any]
BEST = "*"
MOST_TENSORS = 10
"""Tensors that a table names where not all were asked for."""
_TIME = "time"
_ALWAYS_TOLD = ("per-block", "torch-budget", "budget")


@dataclass(frozen=True, slots=True)
class Cells:
    """A table before it has a form: the first `text_columns` are text, the others figures."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    def for_terminal(self) -> Table:
        """A table without its title, that fits 80 columns as long as names are of a usual length."""
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for place, heading in enumerate(self.headings):
            is_text = place < self.text_columns
            # Headings and names are folded, figures never.
            width = 0 if is_text else max((len(row[place]) for row in self.rows), default=0)
            table.add_column(
                heading, justify="left" if is_text else "right", overflow="fold", min_width=width or None
            )
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """The same as Markdown, the title in bold above it."""
        places = range(len(self.headings))
        rule = ["---" if place < self.text_columns else "---:" for place in places]
        lines = [self.headings, rule, *self.rows]
        escaped = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
        return "\n".join((f"**{self.title}**", "", *(f"| {line} |" for line in escaped)))


def figure(size_bytes: float) -> str:
    """Megabytes without the unit, which the heading has."""
    size = size_bytes / MEGABYTE
    return f"{size:,.1f}" if size >= 1 else f"{size:.3f}"


# -- plans for one model ------------------------------------------------------------------------


def plans_table(report: Report) -> Cells:
    """A row for each plan, the lowest peak first."""
    headings = ("plan", "peak MB", "of all", "kept MB", "time", "flops", "bound", "gap", "search")
    rows = [
        (
            f"{BEST if row['best'] else ' '} {row['name']}",
            figure(row["simulated_peak_bytes"]),
            percent(row["share_of_regular"]),
            figure(row["checkpoint_bytes"]),
            percent(row["extra_time_ratio"]),
            percent(row["extra_flops_ratio"]),
            _bound(row),
            "none" if row["status"] == "optimal" else percent(row["gap"]),
            "" if row["solve_seconds"] is None else f"{row['solve_seconds']:.1f} s",
        )
        for row in report["rows"]
    ]
    shape = ", ".join("x".join(map(str, shape)) or "scalar" for shape in report["inputs"].values())
    return Cells(f"{report['model']}, {shape}: plans for one training step", headings, rows)


def _bound(row: Report) -> str:
    if row["objective"] == _TIME:
        return percent(row["lower_bound_ratio"])
    return figure(row["lower_bound_bytes"])


def plans_lines(report: Report) -> list[str]:
    """What the table's figures are."""
    best = report["rows"][0]
    bound = megabytes(report["lower_bound_bytes"])
    if report["bound_operator"]:
        bound += f", which '{report['bound_operator']}' alone takes"
    objectives: dict[str, list[str]] = {}
    for row in report["rows"]:
        objectives.setdefault(row["objective"], []).append(row["name"])
    listed = "; ".join(f"{name} ({', '.join(rows)})" for name, rows in objectives.items())
    return [
        f"{BEST} the lowest simulated peak; no plan's is below {bound}: "
        f"at most {percent(best['peak_gap'])} of it could still be saved",
        f"time and flops: what runs again, as a share of the step's; times: {report['timing']}",
        f"bound and gap: of each row's own objective, in MB (of time: in %): {listed}",
    ]


def left_out_lines(report: Report, *, every: bool) -> list[str]:
    """Why what was asked for has no row; of what takes other graphs only where every reason is wanted."""
    shown = [item for item in report["left_out"] if every or item["name"] in _ALWAYS_TOLD]
    return [f"{item['name']}: {item['reason']}" for item in shown]


def detail_lines(report: Report) -> list[str]:
    """What each row is."""
    return [f"{row['name']}: {row['detail']}" for row in report["rows"] if row["detail"]]


# -- two plans ----------------------------------------------------------------------------------


def difference_table(difference: Report, *, most: int | None = MOST_TENSORS) -> Cells:
    """Tensors to which two plans do different things, the largest first."""
    sides = difference["plans"]
    fates: list[dict[str, str]] = []
    sizes: dict[str, int] = {}
    for side in sides:
        fate: dict[str, str] = {}
        for key, word in (("computed_again_here_only", "again"), ("kept_here_only", "kept")):
            fate |= {item["tensor"]: word for item in side[key]}
            sizes |= {item["tensor"]: item["bytes"] for item in side[key]}
        fates.append(fate)
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    rows = [(name, *(fate.get(name, "") for fate in fates), figure(sizes[name])) for name in names[:most]]
    title = f"{len(names)} tensors are kept or computed again by one plan only"
    if len(names) > len(rows):
        title += f", the largest {len(rows)}"
    return Cells(title, ("tensor", *(side["name"] for side in sides), "MB"), rows, text_columns=3)


def difference_lines(difference: Report) -> list[str]:
    """What the change does to the peak, and where it is."""
    lines = [
        f"{side['name']}: peak {megabytes(side['simulated_peak_bytes'])} at '{side['peak_step']}', "
        f"step {side['peak_step_number']} of {side['steps']}; "
        f"kept only here: {_count(side['kept_here_only'])}; "
        f"computed again only here: {_count(side['computed_again_here_only'])}; "
        f"held there are most of all {_named(side['largest_at_peak'][:3])}"
        for side in difference["plans"]
    ]
    one, other = (side["name"] for side in difference["plans"])
    change = difference["peak_change_bytes"]
    if change:
        word = "higher" if change > 0 else "lower"
        lines.append(f"the peak of {other} is {megabytes(abs(change))} {word} than that of {one}")
    else:
        lines.append("both have the same peak")
    return lines


def _count(items: Sequence[Report]) -> str:
    return f"{len(items)} ({megabytes(sum(item['bytes'] for item in items))})" if items else "none"


# -- several networks ---------------------------------------------------------------------------


def overview_table(report: Report, *, all_columns: bool = False) -> Cells:
    """Peaks of all plans for all networks, as shares of storing everything.

    Plans that few networks have are left out unless `all_columns` are wanted.
    """
    found = [one for one in report["comparisons"] if "error" not in one]
    rows_of = [{row["name"]: row for row in one["rows"]} for one in found]
    names = _plan_names(found, all_columns=all_columns)
    rows = []
    for one, plans in zip(found, rows_of, strict=True):
        cells = [_share(plans[name]) if name in plans else "" for name in names]
        rows.append((PurePath(one["model"]).stem, figure(one["regular"]["simulated_peak_bytes"]), *cells))
    headings = ("network", "all MB", *(name.replace("-", "-\n") for name in names))
    return Cells("simulated peaks, as shares of storing everything", headings, rows)


def _plan_names(found: Sequence[Report], *, all_columns: bool) -> list[str]:
    counts: dict[str, int] = {}
    for one in found:
        for name in (*(row["name"] for row in one["rows"]), *(item["name"] for item in one["left_out"])):
            counts.setdefault(name, 0)
        for row in one["rows"]:
            counts[row["name"]] += 1
    order = _order([[row["name"] for row in one["rows"]] for one in found])
    return [name for name in order if name != "store-all" and (all_columns or 2 * counts[name] >= len(found))]


def _order(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names by how far up they mostly stand."""
    places: dict[str, list[float]] = {}
    for names in rows:
        for place, name in enumerate(names):
            places.setdefault(name, []).append(place / len(names))
    return sorted(places, key=lambda name: (sum(places[name]) / len(places[name]), name))


def _share(row: Report) -> str:
    mark = BEST if row["best"] else ""
    return f"{mark}{100 * row['share_of_regular']:.1f}"


def overview_lines(report: Report, *, all_columns: bool = False) -> list[str]:
    """What the overview leaves out, and how long it took."""
    found = [one for one in report["comparisons"] if "error" not in one]
    shown = _plan_names(found, all_columns=all_columns)
    hidden = [name for name in _plan_names(found, all_columns=True) if name not in shown]
    lines = [f"{BEST} the lowest peak; shares in %"]
    if hidden:
        lines.append(f"for few of the networks, and not shown: {', '.join(hidden)}")
    lines.append(f"{len(found)} networks in {report['seconds']:.0f} s")
    lines += [f"{one['model']}: {one['error']}" for one in report["comparisons"] if "error" in one]
    return lines


# -- one network in several files -----------------------------------------------------------------


def file_label(place: int) -> str:
    """What a file is called behind the first table: A, B, ..."""
    return chr(ord("A") + place) if place < 26 else f"file {place + 1}"


def files_table(report: Report) -> Cells:
    """What each file costs by itself."""
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
    headings = (
        "file",
        "nodes",
        "backward\nreads",
        "MB",
        "store-all\npeak MB",
        "planned\npeak MB",
        "kept",
        "kept\nMB",
    )
    return Cells("one network in several files", headings, rows)


def file_lines(report: Report) -> list[str]:
    """Where each file's peak is, and what it is made of."""
    return [
        f"{file_label(place)}: storing everything peaks at '{file['regular']['peak_step']}', "
        f"where most of all {_named(file['regular']['largest_at_peak'][:3])} are held; "
        f"planned at '{file['planned']['peak_step']}' with "
        f"{_named(file['planned']['largest_at_peak'][:3])}"
        for place, file in enumerate(report["files"])
    ]


def checkpoints_table(report: Report, number: int) -> Cells:
    """What became of the checkpoints of two files' own plans in the other file, for the pair of a number."""
    sides = [report["pairs"][number]["checkpoints"][side] for side in ("a", "b")]
    labels = (file_label(0), file_label(number + 1))

    def row(label: str, counts: Sequence[int]) -> tuple[str, ...]:
        return (label, *(_of(count, side["count"]) for count, side in zip(counts, sides, strict=True)))

    rows = [
        ("checkpoints", *(str(side["count"]) for side in sides)),
        row("  the same tensor is in the other", [side["same_tensor"] for side in sides]),
        row("    and is kept there too", [side["kept_by_both"] for side in sides]),
        row("  ambiguous", [len(side["ambiguous"]) for side in sides]),
        row("  on this side only", [len(side["one_side"]) for side in sides]),
        row("  where the networks differ", [len(side["parted"]) for side in sides]),
    ]
    return Cells(f"{labels[0]} and {labels[1]}: own plans", ("", *labels), rows)


def _of(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})" if total else str(count)


def pair_lines(report: Report, number: int) -> list[str]:
    """Whether it is one network, what the plan of the first does in the other, and why one costs more."""
    pair, a, b = report["pairs"][number], file_label(0), file_label(number + 1)
    carried = pair["carried_over"]
    if pair["is_same_network"]:
        kind = "the same network"
        if not pair["has_same_biases"]:
            kind += ", but for biases or normalisations that one of them has alone"
    else:
        kind = "not the same network"
    lines = [f"{kind}: {pair['matched_tensors']} tensors are matched"]
    if pair["rearranged_tensors"]:
        lines[0] += f", {pair['rearranged_tensors']} of them in another layout"
    if not pair["is_same_network"]:
        lines += _parting("alike up to", pair["part_behind"])
        lines += _operators_behind(pair, a, b)
        lines += _parting("alike again from", pair["meet_again_at"])
    fitted = ""
    if carried["simulated_peak_bytes"] != carried["as_it_is_simulated_peak_bytes"]:
        overruled = f" ({carried['overruled']} of {carried['decided']} decisions are not those of {a})"
        fitted = (
            f" made to fit{overruled if carried['overruled'] else ''}, "
            f"{megabytes(carried['as_it_is_simulated_peak_bytes'])} as it is"
        )
    lost = f", {len(carried['lost'])} checkpoints lost" if carried["lost"] else ""
    lines.append(
        f"the plan of {a} in {b}: peak {megabytes(carried['simulated_peak_bytes'])}{fitted}{lost}; "
        f"its own plan {megabytes(carried['own_simulated_peak_bytes'])}, "
        f"storing everything {megabytes(carried['regular_simulated_peak_bytes'])}"
    )
    lines += [
        f"{extra['kind']}: {extra['count_a']} ({megabytes(extra['bytes_a'])}) in {a}, "
        f"{extra['count_b']} ({megabytes(extra['bytes_b'])}) in {b}"
        for extra in pair["extras"]
    ]
    for side, name in (("a", a), ("b", b)):
        alone = pair["read_by_backward_here_only"][side]
        if alone:
            lines.append(f"backward reads in {name} only: {_count(alone)}, such as {_named(alone[:3])}")
    return lines


def _parting(words: str, pairs: Sequence[Sequence[str]]) -> list[str]:
    if not pairs:
        return []
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return [f"{words} {', '.join(f'{a!r} = {b!r}' for a, b in pairs[:3])}{more}"]


def _operators_behind(pair: Report, a: str, b: str) -> list[str]:
    """By which operators the files part, where both have some: perhaps two spellings of one function."""
    for (one, _), (here, there) in zip(pair["part_behind"], pair["operators_behind"], strict=True):
        if here and there:
            return [f"behind {one!r} {a} goes on with {', '.join(here)}, and {b} with {', '.join(there)}"]
    return []


def _named(items: Sequence[Report]) -> str:
    """Tensors with their sizes, and with a detail where there is one."""
    named = []
    for item in items:
        detail = f" ({item['detail']})" if "detail" in item else ""
        named.append(f"'{item['tensor']}' {megabytes(item['bytes'])}{detail}")
    return ", ".join(named)
