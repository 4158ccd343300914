"""The pages that show where the memory of planned steps goes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgc.api.comparison import Comparison
from onnxgc.api.pipeline import OptimizeResult
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
            planned.budget_bytes,
            durations,
            timing,
            settings,
        )
    )


def page_of_comparison(found: Comparison) -> str:
    """The same for plans that were compared: of one model, of one network in several files, or of each."""
    if found.report["kind"] == "each":
        return overview_page(found.report)
    plans = [
        ShownPlan(row.name, row.planned.step, row.planned.schedule, row.planned.solution.plan.checkpoints)
        for row in found.rows
    ]
    if found.report["kind"] == "plans":
        return comparison_page(found.report, plans)
    regular = [
        ShownPlan(
            f"{row.name}, storing everything", row.planned.traced.step, row.planned.regular_schedule, ()
        )
        for row in found.rows
    ]
    return networks_page(found.report, [*plans, *regular])
