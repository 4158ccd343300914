"""HTML pages that show memory over planned steps."""

from collections.abc import Sequence

from onnxgc.api.pipeline import OptimizeResult
from onnxgc.api.plan_candidates import PlanCandidate
from onnxgc.api.plan_table import Comparison
from onnxgc.api.planned_step import PlannedStep
from onnxgc.api.step_planning import traced_step_with_plan
from onnxgc.report.html.comparison import ShownPlan, comparison_page, networks_page, overview_page
from onnxgc.report.html.page import PageData, page
from onnxgc.report.text.network_pair_lines import file_label


def page_of(result: OptimizeResult, settings: Sequence[tuple[str, str]] = ()) -> str:
    """An HTML page of one file; `settings` are options with their values.

    Without a budget, durations are those of the default device.
    """
    planned = result.planned
    durations, timing, _ = planned.request.durations(planned.step)
    return page(
        PageData(
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


def page_of_comparison(comparison: Comparison) -> str:
    """An HTML page of compared plans."""
    if comparison.report["kind"] == "each":
        return overview_page(comparison.report)
    plans = [_shown(row.name, row.planned) for row in comparison.rows]
    if comparison.report["kind"] == "plans":
        return comparison_page(comparison.report, plans)
    baselines = [
        ShownPlan(f"{row.name}, baseline", row.planned.traced.step, row.planned.regular_schedule, ())
        for row in comparison.rows
    ]
    transferred = [
        [
            _shown(f"{row.name}, the plan of {file_label(0)}", _transferred(comparison, index, row)),
            plans[index],
            baselines[index],
        ]
        for index, row in enumerate(comparison.rows)
        if index
    ]
    return networks_page(comparison.report, [*plans, *baselines], transferred)


def _transferred(comparison: Comparison, index: int, row: PlanCandidate) -> PlannedStep:
    """The first file's plan in another file, after adaptation."""
    plan = comparison.plans[comparison.report["files"][index]["model"]]
    return traced_step_with_plan(row.planned.model, row.planned.traced, plan, row.planned)


def _shown(name: str, planned: PlannedStep) -> ShownPlan:
    return ShownPlan(name, planned.step, planned.schedule, planned.solution.plan.checkpoints)
