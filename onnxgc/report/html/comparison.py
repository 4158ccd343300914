"""Pages of `compare --report`: memory curves, and the tables of the terminal."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.schedule import Schedule
from onnxgc.report.data.compare_report import EachReport, NetworksReport, PlansReport
from onnxgc.report.data.memory_curve import ForwardOperator, MemoryCurve, forward_operators, memory_curve
from onnxgc.report.html.curves import alive_table, memory_figure, roles_table
from onnxgc.report.html.network_strip import checkpoints_table as kept_table
from onnxgc.report.html.network_strip import network_figure
from onnxgc.report.html.page import Section, document
from onnxgc.report.html.payload import payload
from onnxgc.report.html.tables import Column, Figure, size, table
from onnxgc.report.html.tags import Html, bullets, name_tag, tag
from onnxgc.report.text.network_pair_lines import (
    checkpoints_table,
    file_label,
    file_lines,
    files_table,
    files_title,
    pair_lines,
)
from onnxgc.report.text.networks_overview import compared, overview_lines, overview_table
from onnxgc.report.text.plan_difference_lines import difference_lines, difference_table
from onnxgc.report.text.plan_rows import PLAN_COLUMNS, left_out_lines, plan_name, plans_lines, plans_title
from onnxgc.report.text.text_table import Cells
from onnxgc.report.text.units import megabytes, percent, shape_text
from onnxgc.tracing.step_graph import TrainingStep

MAX_CURVES = 5
"""The number of line styles."""
MAX_DIFFERING = 1000
"""Differing tensors in the table of two plans."""
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan of the page, with the name of its row or file."""

    name: str
    step: TrainingStep
    schedule: Schedule
    checkpoints: Sequence[Vertex]


def comparison_page(report: PlansReport, plans: Sequence[ShownPlan]) -> str:
    """The HTML for plans of one model; `plans` are in the order of the report's rows, the lowest peak first.

    Curves are drawn for plans given by the user, then for the lowest peaks, and always for the baseline.
    """
    given = {row["name"] for row in report["rows"] if row["kind"] == "plan"}
    by_rank = sorted(plans, key=lambda plan: plan.name not in given)
    drawn = [plan for plan in by_rank if plan.name != "store-all"][: MAX_CURVES - 1]
    drawn += [plan for plan in plans if plan.name == "store-all"]
    left_out = len(plans) - len(drawn)
    pictures, curves, network = _pictures(drawn, left_out)
    sections: list[Section] = [("plans", "Plans", [_plans_table(report), bullets(plans_lines(report))])]
    if (difference := report["difference"]) is not None:
        parts = [_cells(difference_table(difference, most=MAX_DIFFERING)), bullets(difference_lines(difference))]
        sections.append(("difference", "Difference between the two plans", parts))
    sections += [*pictures, ("assumed", "Assumptions", [bullets(_assumed(report))])]
    title = f"{os.path.basename(report['model'])}: plans for one training step"
    return document(title, _best_of(report), sections, payload(curves, network))


def networks_page(report: NetworksReport, plans: Sequence[ShownPlan], carried: Sequence[Sequence[ShownPlan]]) -> str:
    """The HTML for one network in several files.

    The main curves are those of the first of `plans`. `carried` has, for each pair of files, the plans of the
    second file to draw together.
    """
    drawn = plans[:MAX_CURVES]
    left_out = len(plans) - len(drawn)
    pictures, curves, network = _pictures(drawn, left_out)
    files = report["files"]
    sections: list[Section] = [("files", "Files", [_cells(files_table(report)), bullets(file_lines(report))])]
    for number, shown in enumerate(carried):
        numbers = []
        for plan in shown:
            if plan.name not in [curve.label for curve in curves]:
                curves += _curves([plan])
            numbers.append([curve.label for curve in curves].index(plan.name))
        of_pair = [curves[index] for index in numbers]
        parts = [
            _cells(checkpoints_table(report, number), "detail"),
            bullets(pair_lines(report, number)),
            memory_figure(of_pair, name=f"memory-{number + 1}", places=numbers, lists_tensors=False),
            roles_table(of_pair),
        ]
        heading = f"{file_label(0)} and {file_label(number + 1)}"
        sections.append((f"pair-{number + 1}", heading, parts))
    notes = [_inputs(file["model"], file["inputs"]) for file in files]
    notes += [f"{file_label(number)}: {note}" for number, file in enumerate(files) for note in file["notes"]]
    sections += [*pictures, ("assumed", "Assumptions", [bullets(notes)])]
    figures = [
        (f"planned peak, {file_label(number)}", megabytes(file["planned"]["simulated_peak_bytes"]))
        for number, file in enumerate(files)
    ]
    title = f"{os.path.basename(files[0]['model'])} and {len(files) - 1} more: {files_title(report)}"
    return document(title, figures, sections, payload(curves, network))


