"""Compare plans for one model, for each of several models, or one network in several files."""

import difflib
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.api.graph_comparison import compare_on_graph
from onnxgc.api.network_pairs import compare_networks
from onnxgc.api.plan_candidates import RULES, STORE_ALL, TORCH_BUDGET, CompareOptions, PlanCandidate, solver_choices
from onnxgc.api.plan_options import Progress
from onnxgc.api.plan_table import Comparison, compare_plans
from onnxgc.api.plan_transfer import Network, planned_network, shapes_for
from onnxgc.api.read_options import ReadOptions, name_of
from onnxgc.budget.search import compile_loops, ignore_progress
from onnxgc.emission.plan_files import plan_of
from onnxgc.errors import OnnxgcError, PlanError
from onnxgc.graph.graph_sources import is_bare_graph
from onnxgc.model.files.load import source_of
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.report.data.compare_report import EachReport, FailedReport, PlansReport
from onnxgc.report.text.network_pair_lines import file_label
from onnxgc.solvers.base import PlanSearch
from onnxgc.solvers.registry import SOLVERS


def compare(
    source: Any,
    *others: Any,
    each: bool = False,
    solvers: Sequence[str | PlanSearch] | None = None,
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
    """Compare plans for one model or bare graph, or one network in several files.

    With one `source` there is a row for each solver, for checkpoints at repeated blocks (`per-block`), for
    ONNX Runtime's `layer-wise` recomputation of transformer layers, for the tensors that an installed PyTorch
    saves under its memory budget (`torch-budget`), and for each of `plans`. One simulator evaluates all plans
    of the traced model. Two `plans` are compared with each other.
    A bare graph (as `onnxgc.solve` takes it) in place of a model has a row for each solver of such graphs, or
    with a `budget` for each order of operators.
    With `others` the files contain one network: its tensors are matched, and the first file's plan, or the
    one of `plans`, is transferred to the others. With `each` the files are different networks with separate
    rows.

    `solvers` are names of rows, or solver objects (`onnxgc.solvers.base.PlanSearch`), which run in this
    process; None for all that apply to the graph (with `each` without `torch-budget`).
    `plans` are in any form that `onnxgc.emission.plan_files.plan_of` reads, or such plans by name. A `budget`
    adds the row of the solver `budget`. `time_limit` is in seconds for each solver; with `each`, `workers`
    is the number of processes. Other arguments are those of `optimize`.

    Raises:
        OnnxgcError: one line that states what is wrong, where, and what to do.
    """
    started = time.perf_counter()
    notify = progress or ignore_progress
    if is_bare_graph(source):
        _check_graph_options(others, each, plans, device, input_shapes, trainable, freeze, freeze_bn, untie)
        graph_report = compare_on_graph(source, solvers, budget, time_limit, seed, notify)
        return Comparison({**graph_report, "seconds": time.perf_counter() - started}, {})
    names, objects = solver_choices(solvers)
    options = CompareOptions(
        (*_named_solvers(names, budget, each), *objects),
        _named_plans(plans),
        BudgetRequest.from_options(budget, order=order, device=device),
        time_limit,
        seed,
        ReadOptions(loss, tuple(trainable), tuple(freeze), False, freeze_bn, untie),
        dict(input_shapes or {}),
        objects,
    )
    if others:
        _check_several(each, len(plans), has_rows=solvers is not None or budget is not None, device=device)
    if each:
        comparison = _compare_each([source, *others], options, 1 if objects else workers, notify)
    elif others:
        comparison = _compare_networks([source, *others], options, notify)
    else:
        comparison = compare_plans(source, options, notify)
    report = {**comparison.report, "seconds": time.perf_counter() - started}
    return replace(comparison, report=report)


def _check_graph_options(*given: Any) -> None:
    if any(given):
        raise PlanError("a bare graph is compared alone, by solvers, budget, time_limit and seed; leave the others out")


def _check_several(each: bool, plans: int, *, has_rows: bool, device: str | None) -> None:
    """Fail if options do not apply to several files."""
    if plans and (each or plans > 1):
        raise PlanError(
            "a plan is for one model; give one model with it, or one plan with several files of one network, "
            "which is for the first of them"
        )
    if has_rows and not each:
        raise PlanError(
            "several files of one network are compared by their default plans; to compare solvers on each of "
            "several networks add --each"
        )
    if device is not None and not each:
        raise PlanError("--device does not apply to several files of one network; leave it out")


def _named_solvers(names: Sequence[str] | None, budget: str | float | None, each: bool) -> tuple[str, ...]:
    """The requested rows in the order of the registry, with the baseline."""
    known = (*(name for name in SOLVERS if name != "manual"), *RULES)
    # By default without the row that takes as long as all others together, if there are several tables.
    wanted = {name for name in known if not each or name != TORCH_BUDGET} if names is None else {*names}
    for name in wanted:
        if name == "manual":
            raise PlanError(f"the solver '{name}' does not search; give its plan as a file (--plan)")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"
            raise PlanError(f"unknown solver '{name}'; {hint}")
    if names is not None and "budget" in wanted and budget is None:
        raise PlanError("the solver 'budget' needs --budget, such as 8GiB or 60%")
    wanted.add(STORE_ALL)
    return tuple(name for name in known if (budget is not None if name == "budget" else name in wanted))


def _named_plans(plans: Sequence[Any] | Mapping[str, Any]) -> dict[str, CheckpointPlan]:
    """Plans by name: the file's name, extended if it is not unique."""
    if isinstance(plans, Mapping):
        reserved = [name for name in plans if name in SOLVERS or name in RULES]
        if reserved:
            raise PlanError(f"the name '{reserved[0]}' of a plan is that of a solver; give it another name")
        return {str(name): plan_of(plan) for name, plan in plans.items()}
    named: dict[str, CheckpointPlan] = {}
    for number, plan in enumerate(plans, start=1):
        path = os.fspath(plan) if isinstance(plan, str | os.PathLike) else ""
        name = Path(path).name if path else f"plan {number}"
        while name in named or name in SOLVERS or name in RULES:
            name = path if path and name != path and path not in named else f"{name} ({number})"
        named[name] = plan_of(plan)
    return named


def _compare_each(sources: Sequence[Any], options: CompareOptions, workers: int, notify: Progress) -> Comparison:
    """A table for each network; an error replaces the table of a network that cannot be read."""
    reports: dict[int, PlansReport | FailedReport] = {}

    def add(index: int, report: PlansReport | FailedReport) -> None:
        reports[index] = report
        notify(f"{len(reports)} of {len(sources)}: {report['model']}")

    # Large files take longest, so they come first.
    order = sorted(range(len(sources)), key=lambda index: -_file_size(sources[index]))
    notify(f"planning: {len(sources)} networks")
    if workers > 1 and len(sources) > 1:
        if "budget" in options.solvers:
            # Once here, not in every process.
            compile_loops(notify)
            notify(f"planning: {len(sources)} networks")
        # Spawned, not forked: the compiler has threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(sources)), mp_context=context) as pool:
            jobs = {pool.submit(_report_of, sources[index], options): index for index in order}
            for job in as_completed(jobs):
                add(jobs[job], job.result())
    else:
        for index in order:
            add(index, _report_of(sources[index], options))
    report: EachReport = {"kind": "each", "comparisons": [reports[index] for index in range(len(sources))]}
    return Comparison(report, {})


def _report_of(source: Any, options: CompareOptions) -> PlansReport | FailedReport:
    started = time.perf_counter()
    try:
        given = source_of(source)
        shapes = shapes_for(given, name_of(given), options.input_shapes)
        report: PlansReport = compare_plans(given, replace(options, input_shapes=shapes), lambda stage: None).report
    except OnnxgcError as error:
        return {"kind": "plans", "model": str(source), "error": str(error)}
    return {**report, "seconds": time.perf_counter() - started}


def _file_size(source: Any) -> int:
    is_file = isinstance(source, str | os.PathLike) and os.path.isfile(source)
    return os.path.getsize(source) if is_file else 0


def _compare_networks(sources: Sequence[Any], options: CompareOptions, notify: Progress) -> Comparison:
    search = options.search_options("peak", notify)
    networks: list[Network] = []
    for source in sources:
        given = source_of(source)
        name = name_of(given)
        while isinstance(given, onnx.ModelProto) and any(network.name == name for network in networks):
            # Exporters give all their graphs the same name.
            name = f"{name} ({len(networks) + 1})"
        notify(f"planning: {name}")
        first = networks[0] if networks else None
        plan = next(iter(options.plans.values()), None) if first is None else None
        networks.append(planned_network(name, given, options.read, options.input_shapes, search, first, plan))
    notify("matching")
    report, plans = compare_networks(networks)
    rows = tuple(
        PlanCandidate(f"{file_label(number)}: {os.path.basename(network.name)}", "file", network.planned)
        for number, network in enumerate(networks)
    )
    return Comparison(report, plans, rows)
