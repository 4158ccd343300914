"""The page that shows where the memory of a planned step goes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgc.api.pipeline import OptimizeResult
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
