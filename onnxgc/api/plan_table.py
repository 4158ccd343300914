"""Plans for one model in one table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.api.plan_candidates import CompareOptions, OmittedCandidate, PlanCandidate, plan_candidates
from onnxgc.api.plan_difference import compare_two_plans, peak_operator
from onnxgc.api.plan_options import Progress
from onnxgc.api.planned_step import PlannedStep, trace_problem
from onnxgc.api.read_options import read_with_options
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.from_step import problem_of
from onnxgc.model.files.load import source_of
from onnxgc.planning.plan import CheckpointPlan, Objective
from onnxgc.report.data.compare_report import PlanRow, PlansReport
from onnxgc.solvers.budget_solver import floor_operator
from onnxgc.tracing.checkpoint_problem import TracedProblem


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        report: the figures, as `--json` writes them: a `PlansReport`, `EachReport` or `NetworksReport`,
            by its `kind`.
        plans: plans by row, or with several files by file; empty with `each`.
        rows: plans with schedules in the report's order, or the files' own plans.
    """

    report: Any
    plans: Mapping[str, CheckpointPlan]
    rows: tuple[PlanCandidate, ...] = ()


def compare_plans(source: Any, options: CompareOptions, progress: Progress) -> Comparison:
    """Plans for one model, the lowest peak first."""
    progress("reading")
    given = source_of(source)
    model = read_with_options(given, options.read, options.input_shapes)
    traced = trace_problem(model)
    durations, timing, note = options.request.durations(traced.step)
    found = list(plan_candidates(given, model, traced, options, progress))
    rows = [row for row in found if isinstance(row, PlanCandidate)]
    omitted = [item for item in found if isinstance(item, OmittedCandidate)]
    regular_ns = sum(durations.values())
    bound, bound_operator = _bound_on_peak(traced, durations, rows)

    def extra_ratio(row: PlanCandidate) -> float:
        extra = sum(durations[step.source] for step in row.planned.schedule.recomputed)
        return extra / regular_ns if regular_ns else 0.0

    rows.sort(key=lambda row: (row.planned.profile.peak_bytes, extra_ratio(row), row.name))
    first = rows[0].planned
    notes = [*model.notes, *filter(None, [note]), *_notes_on_rows(rows)]
    by_name = {row.name: row for row in rows}
    compared = [by_name[name] for name in options.plans]
    report: PlansReport = {
        "kind": "plans",
        "model": name_of(given),
        "loss": model.loss_kind,
        "inputs": {name: list(model.types[name].shape) for name in model.inputs},
        "vertices": len(traced.problem.graph.vertices),
        "operators": len({node.origin for node in model.nodes}),
        "timing": timing,
        "regular": {
            "activation_bytes": traced.problem.total_bytes,
            "simulated_peak_bytes": first.regular_profile.peak_bytes,
            "simulated_activation_peak_bytes": first.regular_profile.activation_peak_bytes,
            "seconds": regular_ns / 1e9,
        },
        "lower_bound_bytes": bound,
        "bound_operator": bound_operator,
        "rows": [_row_figures(row, bound, extra_ratio(row), is_best=row is rows[0]) for row in rows],
        "budget_bytes": _budget_bytes(options.request, first),
        "left_out": [{"name": item.name, "reason": item.reason} for item in omitted],
        "difference": compare_two_plans(*((row.name, row.planned) for row in compared))
        if len(compared) == 2
        else None,
        "notes": notes,
    }
    return Comparison(report, {row.name: row.planned.solution.plan for row in rows}, tuple(rows))


def _budget_bytes(request: BudgetRequest, planned: PlannedStep) -> int | None:
    """The memory budget in bytes, or None."""
    if request.budget is None or request.budget.is_least:
        return None
    return request.budget.bytes_of(planned.regular_profile.peak_bytes)


def _bound_on_peak(
    traced: TracedProblem, durations: Mapping[str, int], rows: Sequence[PlanCandidate]
) -> tuple[int, str]:
    """The best lower bound on the peak, and the operator that sets it, or ""."""
    step_problem = problem_of(traced.problem.joint().step, durations)
    floor = floor_of_problem(step_problem.problem)
    bounds = [(floor.size, floor_operator(step_problem, floor))]
    for row in rows:
        solution = row.planned.solution
        if solution.objective is Objective.PEAK:
            bounds.append((solution.lower_bound_bytes, solution.bound_operator))
    return max(bounds, key=lambda bound: bound[0])


def _row_figures(row: PlanCandidate, bound: int, extra_ratio: float, *, is_best: bool) -> PlanRow:
    planned, solution = row.planned, row.planned.solution
    peak, regular = planned.profile.peak_bytes, planned.regular_profile.peak_bytes
    return {
        "name": row.name,
        "kind": row.kind,
        "detail": row.detail,
        "simulated_peak_bytes": peak,
        "simulated_activation_peak_bytes": planned.profile.activation_peak_bytes,
        "share_of_regular": peak / regular if regular else 0.0,
        **peak_operator(planned.profile),
        "peak_gap": max(0, peak - bound) / peak if peak else 0.0,
        "checkpoint_bytes": planned.objective.checkpoint_bytes,
        "heaviest_segment_bytes": planned.objective.heaviest_segment_bytes,
        "paper_objective_bytes": planned.objective.total_bytes,
        "extra_flops_ratio": planned.extra_flops_ratio,
        "objective": solution.objective.value,
        "status": solution.status.value,
        "objective_bytes": solution.objective_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "lower_bound_ratio": None if solution.time is None else solution.time.lower_bound_ratio,
        "gap": solution.gap,
        "solve_seconds": solution.seconds if row.kind == "solver" else None,
        "checkpoints": list(map(str, solution.plan.checkpoints)),
        "extra_time_ratio": extra_ratio,
        "best": is_best,
    }


def _notes_on_rows(rows: Sequence[PlanCandidate]) -> list[str]:
    raising = [row.name for row in rows if row.kind == "solver" and row.planned.raises_the_peak]
    if not raising:
        return []
    listed = ", ".join(f"'{name}'" for name in raising)
    return [
        f"the plan of {listed} has a higher peak than the baseline; `optimize` would use the baseline instead"
    ]


def name_of(source: str | os.PathLike[str] | onnx.ModelProto) -> str:
    """The name of a model in reports: its path, or the name of its graph."""
    return source.graph.name if isinstance(source, onnx.ModelProto) else os.fspath(source)
