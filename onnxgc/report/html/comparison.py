"""The pages of `compare --report`: memory curves side by side, and the tables of the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.schedule import Schedule
from onnxgc.report.budgets import percent
from onnxgc.report.comparison import (
    PLAN_COLUMNS,
    Cells,
    checkpoints_table,
    difference_lines,
    difference_table,
    file_label,
    file_lines,
    files_table,
    files_title,
    left_out_lines,
    overview_lines,
    overview_table,
    pair_lines,
    plan_name,
    plans_lines,
    plans_title,
)
from onnxgc.report.html.curves import alive_table, memory_figure, roles_table
from onnxgc.report.html.memory_data import Course, ForwardOperator, course_of, forward_operators
from onnxgc.report.html.page import document
from onnxgc.report.html.payload import payload
from onnxgc.report.html.strip import checkpoints_table as kept_table
from onnxgc.report.html.strip import network_figure
from onnxgc.report.html.tables import Column, Figure, size, table
from onnxgc.report.html.tags import Html, tag
from onnxgc.report.tables import megabytes
from onnxgc.tracing.step_graph import TrainingStep

MOST_CURVES = 5
"""As many as there are kinds of lines."""
MOST_DIFFERING = 1000
"""Tensors that a page names where two plans differ."""
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

    The curves are those of plans that were given, then of the lowest peaks, and storing everything always.
    """
    given = {row["name"] for row in report["rows"] if row["kind"] == "plan"}
    by_rank = sorted(plans, key=lambda plan: plan.name not in given)
    drawn = [plan for plan in by_rank if plan.name != "store-all"][: MOST_CURVES - 1]
    drawn += [plan for plan in plans if plan.name == "store-all"]
    left_out = len(plans) - len(drawn)
    told = [_without_curve(left_out)] if left_out else []
    pictures, courses, network = _pictures(drawn, told)
    changed: list[_Section] = [
        (
            "difference",
            "What differs between the two plans",
            [_cells(difference_table(difference, most=MOST_DIFFERING)), _list(difference_lines(difference))],
        )
        for difference in ([report["difference"]] if report["difference"] else [])
    ]
    sections: list[_Section] = [
        ("plans", "Plans", [_plans_table(report), _list(plans_lines(report))]),
        *changed,
        *pictures,
        ("assumed", "What was assumed", [_list(_assumed(report))]),
    ]
    title = f"{os.path.basename(report['model'])}: plans for one training step"
    return document(title, _headline(_best_of(report)), sections, payload(courses, network))


def networks_page(report: Report, plans: Sequence[ShownPlan], carried: Sequence[Sequence[ShownPlan]]) -> str:
    """The HTML for one network in several files.

    The main curves are those of the first of `plans`. For each pair of files, `carried` are the plans of the
    second one that are drawn beside one another.
    """
    drawn = plans[:MOST_CURVES]
    left_out = len(plans) - len(drawn)
    pictures, courses, network = _pictures(drawn, [_without_curve(left_out)] if left_out else [])
    files = report["files"]
    pairs: list[_Section] = []
    for number, shown in enumerate(carried):
        places = []
        for plan in shown:
            if plan.name not in [course.label for course in courses]:
                courses += _courses([plan])
            places.append([course.label for course in courses].index(plan.name))
        of_pair = [courses[place] for place in places]
        figure = memory_figure(of_pair, name=f"memory-{number + 1}", places=places, lists_tensors=False)
        pairs.append(
            (
                f"pair-{number + 1}",
                f"{file_label(0)} and {file_label(number + 1)}",
                [
                    _cells(checkpoints_table(report, number), "told"),
                    _list(pair_lines(report, number)),
                    figure,
                    roles_table(of_pair),
                ],
            )
        )
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
    title = f"{os.path.basename(files[0]['model'])} and {len(files) - 1} more: {files_title(report)}"
    return document(title, _headline(headline), sections, payload(courses, network))


