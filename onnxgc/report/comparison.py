"""Tables of plans side by side, for terminals and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from onnxgc.report.budgets import percent
from onnxgc.report.tables import MEGABYTE, megabytes

Report = Mapping[str, Any]
BEST = "*"
MOST_TENSORS = 10
"""Tensors that a table names where not all were asked for."""
_MOST_PARTINGS = 3
_TIME = "time"
_BUDGET, _NO_FIT, _NO_PLAN = "budget", "no fit", "-"
_ALWAYS_TOLD = ("per-block", "torch-budget", "budget")


@dataclass(frozen=True, slots=True)
class Cells:
    """A table before it has a form: the first `text_columns` are text, the others figures."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    @property
    def headings_in_line(self) -> tuple[str, ...]:
        """The headings as they are where nothing is narrow."""
        return tuple(heading.replace("-\n", "-").replace("\n", " ") for heading in self.headings)

    def for_terminal(self) -> RenderableType:
        """A table without its title, as wide as the terminal."""
        return _Fitted(self)

    def markdown(self) -> str:
        """The same as Markdown, the title in bold above it."""
        places = range(len(self.headings))
        rule = ["---" if place < self.text_columns else "---:" for place in places]
        lines = [self.headings_in_line, rule, *self.rows]
        escaped = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
        return "\n".join((f"**{self.title}**", "", *(f"| {line} |" for line in escaped)))


_HEADING_WIDTH = 12
"""Headings are broken where they are wider than this and than what is below them."""
_PARTS = re.compile(r"[^-_./: ]*[-_./: ]*")


def _broken(name: str, width: int) -> str:
    """A name in lines of that width, broken between its parts; a part that is wider stays whole."""
    indent = " " * (len(name) - len(name.lstrip(f"{BEST} ")))
    lines = [""]
    for part in _PARTS.findall(name):
        if lines[-1].strip(f"{BEST} ") and len(lines[-1]) + len(part) > width:
            lines.append(indent)
        lines[-1] += part
    return "\n".join(lines)