def overview_page(report: EachReport) -> str:
    networks = compared(report)
    lines = bullets(overview_lines(report, all_columns=True, on_page=True))
    sections: list[Section] = [
        ("overview", "Overview", [_cells(overview_table(report, all_columns=True)), lines]),
        *(
            (f"network-{number}", one["model"], [_plans_table(one), bullets(plans_lines(one))])
            for number, one in enumerate(networks, start=1)
        ),
    ]
    assumed = [part for one in networks for part in (tag("h3", one["model"]), bullets(_assumed(one)))]
    sections.append(("assumed", "Assumptions", assumed))
    count = len(networks)
    return document(f"Plans for {count} networks", [("networks", str(count))], sections, payload([], []))


def _curves(plans: Sequence[ShownPlan]) -> list[MemoryCurve]:
    return [memory_curve(plan.name, plan.step, plan.schedule) for plan in plans]


def _pictures(
    drawn: Sequence[ShownPlan], left_out: int
) -> tuple[list[Section], list[MemoryCurve], tuple[ForwardOperator, ...]]:
    """The sections of curves and of the first plan's network, and their data."""
    curves, first = _curves(drawn), drawn[0]
    network = forward_operators(first.step, first.schedule, curves[0], first.checkpoints)
    more = "1 more plan has" if left_out == 1 else f"{left_out} more plans have"
    memory = [
        memory_figure(curves),
        *([tag("p", f"{more} no curve.")] if left_out else []),
        roles_table(curves),
        alive_table(curves[0]),
    ]
    heading = f"The network under the plan {first.name}"
    sections: list[Section] = [
        ("memory-section", "Memory over the step", memory),
        ("network-section", heading, [network_figure(network), kept_table(network)]),
    ]
    return sections, curves, network


def _cells(cells: Cells, class_: str = "name") -> Html:
    """A table of the terminal; `class_` is the class of its first column."""
    headings = [
        Column(heading, None if number < cells.text_columns else size)
        for number, heading in enumerate(cells.headings_in_line)
    ]
    rows = [[name_tag(row[0].replace("  ", 2 * _NO_BREAK), class_), *row[1:]] for row in cells.rows]
    return table(cells.title, headings, rows)


def _plans_table(report: PlansReport) -> Html:
    """The terminal's table, sortable and with a description of each plan."""
    headings = [Column("plan"), *(Column(column.heading, size) for column in PLAN_COLUMNS)]
    headings += [Column("objective"), Column("description")]
    rows: list[list[str | Figure]] = [
        [
            name_tag(plan_name(row).strip()),
            *(Figure(column.written(row), column.value(row)) for column in PLAN_COLUMNS),
            row["objective"],
            name_tag(row["detail"], "detail"),
        ]
        for row in report["rows"]
    ]
    return table(plans_title(report), headings, rows, sortable=True)


def _best_of(report: PlansReport) -> list[tuple[str, str]]:
    best = report["rows"][0]
    return [
        ("peak, baseline", megabytes(report["regular"]["simulated_peak_bytes"])),
        (f"lowest peak, plan {best['name']}", megabytes(best["simulated_peak_bytes"])),
        ("its extra time", percent(best["extra_time_ratio"])),
        ("lower bound on the peak", megabytes(report["lower_bound_bytes"])),
    ]


def _inputs(model: str, inputs: Mapping[str, Sequence[int]]) -> str:
    shapes = "; ".join(f"{name}: {shape_text(shape)}" for name, shape in inputs.items())
    return f"inputs of {model}: {shapes}"


def _assumed(report: PlansReport) -> list[str]:
    notes = report["notes"]
    return [
        _inputs(report["model"], report["inputs"]),
        *([] if any(note.startswith("loss:") for note in notes) else [f"loss: {report['loss']}"]),
        *notes,
        *left_out_lines(report, every=True),
    ]