def overview_page(report: Report) -> str:
    """The HTML for plans of several networks: tables alone."""
    found = [one for one in report["comparisons"] if "error" not in one]
    sections: list[_Section] = [
        (
            "overview",
            "Overview",
            [
                _cells(overview_table(report, all_columns=True)),
                _list(overview_lines(report, all_columns=True, on_page=True)),
            ],
        ),
        *(
            (
                f"network-{number}",
                one["model"],
                [_plans_table(one), _list(plans_lines(one))],
            )
            for number, one in enumerate(found, start=1)
        ),
        (
            "assumed",
            "What was assumed",
            [part for one in found for part in (tag("h3", one["model"]), _list(_assumed(one)))],
        ),
    ]
    headline = [("networks", str(len(found)))]
    return document(f"Plans for {len(found)} networks", _headline(headline), sections, payload([], []))


def _without_curve(count: int) -> str:
    return "1 more plan has no curve." if count == 1 else f"{count} more plans have no curve."


def _courses(plans: Sequence[ShownPlan]) -> list[Course]:
    return [course_of(plan.name, plan.step, plan.schedule) for plan in plans]


def _pictures(
    drawn: Sequence[ShownPlan], told: Sequence[str]
) -> tuple[list[_Section], list[Course], tuple[ForwardOperator, ...]]:
    """The sections of curves and of the first plan's network, and what they show."""
    courses, first = _courses(drawn), drawn[0]
    network = forward_operators(first.step, first.schedule, courses[0], first.checkpoints)
    sections: list[_Section] = [
        (
            "memory-section",
            "Memory over the step",
            [
                memory_figure(courses),
                *(tag("p", line) for line in told),
                roles_table(courses),
                alive_table(courses[0]),
            ],
        ),
        (
            "network-section",
            f"The network under the plan {first.name}",
            [network_figure(network), kept_table(network)],
        ),
    ]
    return sections, courses, network


def _cells(cells: Cells, kind: str = "name") -> Html:
    """A table of the terminal; `kind` says how its first column is written."""
    headings = [
        Column(heading, None if place < cells.text_columns else size)
        for place, heading in enumerate(cells.headings_in_line)
    ]
    rows = [[tag("span", row[0].replace("  ", 2 * _NO_BREAK), class_=kind), *row[1:]] for row in cells.rows]
    return table(cells.title, headings, rows)


def _list(lines: Iterable[str]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))


def _plans_table(report: Report) -> Html:
    """The terminal's table, which can be sorted, and with what each plan is."""
    headings = [Column("plan"), *(Column(column.heading, size) for column in PLAN_COLUMNS)]
    headings += [Column("objective"), Column("what it is")]
    rows: list[list[str | Figure]] = [
        [
            tag("span", plan_name(row).strip(), class_="name"),
            *(Figure(column.written(row), column.value(row)) for column in PLAN_COLUMNS),
            row["objective"],
            tag("span", row["detail"], class_="told"),
        ]
        for row in report["rows"]
    ]
    return table(plans_title(report), headings, rows, sortable=True)


def _best_of(report: Report) -> list[tuple[str, str]]:
    best = report["rows"][0]
    return [
        ("peak, storing everything", megabytes(report["regular"]["simulated_peak_bytes"])),
        (f"lowest peak, plan {best['name']}", megabytes(best["simulated_peak_bytes"])),
        ("of the step's time it runs again", percent(best["extra_time_ratio"])),
        ("no plan is below", megabytes(report["lower_bound_bytes"])),
    ]


def _headline(figures: Sequence[tuple[str, str]]) -> Html:
    entries = (tag("div", tag("dt", name), tag("dd", value)) for name, value in figures)
    return tag("dl", *entries, class_="headline")


def _inputs(report: Report) -> str:
    shapes = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in report["inputs"].items())
    return f"inputs of {report['model']}: {shapes}"


def _assumed(report: Report) -> list[str]:
    notes = report["notes"]
    return [
        _inputs(report),
        *([] if any(note.startswith("loss:") for note in notes) else [f"loss: {report['loss']}"]),
        *notes,
        *left_out_lines(report, every=True),
    ]