def _width(text: str) -> int:
    return max(map(len, text.split("\n")))


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Cells in the width of a terminal.

    Names are broken between their parts if need be. Where that is not enough, the last columns of figures
    go into another table below.
    """

    cells: Cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        first = self.cells.text_columns
        left = list(range(first, len(self.cells.headings)))
        names = [row[0] for row in self.cells.rows]
        longest = max(map(_width, names), default=0)
        narrowest = max((_width(_broken(name, 1)) for name in names), default=0)

        def room(shown: Sequence[int]) -> int:
            natural = console.measure(self._table(shown, longest), options=options.update(max_width=10**6))
            return longest - max(0, natural.maximum - options.max_width)

        while left or first:
            fitting = next((count for count in range(len(left), 1, -1) if room(left[:count]) >= narrowest), 1)
            shown, left, first = left[:fitting], left[fitting:], 0
            yield self._table(shown, max(room(shown), 1))

    def _table(self, shown: Sequence[int], room: int) -> Table:
        cells = self.cells
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        places = [*range(cells.text_columns), *shown]
        for place in places:
            below = max((_width(row[place]) for row in cells.rows), default=0)
            # Figures are never folded.
            table.add_column(
                Text(_broken(cells.headings[place], max(_HEADING_WIDTH, below if place else room))),
                justify="left" if place < cells.text_columns else "right",
                overflow="fold",
                min_width=below if place and below else None,
            )
        for row in cells.rows:
            table.add_row(*(Text(row[place] if place else _broken(row[0], room)) for place in places))
        return table


def figure(size_bytes: float) -> str:
    """Megabytes without the unit, which the heading has, with as many digits as say something."""
    size = size_bytes / MEGABYTE
    return f"{size:,.0f}" if size >= 1000 else f"{size:,.1f}" if size >= 1 else f"{size:.3f}"


# -- plans for one model ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """Figures of plans as terminals and pages show them: how they are written, and sorted by what."""

    heading: str
    written: Callable[[Report], str]
    value: Callable[[Report], float]


def _bound(row: Report) -> str:
    if row["objective"] == _TIME:
        return percent(row["lower_bound_ratio"])
    return figure(row["lower_bound_bytes"])


def _of_key(heading: str, written: Callable[[float], str], key: str) -> PlanColumn:
    return PlanColumn(heading, lambda row: written(row[key]), lambda row: float(row[key]))


PLAN_COLUMNS = (
    _of_key("peak MB", figure, "simulated_peak_bytes"),
    _of_key("of all", percent, "share_of_regular"),
    _of_key("kept MB", figure, "checkpoint_bytes"),
    _of_key("time", percent, "extra_time_ratio"),
    _of_key("flops", percent, "extra_flops_ratio"),
    PlanColumn("bound", _bound, lambda row: float(row["lower_bound_bytes"])),
    PlanColumn(
        "gap",
        lambda row: "none" if row["status"] == "optimal" else percent(row["gap"]),
        lambda row: float(row["gap"]),
    ),
)
"""All that is the same whenever it is asked for: the time of the search is not among them."""


def plan_name(row: Report) -> str:
    """What a plan is called, with a mark before the best."""
    return f"{BEST if row['best'] else ' '} {row['name']}"


def plans_title(report: Report) -> str:
    shape = ", ".join("x".join(map(str, shape)) or "scalar" for shape in report["inputs"].values())
    return f"{report['model']}, {shape}: plans for one training step"


def plans_table(report: Report) -> Cells:
    """A row for each plan, the lowest peak first."""
    headings = ("plan", *(column.heading for column in PLAN_COLUMNS), "search")
    rows = [
        (
            plan_name(row),
            *(column.written(row) for column in PLAN_COLUMNS),
            "" if row["solve_seconds"] is None else f"{row['solve_seconds']:.1f} s",
        )
        for row in report["rows"]
    ]
    if any(item["name"] == _BUDGET for item in report["left_out"]):
        rows.append((f"  {_BUDGET}", _NO_FIT, *("" for _ in headings[2:])))
    return Cells(plans_title(report), headings, rows)


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
        "of all: of the peak of storing everything; kept: checkpoints; "
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


_ONCE, _AGAIN = "once", "again"


def difference_table(difference: Report, *, most: int | None = MOST_TENSORS) -> Cells:
    """Tensors that one of two plans alone keeps or computes again, the largest first, and what both do."""
    differing = [item for item in difference["tensors"] if not _is_kept_by_both(item)]
    rows = [(item["tensor"], *item["fates"], figure(item["bytes"])) for item in differing[:most]]
    title = f"{len(differing)} tensors are kept or computed again by one plan only"
    if len(differing) > len(rows):
        title += f", the largest {len(rows)}"
    headings = ("tensor", *(side["name"] for side in difference["plans"]), "MB")
    return Cells(title, headings, rows, text_columns=3)


def _is_kept_by_both(item: Report) -> bool:
    """Whether what one plan names as a checkpoint is in memory all the same under the other."""
    return not {_ONCE, _AGAIN}.intersection(item["fates"])


def difference_lines(difference: Report) -> list[str]:
    """What the change does to the peak, and where it is."""
    lines = [
        f"{side['name']}: peak {megabytes(side['simulated_peak_bytes'])} at '{side['peak_step']}', "
        f"step {side['peak_step_number']:,} of {side['steps']:,}; "
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
    return [*_words_lines(difference), *lines]


_WORDS = {
    "held": "no checkpoint, but its segment, the last, is not computed again",
    _ONCE: "computed once, and gone when backward begins",
}


def _words_lines(difference: Report) -> list[str]:
    """What the table's words mean, and what is no difference although only one plan names it."""
    differing = [item for item in difference["tensors"] if not _is_kept_by_both(item)]
    same = [item for item in difference["tensors"] if _is_kept_by_both(item)]
    used = {fate for item in differing for fate in item["fates"]}
    told = [f"{word}: {meaning}" for word, meaning in _WORDS.items() if word in used]
    lines = ["; ".join(told)] if told else []
    if same:
        lines.append(
            f"kept by both: {_count(same)} that are checkpoints of one plan alone; "
            "the other does not compute its last segment again"
        )
    return lines


def _count(items: Sequence[Report]) -> str:
    return f"{len(items)} ({megabytes(sum(item['bytes'] for item in items))})" if items else "none"


# -- several networks ---------------------------------------------------------------------------


def overview_table(report: Report, *, all_columns: bool = False) -> Cells:
    """Peaks of all plans for all networks, as shares of storing everything.

    Plans that few networks have are left out unless `all_columns` are wanted, but for that within a budget.
    """
    found = [one for one in report["comparisons"] if "error" not in one]
    rows_of = [{row["name"]: row for row in one["rows"]} for one in found]
    names = _plan_names(found, all_columns=all_columns)
    rows = []
    for one, plans in zip(found, rows_of, strict=True):
        cells = [_share(plans[name]) if name in plans else _absent(name) for name in names]
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
    order += sorted(counts.keys() - set(order))
    return [
        name
        for name in order
        if name != "store-all" and (all_columns or name == _BUDGET or 2 * counts[name] >= len(found))
    ]


