"""Plans for one model in one table, and the difference between two of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.api.optimize_report import MAX_LISTED
from onnxgc.api.plan_candidates import CompareOptions, OmittedCandidate, PlanCandidate, plan_candidates
from onnxgc.api.plan_options import Progress
from onnxgc.api.planned_step import PlannedStep, trace_problem
from onnxgc.api.read_options import name_of, read_with_options
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.from_step import problem_of
from onnxgc.model.files.load import source_of
from onnxgc.planning.plan import CheckpointPlan, Objective
from onnxgc.planning.schedule import Compute, Release
from onnxgc.planning.simulate import MemoryProfile, live_at_peak
from onnxgc.report.data.compare_report import DifferenceReport, DifferenceSide, PeakPosition, PlanRow, PlansReport
from onnxgc.report.text.graph_rows import graph_table
from onnxgc.report.text.network_pair_lines import checkpoints_table, files_table
from onnxgc.report.text.networks_overview import overview_table
from onnxgc.report.text.plan_rows import plans_table
from onnxgc.report.text.text_table import Cells
from onnxgc.solvers.budget_solver import floor_operator
from onnxgc.tracing.checkpoint_problem import TracedProblem


@dataclass(frozen=True, repr=False)
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

    def tables(self) -> list[Cells]:
        """The tables that `onnxgc compare` prints."""
        report = self.report
        match report["kind"]:
            case "plans":
                return [plans_table(report)]
            case "graph":
                return [graph_table(report)]
            case "each":
                return [overview_table(report)]
        return [files_table(report), *(checkpoints_table(report, pair) for pair in range(len(report["pairs"])))]

    def __repr__(self) -> str:
        return f"<Comparison: {'; '.join(table.title for table in self.tables())}>"

    def _repr_markdown_(self) -> str:
        return "\n\n".join(table.markdown() for table in self.tables())


def compare_plans(source: Any, options: CompareOptions, progress: Progress) -> Comparison:
    """Plans for one model, the lowest peak first."""
    progress("reading")
    given = source_of(source)
    model = read_with_options(given, options.read, options.input_shapes)
    traced = trace_problem(model)
    durations, timing, note = options.request.durations(traced.step)
    candidates = list(plan_candidates(given, model, traced, options, progress))
    rows = [row for row in candidates if isinstance(row, PlanCandidate)]
    omitted = [item for item in candidates if isinstance(item, OmittedCandidate)]
    bound, bound_operator = _bound_on_peak(traced, durations, rows)

    def extra_ratio(row: PlanCandidate) -> float:
        return row.planned.extra_time_ratio(durations)

    rows.sort(key=lambda row: (row.planned.profile.peak_bytes, extra_ratio(row), row.name))
    first = rows[0].planned
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
            "seconds": sum(durations.values()) / 1e9,
        },
        "lower_bound_bytes": bound,
        "bound_operator": bound_operator,
        "modules": {name: module for row in rows for name, module in row.planned.modules_of([bound_operator]).items()},
        "rows": [_row_figures(row, bound, extra_ratio(row), is_best=row is rows[0]) for row in rows],
        "budget_bytes": _budget_bytes(options.request, first),
        "left_out": [{"name": item.name, "reason": item.reason} for item in omitted],
        "difference": compare_two_plans(*((row.name, row.planned) for row in compared)) if len(compared) == 2 else None,
        "notes": [*model.notes, *filter(None, [note]), *_notes_on_rows(rows)],
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
    peak, baseline = planned.profile.peak_bytes, planned.regular_profile.peak_bytes
    return {
        "name": row.name,
        "kind": row.kind,
        "detail": row.detail,
        "simulated_peak_bytes": peak,
        "simulated_activation_peak_bytes": planned.profile.activation_peak_bytes,
        "share_of_regular": peak / baseline if baseline else 0.0,
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
    return [f"the plan of {listed} has a higher peak than the baseline; `optimize` would use the baseline instead"]


class PlanFate(StrEnum):
    """The fate of a forward tensor under a schedule."""

    CHECKPOINT = "checkpoint"
    """A checkpoint that is live when backward begins."""
    HELD = "held"
    """Live when backward begins, but not a checkpoint: its segment, the last, is not recomputed."""
    RECOMPUTED = "again"
    ONCE = "once"
    """Computed once, and released before backward."""


_KEPT = (PlanFate.CHECKPOINT, PlanFate.HELD)


def compare_two_plans(one: tuple[str, PlannedStep], other: tuple[str, PlannedStep]) -> DifferenceReport:
    """Tensors that two plans treat differently, and the change of the peak.

    A tensor that is a checkpoint of one plan and kept by the other as well is among the `tensors`, but not
    among those that only one plan keeps.
    """
    fates = [_fates(planned) for _, planned in (one, other)]
    sizes = {**_sizes(one[1]), **_sizes(other[1])}
    tensors = sorted({*fates[0], *fates[1]}, key=lambda name: (-sizes[name], name))
    # A tensor that only one plan recomputes may be one of backward, which the other computes once.
    pairs = {name: (fates[0].get(name, PlanFate.ONCE), fates[1].get(name, PlanFate.ONCE)) for name in tensors}
    ones = [(name, sizes[name], *pair) for name, pair in pairs.items()]
    others = [(name, size, there, here) for name, size, here, there in ones]
    first, second = (planned.profile.peak_bytes for _, planned in (one, other))
    sides = [_side(*one, ones), _side(*other, others)]
    named = [*tensors, *(item["tensor"] for side in sides for item in side["largest_at_peak"])]
    return {
        "modules": one[1].modules_of(named) | other[1].modules_of(named),
        "plans": sides,
        "tensors": [
            {"tensor": name, "bytes": sizes[name], "fates": [fate.value for fate in pair]}
            for name, pair in pairs.items()
            if pair[0] is not pair[1]
        ],
        "kept_by_both": sum(all(fate in _KEPT for fate in pair) for pair in pairs.values()),
        "computed_again_by_both": sum(pair == (PlanFate.RECOMPUTED, PlanFate.RECOMPUTED) for pair in pairs.values()),
        "peak_change_bytes": second - first,
    }


def _side(name: str, planned: PlannedStep, fates: Sequence[tuple[str, int, PlanFate, PlanFate]]) -> DifferenceSide:
    """One plan's figures; `fates` are tensors with sizes, and their fates here and under the other plan."""
    live = live_at_peak(planned.schedule, planned.step.graph, planned.profile)
    return {
        "name": name,
        "simulated_peak_bytes": planned.profile.peak_bytes,
        **peak_operator(planned.profile),
        "largest_at_peak": [{"tensor": tensor, "bytes": size} for tensor, size in live[:MAX_LISTED]],
        "kept_here_only": [
            {"tensor": tensor, "bytes": size}
            for tensor, size, here, there in fates
            if here in _KEPT and there not in _KEPT
        ],
        "computed_again_here_only": [
            {"tensor": tensor, "bytes": size}
            for tensor, size, here, there in fates
            if here is PlanFate.RECOMPUTED is not there
        ],
    }


