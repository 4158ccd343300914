"""The pages that show where the memory of planned steps goes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgc.api.comparison import Comparison
from onnxgc.api.pipeline import OptimizeResult
from onnxgc.errors import PlanError
from onnxgc.report.html.comparison import ShownPlan, comparison_page
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
    """The same for plans of one model that were compared.

    Raises:
        PlanError: several models were compared.
    """
    if not found.rows:
        raise PlanError("a page shows the plans for one model; compare one, without --each")
    return comparison_page(
        found.report,
        [
            ShownPlan(row.name, row.planned.step, row.planned.schedule, row.planned.solution.plan.checkpoints)
            for row in found.rows
        ],
    )
