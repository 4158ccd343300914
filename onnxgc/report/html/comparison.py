"""The page of `compare --report`: the curves of several plans in one picture, and their figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.schedule import Schedule
from onnxgc.report.budgets import percent
from onnxgc.report.comparison import plans_lines
from onnxgc.report.html.curves import alive_table, memory_figure, roles_table
from onnxgc.report.html.data import Course, course_of, forward_operators
from onnxgc.report.html.page import document
from onnxgc.report.html.payload import payload
from onnxgc.report.html.strip import checkpoints_table, network_figure
from onnxgc.report.html.tables import Column, size, table
from onnxgc.report.html.tags import Html, tag
from onnxgc.report.tables import megabytes
from onnxgc.tracing.trace import TrainingStep

MOST_CURVES = 5
"""As many as there are kinds of lines."""


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan as the page needs it, with the name of its row."""

    name: str
    step: TrainingStep
    schedule: Schedule
    checkpoints: Sequence[Vertex]


def comparison_page(report: Mapping[str, Any], plans: Sequence[ShownPlan]) -> str:
    """The HTML of the page; `plans` are in the order of the report's rows, the lowest peak first.

    The curves are those of the lowest peaks, and storing everything always.
    """
    drawn = [plan for plan in plans if plan.name != "store-all"][: MOST_CURVES - 1]
    drawn += [plan for plan in plans if plan.name == "store-all"]
    courses = [course_of(plan.name, plan.step, plan.schedule) for plan in drawn]
    first = drawn[0]
    network = forward_operators(first.step, first.schedule, courses[0], first.checkpoints)
    sections: list[tuple[str, str, list[Html]]] = [
        ("plans", "Plans", [_plans_table(report), *(tag("p", line) for line in plans_lines(report)[1:])]),
        ("memory-section", "Memory over the step", _memory(courses, len(plans))),
        (
            "network-section",
            f"The network under the plan {first.name}",
            [network_figure(network), checkpoints_table(network)],
        ),
        ("assumed", "What was assumed", [_assumed(report)]),
    ]
    title = f"{os.path.basename(report['model'])}: plans for one training step"
    return document(title, _headline(report), sections, payload(courses, network))


def _memory(courses: Sequence[Course], count: int) -> list[Html]:
    left_out = count - len(courses)
    told = [tag("p", f"{left_out} more plans, of higher peaks, have no curve.")] if left_out else []
    return [memory_figure(courses, None), *told, roles_table(courses), alive_table(courses[0])]


def _plans_table(report: Mapping[str, Any]) -> Html:
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


def _headline(report: Mapping[str, Any]) -> Html:
    best = report["rows"][0]
    figures = [
        ("peak, storing everything", megabytes(report["regular"]["simulated_peak_bytes"])),
        (f"lowest peak, {best['name']}", megabytes(best["simulated_peak_bytes"])),
        ("its extra time", percent(best["extra_time_ratio"])),
        ("no plan is below", megabytes(report["lower_bound_bytes"])),
    ]
    entries = (tag("div", tag("dt", name), tag("dd", value)) for name, value in figures)
    return tag("dl", *entries, class_="headline")


def _assumed(report: Mapping[str, Any]) -> Html:
    shapes = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in report["inputs"].items())
    facts = [
        f"model: {report['model']}",
        f"inputs: {shapes}",
        f"loss: {report['loss']}",
        *report["notes"],
        *(f"{item['name']}: {item['reason']}" for item in report["left_out"]),
    ]
    return tag("ul", *(tag("li", fact) for fact in facts))
