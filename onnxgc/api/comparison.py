"""Plans side by side: of all solvers for one model, of files, or of one network from several frameworks."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxgc.api.budgeting import BudgetRequest
from onnxgc.api.network_pairs import Network, compared_networks, planned_network, shapes_for
from onnxgc.api.pipeline import (
    PlannedStep,
    Progress,
    ReadOptions,
    judged,
    plan_traced_again,
    plan_traced_within,
    read_again,
    trace_problem,
)
from onnxgc.api.plan_difference import difference_of, peak_step
from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.from_step import problem_of
from onnxgc.budget.search import compile_loops
from onnxgc.emission.plan_files import plan_of
from onnxgc.errors import BudgetError, OnnxgcError, PlanError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.files.load import source_of
from onnxgc.planning.order import Order
from onnxgc.planning.plan import CheckpointPlan, Objective
from onnxgc.report.comparison import file_label
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.budget import floor_operator
from onnxgc.solvers.registry import SOLVERS
from onnxgc.tracing.repeated_blocks import Blocks, repeated_blocks
from onnxgc.tracing.solver_graph import TracedProblem
from onnxgc.tracing.transformer_layers import layerwise_checkpoints

PER_BLOCK, LAYER_WISE, TORCH_BUDGET = "per-block", "layer-wise", "torch-budget"
RULES = (PER_BLOCK, LAYER_WISE, TORCH_BUDGET)
"""What others do: checkpoints by hand, ONNX Runtime's own recomputation, and PyTorch's memory budget."""
TORCH_SHARE = 0.5
"""The memory budget that PyTorch is given: this share of what it saves by default."""
STORE_ALL = "store-all"
DEFAULT_LIMITS_SECONDS = {"peak": 60.0}
"""Where no limit is given; the other solvers end by themselves."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan with its name, its kind (solver, rule or plan), and what is to be known of it."""

    name: str
    kind: str
    planned: PlannedStep
    detail: str = ""


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns: the figures as `--json` has them, and the plans that they are of.

    Plans are named as the rows are; of several files, by the file that they are for. `each` gives none.
    `rows` are those of one model, with their schedules, in the report's order, or the files' own plans.
    """

    report: Mapping[str, Any]
    plans: Mapping[str, CheckpointPlan]
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class _NoRow:
    """Why there is no row."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to compare, checked; it goes to other processes."""

    solvers: tuple[str, ...]
    plans: Mapping[str, CheckpointPlan]
    request: BudgetRequest
    time_limit: float | None
    seed: int
    read: ReadOptions
    input_shapes: Mapping[str, tuple[int, ...]]

    def options_for(self, solver: str, tell: Progress) -> SolverOptions:
        limit = DEFAULT_LIMITS_SECONDS.get(solver) if self.time_limit is None else self.time_limit
        return SolverOptions(time_limit_seconds=limit, seed=self.seed, order=self.request.order, tell=tell)