def _order(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names by how far up they mostly stand."""
    places: dict[str, list[float]] = {}
    for names in rows:
        for place, name in enumerate(names):
            places.setdefault(name, []).append(place / len(names))
    return sorted(places, key=lambda name: (sum(places[name]) / len(places[name]), name))


def _absent(name: str) -> str:
    return _NO_FIT if name == _BUDGET else _NO_PLAN


def _share(row: Report) -> str:
    mark = BEST if row["best"] else ""
    return f"{mark}{100 * row['share_of_regular']:.1f}"


def overview_lines(report: Report, *, all_columns: bool = False, on_page: bool = False) -> list[str]:
    """What the overview leaves out; in a terminal also how long it took, and where there is more."""
    found = [one for one in report["comparisons"] if "error" not in one]
    shown = _plan_names(found, all_columns=all_columns)
    hidden = [name for name in _plan_names(found, all_columns=True) if name not in shown]
    lines = [f"{BEST} the lowest peak; shares in %"]
    if any(_NO_PLAN in row for row in overview_table(report, all_columns=all_columns).rows):
        more = "reasons are below" if on_page else "-v says why"
        lines.append(f"{_NO_PLAN} no such plan for the network; {more}")
    if hidden:
        lines.append(f"for few of the networks, and not shown: {', '.join(hidden)}")
    if not on_page:
        lines.append(f"{len(found)} networks in {report['seconds']:.0f} s")
    for one in found:
        lines += [f"{one['model']}: {item['reason']}" for item in one["left_out"] if item["name"] == _BUDGET]
    lines += [f"{one['model']}: {one['error']}" for one in report["comparisons"] if "error" in one]
    return lines


# -- one network in several files -----------------------------------------------------------------


def file_label(place: int) -> str:
    """What a file is called behind the first table: A, B, ..."""
    return chr(ord("A") + place) if place < 26 else f"file {place + 1}"


def files_title(report: Report) -> str:
    """What the files are together."""
    others = [
        file_label(number)
        for number, pair in enumerate(report["pairs"], start=1)
        if not pair["is_same_network"]
    ]
    if not others:
        return "one network in several files"
    told = f"{others[0]} is another" if len(others) == 1 else f"{', '.join(others)} are others"
    return f"several files that are not one network: {told} than {file_label(0)}"


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
    headings = ("file", "nodes", "read", "read\nMB", "all\nMB", "plan\nMB", "kept", "kept\nMB")
    return Cells(files_title(report), headings, rows)


def file_lines(report: Report) -> list[str]:
    """What the table's figures are, and where each file's peak is and what it is made of."""
    return [
        "read: tensors that backward reads; all and plan: simulated peaks, storing everything and planned; "
        "kept: checkpoints",
        *_peaks_of_files(report),
    ]


def _peaks_of_files(report: Report) -> list[str]:
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
    return Cells(f"{labels[0]} and {labels[1]}: plans", ("", *labels), rows)


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
    if pair["multiplied_tensors"]:
        lines[0] += f", {pair['multiplied_tensors']} but for a number that one of them is multiplied by"
    lines += [f"{other['what']}: {other['a']} in {a}, {other['b']} in {b}" for other in pair["differences"]]
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
    alone = " (its checkpoints, not the order and repeats of its operators)" * carried["is_without_sequence"]
    lines.append(
        f"the plan of {a} in {b}{alone}: peak {megabytes(carried['simulated_peak_bytes'])}{fitted}{lost}; "
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
    """By which operators the files part: perhaps two spellings of one function.

    Layers and windows of the same sizes on both sides are those of other branches.
    """
    lines: dict[str, str] = {}
    for (one, _), (first, second) in zip(pair["part_behind"], pair["operators_behind"], strict=True):
        alike = {operator for operator in first if " " in operator and operator in second}
        sides = ([operator for operator in side if operator not in alike] for side in (first, second))
        here, there = (", ".join(side) or "nothing of its own" for side in sides)
        if here != there:
            lines.setdefault(here + there, f"behind {one!r} {a} goes on with {here}, and {b} with {there}")
    if not lines and pair["part_behind"]:
        return ["the same operators follow there on both sides, but put together otherwise"]
    return list(lines.values())[:_MOST_PARTINGS]


def _named(items: Sequence[Report]) -> str:
    """Tensors with their sizes, and with a detail where there is one."""
    named = []
    for item in items:
        detail = f" ({item['detail']})" if "detail" in item else ""
        named.append(f"'{item['tensor']}' {megabytes(item['bytes'])}{detail}")
    return ", ".join(named)