def peak_operator(profile: MemoryProfile) -> PeakPosition:
    """The operator at the peak, with its number in the step from 1."""
    return {
        "peak_step": profile.peak_operator,
        "peak_step_number": profile.timeline.index(profile.peak_bytes) + 1 if profile.timeline else 0,
        "steps": len(profile.timeline),
    }


def _fates(planned: PlannedStep) -> dict[str, PlanFate]:
    """The fates of all vertices with memory, and of recomputed tensors of backward."""
    traced = planned.traced
    members, resident = traced.problem.joint().members, planned.step.graph.resident
    again = _recomputed(planned)
    gone = _released_before_backward(planned)
    named = set(planned.solution.plan.checkpoints)
    fates = dict.fromkeys(again, PlanFate.RECOMPUTED)
    for vertex in traced.problem.graph.vertices:
        name = str(vertex)
        if name in again or name in resident:
            continue
        if gone.issuperset((name, *members[vertex])):
            fates[name] = PlanFate.ONCE
        else:
            fates[name] = PlanFate.CHECKPOINT if vertex in named else PlanFate.HELD
    return fates


def _released_before_backward(planned: PlannedStep) -> set[str]:
    released: set[str] = set()
    for step in planned.schedule.instructions:
        if isinstance(step, Compute) and step.chunk is not None:
            break
        if isinstance(step, Release):
            released.update(step.tensors)
    return released


def _recomputed(planned: PlannedStep) -> set[str]:
    """Recomputed vertices, and recomputed tensors of backward."""
    traced, original_of = planned.traced, planned.schedule.original_of
    copies = (copy for step in planned.schedule.recomputed for copy in step.operator.outputs)
    tensors = (original_of.get(copy, copy) for copy in copies)
    return {str(traced.vertex_of.get(tensor, tensor)) for tensor in tensors}


def _sizes(planned: PlannedStep) -> dict[str, int]:
    """Bytes of vertices, and of all other tensors."""
    problem = planned.traced.problem
    return {
        **planned.step.graph.sizes,
        **{str(vertex): problem.size_bytes(vertex) for vertex in problem.graph.vertices},
    }