def compare(
    source: Any,
    *others: Any,
    each: bool = False,
    solvers: Sequence[str] | None = None,
    plans: Sequence[Any] | Mapping[str, Any] = (),
    budget: str | float | None = None,
    order: str = Order.FREE.value,
    device: str | None = None,
    loss: str = "auto",
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    untie: bool = False,
    time_limit: float | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Plans for one model, or one network in several files.

    With one `source` there is a row for each of `solvers` (all that take the graph, if None), for `per-block`
    checkpoints, for ONNX Runtime's `layer-wise` recomputation where there are transformer layers, for what
    PyTorch saves under its memory budget (`torch-budget`) where it is installed, and for each of `plans`, in
    any form that `onnxgc.emission.plan_files.plan_of` reads. The model is traced once, and all are judged
    alike. Of two plans the report says what differs. A `budget` adds the solver for it.
    With `others` the files hold one network from several frameworks: its tensors are matched, and the first
    file's plan, or the one of `plans`, is carried over to the others. With `each` they are different
    networks, each of which gets its rows (`torch-budget` only where it is named), by as many `workers`,
    which are processes.
    `time_limit` is one for each solver; the other arguments are those of `optimize`.

    Raises:
        OnnxgcError: one line that says what is wrong, where and what to do.
    """
    started = time.perf_counter()
    asked = _Asked(
        _named_solvers(solvers, budget),
        _named_plans(plans),
        BudgetRequest.of(
            budget,
            pareto=False,
            order=order,
            device=device,
            calibrate=None,
            solver=None,
            objective=None,
        ),
        time_limit,
        seed,
        ReadOptions(loss, tuple(trainable), tuple(freeze), False, freeze_bn, untie),
        dict(input_shapes or {}),
    )
    tell = progress or (lambda stage: None)
    if others and plans and (each or len(plans) > 1):
        raise PlanError(
            "a plan is for one model; give one model with it, or one plan with several files of one network, "
            "which is for the first of them"
        )
    if others and not each:
        if solvers is not None or budget is not None:
            raise PlanError(
                "of several files of one network the default plans are compared; for the solvers on each of "
                "several networks say so (--each)"
            )
        if device is not None:
            raise PlanError(
                "--device is for times of plans, of which files of one network show none; leave it out"
            )
        found = _compare_networks([source, *others], asked, tell)
    elif each:
        if solvers is None:
            # It takes as long as all others together.
            asked = replace(asked, solvers=tuple(name for name in asked.solvers if name != TORCH_BUDGET))
        found = _compare_each([source, *others], asked, workers, tell)
    else:
        found = _compare_plans(source, asked, tell)
    return replace(found, report={**found.report, "seconds": time.perf_counter() - started})


def _named_solvers(names: Sequence[str] | None, budget: str | float | None) -> tuple[str, ...]:
    """What is asked for, in the order of the registry, and storing everything always."""
    known = (*(name for name in SOLVERS if name != "manual"), *RULES)
    wanted = dict.fromkeys(known if names is None else names)
    for name in wanted:
        if name == "manual":
            raise PlanError(f"the solver '{name}' has no plan of its own; give its plan as a file (--plan)")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"
            raise PlanError(f"there is no solver '{name}'; {hint}")
    if names is not None and "budget" in wanted and budget is None:
        raise PlanError("the solver 'budget' needs --budget, such as 8GiB or 60%")
    if budget is None:
        wanted.pop("budget", None)
    else:
        wanted["budget"] = None
    return tuple(name for name in known if name in wanted or name == STORE_ALL)


def _named_plans(plans: Sequence[Any] | Mapping[str, Any]) -> dict[str, CheckpointPlan]:
    """Plans by names for people: those of their files, longer where two are alike."""
    if isinstance(plans, Mapping):
        taken = [name for name in plans if name in SOLVERS or name in RULES]
        if taken:
            raise PlanError(f"a plan is called '{taken[0]}', as a solver's row is; give it another name")
        return {str(name): plan_of(plan) for name, plan in plans.items()}
    found: dict[str, CheckpointPlan] = {}
    for number, plan in enumerate(plans, start=1):
        path = os.fspath(plan) if isinstance(plan, str | os.PathLike) else ""
        name = Path(path).name if path else f"plan {number}"
        while name in found or name in SOLVERS or name in RULES:
            name = path if path and name != path and path not in found else f"{name} ({number})"
        found[name] = plan_of(plan)
    return found


# -- one model --------------------------------------------------------------------------------


def _compare_plans(source: Any, asked: _Asked, tell: Progress) -> Comparison:
    tell("reading")
    given = source_of(source)
    model = read_again(given, asked.read, asked.input_shapes)
    traced = trace_problem(model)
    durations, timing, note = asked.request.durations(traced.step)
    found = list(_rows(given, model, traced, asked, tell))
    rows = [row for row in found if isinstance(row, Row)]
    left = [item for item in found if isinstance(item, _NoRow)]
    regular_ns = sum(durations.values())
    bound, bound_operator = _bound_on_peak(traced, durations, rows)

    def extra_ratio(row: Row) -> float:
        extra = sum(durations[step.source] for step in row.planned.schedule.recomputed)
        return extra / regular_ns if regular_ns else 0.0

    rows.sort(key=lambda row: (row.planned.profile.peak_bytes, extra_ratio(row), row.name))
    first = rows[0].planned
    figures = [
        {**_figures(row, bound), "extra_time_ratio": extra_ratio(row), "best": row is rows[0]} for row in rows
    ]
    notes = [*model.notes, *filter(None, [note]), *_notes_on_rows(rows)]
    by_name = {row.name: row for row in rows}
    compared = [by_name[name] for name in asked.plans]
    report = {
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
        "rows": figures,
        "budget_bytes": _budget_bytes(asked.request, first),
        "left_out": [{"name": item.name, "reason": item.reason} for item in left],
        "difference": difference_of(*((row.name, row.planned) for row in compared))
        if len(compared) == 2
        else None,
        "notes": notes,
    }
    return Comparison(report, {row.name: row.planned.solution.plan for row in rows}, tuple(rows))


def _budget_bytes(request: BudgetRequest, planned: PlannedStep) -> int | None:
    """The memory budget in bytes, if there is one."""
    if request.budget is None or request.budget.is_least:
        return None
    return request.budget.bytes_of(planned.regular_profile.peak_bytes)


def _rows(
    source: Any, model: TrainableModel, traced: TracedProblem, asked: _Asked, tell: Progress
) -> Iterator[Row | _NoRow]:
    """A row for each plan that was asked for, or why there is none."""
    stored = judged(
        model, traced, SOLVERS[STORE_ALL].solve(traced.problem, SolverOptions(objective=Objective.PEAK))
    )
    yield Row(STORE_ALL, "solver", stored, SOLVERS[STORE_ALL].summary)
    for name in asked.solvers:
        tell(f"planning: {name}")
        if name == "budget":
            yield _within_budget(model, traced, asked.request, asked.options_for(name, tell))
        elif name == PER_BLOCK:
            yield _per_block(model, traced, stored)
        elif name == LAYER_WISE:
            yield _layer_wise(model, traced, stored)
        elif name == TORCH_BUDGET:
            yield _torch_budget(source, model, traced, asked.read, stored)
        elif name != STORE_ALL:
            yield _of_solver(name, model, traced, asked.options_for(name, tell), stored)
    for name, plan in asked.plans.items():
        tell(f"judging: {name}")
        try:
            yield Row(name, "plan", plan_traced_again(model, traced, plan, stored))
        except PlanError as error:
            raise PlanError(f"plan '{name}' is not one for this model: {error}") from error


def _of_solver(
    name: str, model: TrainableModel, traced: TracedProblem, options: SolverOptions, stored: PlannedStep
) -> Row | _NoRow:
    solver = SOLVERS[name]
    refusal = solver.refusal(traced.problem)
    if refusal is not None:
        return _NoRow(name, refusal)
    try:
        solution = solver.solve(traced.problem, options)
    except PlanError as error:
        return _NoRow(name, str(error))
    return Row(name, "solver", judged(model, traced, solution, stored), solver.summary)


def _within_budget(
    model: TrainableModel, traced: TracedProblem, request: BudgetRequest, options: SolverOptions
) -> Row | _NoRow:
    try:
        planned = plan_traced_within(model, traced, request, options)
    except BudgetError as error:
        return _NoRow("budget", str(error))
    return Row("budget", "solver", planned, SOLVERS["budget"].summary)


def _per_block(model: TrainableModel, traced: TracedProblem, stored: PlannedStep) -> Row | _NoRow:
    """Of the levels of nesting the one with the lowest peak, as somebody who tries them would choose."""

    def planned(blocks: Blocks) -> PlannedStep:
        return plan_traced_again(model, traced, CheckpointPlan(blocks.checkpoints), stored)

    tried = [(blocks, planned(blocks)) for blocks in repeated_blocks(traced)]
    if not tried:
        return _NoRow(PER_BLOCK, "no names of tensors, nodes or parameters show repeated blocks")
    blocks, best = min(tried, key=lambda one: one[1].profile.peak_bytes)
    return Row(
        PER_BLOCK, "rule", best, f"{blocks.count} blocks like {blocks.pattern} run again, each as a whole"
    )


def _layer_wise(model: TrainableModel, traced: TracedProblem, stored: PlannedStep) -> Row | _NoRow:
    checkpoints = layerwise_checkpoints(traced)
    if checkpoints is None:
        return _NoRow(
            LAYER_WISE, "no transformer layers with a normalisation in front of attention were found"
        )
    planned = plan_traced_again(model, traced, CheckpointPlan(checkpoints), stored)
    return Row(LAYER_WISE, "rule", planned, "ONNX Runtime's ORTMODULE_MEMORY_OPT_LEVEL=1, as modelled")


def _torch_budget(
    source: Any, model: TrainableModel, traced: TracedProblem, read: ReadOptions, stored: PlannedStep
) -> Row | _NoRow:
    try:
        from onnxgc.torch.torch_partitioner_budget import tensors_saved

        saved = tensors_saved(
            source,
            TORCH_SHARE,
            input_shapes={name: model.types[name].shape for name in model.inputs},
            trainable=read.trainable,
            freeze=read.freeze,
            freeze_bn=read.freeze_bn,
        )
    except OnnxgcError as error:
        return _NoRow(TORCH_BUDGET, str(error))
    wanted = {traced.vertex_of[name] for name in saved if name in traced.vertex_of}
    kept = tuple(vertex for vertex in traced.problem.graph.vertices if vertex in wanted)
    planned = plan_traced_again(model, traced, CheckpointPlan(kept), stored)
    return Row(
        TORCH_BUDGET,
        "rule",
        planned,
        f"what PyTorch saves under activation_memory_budget={TORCH_SHARE}, as {len(kept)} tensors",
    )


def _bound_on_peak(
    traced: TracedProblem, durations: Mapping[str, int], rows: Sequence[Row]
) -> tuple[int, str]:
    """The best of what is known that no plan's peak goes below, and the operator that sets it, or ""."""
    posed = problem_of(traced.problem.joint().step, durations)
    floor = floor_of_problem(posed.problem)
    bounds = [(floor.size, floor_operator(posed, floor))]
    for row in rows:
        solution = row.planned.solution
        if solution.objective is Objective.PEAK:
            bounds.append((solution.lower_bound_bytes, solution.bound_operator))
    return max(bounds, key=lambda bound: bound[0])


def _figures(row: Row, bound: int) -> dict[str, Any]:
    planned, solution = row.planned, row.planned.solution
    peak, regular = planned.profile.peak_bytes, planned.regular_profile.peak_bytes
    return {
        "name": row.name,
        "kind": row.kind,
        "detail": row.detail,
        "simulated_peak_bytes": peak,
        "simulated_activation_peak_bytes": planned.profile.activation_peak_bytes,
        "share_of_regular": peak / regular if regular else 0.0,
        **peak_step(planned.profile),
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
        "checkpoints": list(solution.plan.checkpoints),
    }


def _notes_on_rows(rows: Sequence[Row]) -> list[str]:
    raising = [row.name for row in rows if row.kind == "solver" and row.planned.raises_the_peak]
    if not raising:
        return []
    listed = ", ".join(f"'{name}'" for name in raising)
    return [
        f"more than storing everything takes the plan of {listed}; `optimize` would store everything instead"
    ]


def name_of(source: str | os.PathLike[str] | onnx.ModelProto) -> str:
    """What a report calls a model: its path, or the name of its graph."""
    return source.graph.name if isinstance(source, onnx.ModelProto) else os.fspath(source)


# -- several networks, each by itself ----------------------------------------------------------


def _compare_each(sources: Sequence[Any], asked: _Asked, workers: int, tell: Progress) -> Comparison:
    """One table a network. One that cannot be read has its error in the place of a table."""
    found: list[Mapping[str, Any] | None] = [None] * len(sources)
    told = 0

    def put(place: int, report: Mapping[str, Any]) -> None:
        nonlocal told
        told += 1
        found[place] = report
        tell(f"{told} of {len(sources)}: {report['model']}")

    # Large files take longest: begun last, one would keep the others waiting.
    places = sorted(range(len(sources)), key=lambda place: -_file_size(sources[place]))
    tell(f"planning: {len(sources)} networks")
    if workers > 1 and len(sources) > 1:
        if "budget" in asked.solvers:
            # Here, and not in every process.
            compile_loops(tell)
            tell(f"planning: {len(sources)} networks")
        # Started anew and not forked: the solvers' compiler has threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(sources)), mp_context=context) as pool:
            jobs = {pool.submit(_report_of, sources[place], asked): place for place in places}
            for job in as_completed(jobs):
                put(jobs[job], job.result())
    else:
        for place in places:
            put(place, _report_of(sources[place], asked))
    return Comparison({"kind": "each", "comparisons": found}, {})


def _report_of(source: Any, asked: _Asked) -> Mapping[str, Any]:
    started = time.perf_counter()
    try:
        given = source_of(source)
        shapes = shapes_for(given, name_of(given), asked.input_shapes)
        report = _compare_plans(given, replace(asked, input_shapes=shapes), lambda stage: None).report
    except OnnxgcError as error:
        return {"kind": "plans", "model": str(source), "error": str(error)}
    return {**report, "seconds": time.perf_counter() - started}


def _file_size(source: Any) -> int:
    is_file = isinstance(source, str | os.PathLike) and os.path.isfile(source)
    return os.path.getsize(source) if is_file else 0


# -- one network in several files ---------------------------------------------------------------


def _compare_networks(sources: Sequence[Any], asked: _Asked, tell: Progress) -> Comparison:
    options = asked.options_for("peak", tell)
    networks: list[Network] = []
    for source in sources:
        given = source_of(source)
        name = name_of(given)
        while isinstance(given, onnx.ModelProto) and any(network.name == name for network in networks):
            # Exporters call all their graphs alike.
            name = f"{name} ({len(networks) + 1})"
        tell(f"planning: {name}")
        first = networks[0] if networks else None
        plan = next(iter(asked.plans.values()), None) if first is None else None
        networks.append(planned_network(name, given, asked.read, asked.input_shapes, options, first, plan))
    tell("matching")
    report, plans = compared_networks(networks)
    rows = tuple(
        Row(f"{file_label(place)}: {os.path.basename(network.name)}", "file", network.planned)
        for place, network in enumerate(networks)
    )
    return Comparison({"kind": "networks", **report}, plans, rows)
