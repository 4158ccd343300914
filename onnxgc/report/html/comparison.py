"""The pages of `compare --report`: memory curves in one picture, and the tables of the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.schedule import Schedule
from onnxgc.report.budgets import percent
from onnxgc.report.comparison import (
    Cells,
    checkpoints_table,
    file_label,
    file_lines,
    files_table,
    overview_lines,
    overview_table,
    pair_lines,
    plans_lines,
)
from onnxgc.report.html.curves import alive_table, memory_figure, roles_table
from onnxgc.report.html.data import course_of, forward_operators
from onnxgc.report.html.page import document
from onnxgc.report.html.payload import payload
from onnxgc.report.html.strip import checkpoints_table as kept_table
from onnxgc.report.html.strip import network_figure
from onnxgc.report.html.tables import Column, size, table
from onnxgc.report.html.tags import Html, tag
from onnxgc.report.tables import megabytes
from onnxgc.tracing.trace import TrainingStep

MOST_CURVES = 5
"""As many as there are kinds of lines."""
_NO_BREAK = "\N{NO-BREAK SPACE}"

Report = Mapping[str, Any]
_Section = tuple[str, str, list[Html]]


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan as the page needs it, with the name of its row or file."""

    name: str
    step: TrainingStep
    schedule: Schedule
    checkpoints: Sequence[Vertex]


def comparison_page(report: Report, plans: Sequence[ShownPlan]) -> str:
    """The HTML for plans of one model; `plans` are in the order of the report's rows, the lowest peak first.

    The curves are those of the lowest peaks, and storing everything always.
    """
    drawn = [plan for plan in plans if plan.name != "store-all"][: MOST_CURVES - 1]
    drawn += [plan for plan in plans if plan.name == "store-all"]
    left_out = len(plans) - len(drawn)
    told = [f"{left_out} more plans, of higher peaks, have no curve."] if left_out else []
    pictures, data = _pictures(drawn, told)
    sections: list[_Section] = [
        ("plans", "Plans", [_plans_table(report), *_paragraphs(plans_lines(report)[1:])]),
        *pictures,
        ("assumed", "What was assumed", [_list(_assumed(report))]),
    ]
    title = f"{os.path.basename(report['model'])}: plans for one training step"
    return document(title, _headline(_best_of(report)), sections, data)


def networks_page(report: Report, plans: Sequence[ShownPlan]) -> str:
    """The HTML for one network in several files; the curves are those of the first of `plans`."""
    drawn = plans[:MOST_CURVES]
    left_out = len(plans) - len(drawn)
    pictures, data = _pictures(drawn, [f"{left_out} more have no curve."] if left_out else [])
    files = report["files"]
    pairs: list[_Section] = [
        (
            f"pair-{number + 1}",
            f"{file_label(0)} and {file_label(number + 1)}",
            [_cells(checkpoints_table(report, number)), _list(pair_lines(report, number))],
        )
        for number in range(len(report["pairs"]))
    ]
    notes = [f"{file_label(place)}: {note}" for place, file in enumerate(files) for note in file["notes"]]
    sections: list[_Section] = [
        ("files", "Files", [_cells(files_table(report)), _list(file_lines(report))]),
        *pairs,
        *pictures,
        ("assumed", "What was assumed", [_list([*map(_inputs, files), *notes])]),
    ]
    headline = [
        (f"planned peak, {file_label(place)}", megabytes(file["planned"]["simulated_peak_bytes"]))
        for place, file in enumerate(files)
    ]
    title = f"{os.path.basename(files[0]['model'])} and {len(files) - 1} more: one network in several files"
    return document(title, _headline(headline), sections, data)


def overview_page(report: Report) -> str:
    """The HTML for plans of several networks: tables alone."""
    found = [one for one in report["comparisons"] if "error" not in one]
    sections: list[_Section] = [
        (
            "overview",
            "Overview",
            [
                _cells(overview_table(report, all_columns=True)),
                _list(overview_lines(report, all_columns=True)),
            ],
        ),
        *(
            (f"network-{number}", one["model"], [_plans_table(one), *_paragraphs(plans_lines(one))])
            for number, one in enumerate(found, start=1)
        ),
        ("assumed", "What was assumed", [_list(fact for one in found for fact in _assumed(one))]),
    ]
    headline = [("networks", str(len(found)))]
    return document(f"Plans for {len(found)} networks", _headline(headline), sections, payload([], []))


def _pictures(drawn: Sequence[ShownPlan], told: Sequence[str]) -> tuple[list[_Section], str]:
    """The sections of curves and of the first plan's network, and the data that the script reads."""
    courses = [course_of(plan.name, plan.step, plan.schedule) for plan in drawn]
    first = drawn[0]
    network = forward_operators(first.step, first.schedule, courses[0], first.checkpoints)
    memory = [
        memory_figure(courses, None),
        *_paragraphs(told),
        roles_table(courses),
        alive_table(courses[0]),
    ]
    return [
        ("memory-section", "Memory over the step", memory),
        (
            "network-section",
            f"The network under the plan {first.name}",
            [network_figure(network), kept_table(network)],
        ),
    ], payload(courses, network)


def _cells(cells: Cells) -> Html:
    """A table of the terminal."""
    headings = [
        Column(
            " ".join(heading.replace("-\n", "-").split("\n")), None if place < cells.text_columns else size
        )
        for place, heading in enumerate(cells.headings)
    ]
    rows = [[cell.replace("  ", 2 * _NO_BREAK) for cell in row] for row in cells.rows]
    return table(cells.title, headings, rows)


def _paragraphs(lines: Iterable[str]) -> list[Html]:
    return [tag("p", line) for line in lines]


def _list(lines: Iterable[str]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))


def _plans_table(report: Report) -> Html:
    headings = [
        Column("plan"),
        Column("peak", size),
        Column("of storing everything", percent),
        Column("kept", size),
        Column("extra time", percent),
        Column("extra operations", percent),
        Column("objective"),
        Column("gap", percent),
        Column("what it is"),
    ]
    rows: list[list[str | int | float]] = [
        [
            tag("span", row["name"], class_="name"),
            row["simulated_peak_bytes"],
            row["share_of_regular"],
            row["checkpoint_bytes"],
            row["extra_time_ratio"],
            row["extra_flops_ratio"],
            row["objective"],
            row["gap"],
            row["detail"],
        ]
        for row in report["rows"]
    ]
    return table("Plans, the lowest simulated peak first", headings, rows, sortable=True)


def _best_of(report: Report) -> list[tuple[str, str]]:
    best = report["rows"][0]
    return [
        ("peak, storing everything", megabytes(report["regular"]["simulated_peak_bytes"])),
        (f"lowest peak, {best['name']}", megabytes(best["simulated_peak_bytes"])),
        ("its extra time", percent(best["extra_time_ratio"])),
        ("no plan is below", megabytes(report["lower_bound_bytes"])),
    ]


def _headline(figures: Sequence[tuple[str, str]]) -> Html:
    entries = (tag("div", tag("dt", name), tag("dd", value)) for name, value in figures)
    return tag("dl", *entries, class_="headline")


def _inputs(report: Report) -> str:
    shapes = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in report["inputs"].items())
    return f"inputs of {report['model']}: {shapes}"


def _assumed(report: Report) -> list[str]:
    return [
        _inputs(report),
        f"loss: {report['loss']}",
        *report["notes"],
        *(f"{item['name']}: {item['reason']}" for item in report["left_out"]),
    ]
