"""The pages that show where the memory of planned steps goes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgc.api.comparison import Comparison, Row
from onnxgc.api.pipeline import OptimizeResult, PlannedStep, plan_traced_again
from onnxgc.report.comparison import file_label
from onnxgc.report.html.comparison import (
    ShownPlan,
    comparison_page,
    networks_page,
    overview_page,
)
from onnxgc.report.html.page import Shown, page


def page_of(result: OptimizeResult, settings: Sequence[tuple[str, str]] = ()) -> str:
    """One HTML file, as text, that loads nothing; `settings` are options and what they were set to.

    Without a budget, times are those of the default device.
    """
    planned = result.planned
    durations, timing, _ = planned.request.durations(planned.step)
    return page(
        Shown(
            result.report,
            planned.step,
            planned.schedule,
            planned.traced.step,
            planned.regular_schedule,
            planned.solution.plan.checkpoints,
            durations,
            timing,
            settings,
        )
    )


def page_of_comparison(found: Comparison) -> str:
    """The same for plans that were compared: of one model, of one network in several files, or of each."""
    if found.report["kind"] == "each":
        return overview_page(found.report)
    plans = [_shown(row.name, row.planned) for row in found.rows]
    if found.report["kind"] == "plans":
        return comparison_page(found.report, plans)
    regular = [
        ShownPlan(
            f"{row.name}, storing everything", row.planned.traced.step, row.planned.regular_schedule, ()
        )
        for row in found.rows
    ]
    carried = [
        [
            _shown(f"{row.name}, the plan of {file_label(0)}", _carried_over(found, place, row)),
            plans[place],
            regular[place],
        ]
        for place, row in enumerate(found.rows)
        if place
    ]
    return networks_page(found.report, [*plans, *regular], carried)


def _carried_over(found: Comparison, place: int, row: Row) -> PlannedStep:
    """The first file's plan in another file, as it was made to fit."""
    plan = found.plans[found.report["files"][place]["model"]]
    return plan_traced_again(row.planned.model, row.planned.traced, plan, row.planned)


def _shown(name: str, planned: PlannedStep) -> ShownPlan:
    return ShownPlan(name, planned.step, planned.schedule, planned.solution.plan.checkpoints)
