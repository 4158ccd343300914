"""Compare plans for one model, for each of several models, or one network in several files."""

from __future__ import annotations

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
from onnxgc.api.network_pairs import compare_networks
from onnxgc.api.plan_candidates import (
    RULES,
    STORE_ALL,
    TORCH_BUDGET,
    CompareOptions,
    PlanCandidate,
)
from onnxgc.api.plan_options import Progress
from onnxgc.api.plan_table import Comparison, compare_plans, name_of
from onnxgc.api.planned_network import Network, planned_network, shapes_for
from onnxgc.api.read_options import ReadOptions
from onnxgc.budget.search import compile_loops
from onnxgc.emission.plan_files import plan_of
from onnxgc.errors import OnnxgcError, PlanError
from onnxgc.model.files.load import source_of
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.report.data.compare_report import EachReport, FailedReport, PlansReport
from onnxgc.report.text.network_pair_lines import file_label
from onnxgc.solvers.registry import SOLVERS


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
    """Compare plans for one model, or one network in several files.

    With one `source` there is a row for each solver, for checkpoints at repeated blocks (`per-block`), for
    ONNX Runtime's `layer-wise` recomputation where there are transformer layers, for the tensors that PyTorch
    saves under its memory budget (`torch-budget`) where it is installed, and for each of `plans`. The model
    is traced once, and one simulator evaluates all plans. With two `plans` the report contains their
    difference.
    With `others` the files contain one network: its tensors are matched, and the first file's plan, or the
    one of `plans`, is transferred to the others. With `each` the files are different networks with separate
    rows.

    `solvers` are names of rows; None for all that apply to the graph (with `each` without `torch-budget`).
    `plans` are in any form that `onnxgc.emission.plan_files.plan_of` reads, or such plans by name. A `budget`
    adds the row of the solver `budget`. `time_limit` is in seconds for each solver; with `each`, `workers`
    is the number of processes. Other arguments are those of `optimize`.

    Raises:
        OnnxgcError: one line that states what is wrong, where, and what to do.
    """
    started = time.perf_counter()
    notify = progress or (lambda stage: None)
    options = CompareOptions(
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
    if others and plans and (each or len(plans) > 1):
        raise PlanError(
            "a plan is for one model; give one model with it, or one plan with several files of one network, "
            "which is for the first of them"
        )
    if others and not each:
        if solvers is not None or budget is not None:
            raise PlanError(
                "several files of one network are compared by their default plans; to compare solvers on "
                "each of several networks add --each"
            )
        if device is not None:
            raise PlanError("--device does not apply to several files of one network; leave it out")
        found = _compare_networks([source, *others], options, notify)
    elif each:
        if solvers is None:
            # It takes as long as all others together.
            options = replace(
                options, solvers=tuple(name for name in options.solvers if name != TORCH_BUDGET)
            )
        found = _compare_each([source, *others], options, workers, notify)
    else:
        found = compare_plans(source, options, notify)
    return replace(found, report={**found.report, "seconds": time.perf_counter() - started})


def _named_solvers(names: Sequence[str] | None, budget: str | float | None) -> tuple[str, ...]:
    """The requested rows in the order of the registry, with the baseline."""
    known = (*(name for name in SOLVERS if name != "manual"), *RULES)
    wanted = dict.fromkeys(known if names is None else names)
    for name in wanted:
        if name == "manual":
            raise PlanError(f"the solver '{name}' does not search; give its plan as a file (--plan)")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"
            raise PlanError(f"unknown solver '{name}'; {hint}")
    if names is not None and "budget" in wanted and budget is None:
        raise PlanError("the solver 'budget' needs --budget, such as 8GiB or 60%")
    if budget is None:
        wanted.pop("budget", None)
    else:
        wanted["budget"] = None
    return tuple(name for name in known if name in wanted or name == STORE_ALL)


def _named_plans(plans: Sequence[Any] | Mapping[str, Any]) -> dict[str, CheckpointPlan]:
    """Plans by name: the file's name, extended if it is not unique."""
    if isinstance(plans, Mapping):
        reserved = [name for name in plans if name in SOLVERS or name in RULES]
        if reserved:
            raise PlanError(f"the name '{reserved[0]}' of a plan is that of a solver; give it another name")
        return {str(name): plan_of(plan) for name, plan in plans.items()}
    found: dict[str, CheckpointPlan] = {}
    for number, plan in enumerate(plans, start=1):
        path = os.fspath(plan) if isinstance(plan, str | os.PathLike) else ""
        name = Path(path).name if path else f"plan {number}"
        while name in found or name in SOLVERS or name in RULES:
            name = path if path and name != path and path not in found else f"{name} ({number})"
        found[name] = plan_of(plan)
    return found


def _compare_each(
    sources: Sequence[Any], options: CompareOptions, workers: int, notify: Progress
) -> Comparison:
    """A table for each network; an error replaces the table of a network that cannot be read."""
    found: dict[int, PlansReport | FailedReport] = {}

    def add(place: int, report: PlansReport | FailedReport) -> None:
        found[place] = report
        notify(f"{len(found)} of {len(sources)}: {report['model']}")

    # Large files take longest, so they come first.
    places = sorted(range(len(sources)), key=lambda place: -_file_size(sources[place]))
    notify(f"planning: {len(sources)} networks")
    if workers > 1 and len(sources) > 1:
        if "budget" in options.solvers:
            # Once here, not in every process.
            compile_loops(notify)
            notify(f"planning: {len(sources)} networks")
        # Spawned, not forked: the compiler has threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(sources)), mp_context=context) as pool:
            jobs = {pool.submit(_report_of, sources[place], options): place for place in places}
            for job in as_completed(jobs):
                add(jobs[job], job.result())
    else:
        for place in places:
            add(place, _report_of(sources[place], options))
    report: EachReport = {"kind": "each", "comparisons": [found[place] for place in range(len(sources))]}
    return Comparison(report, {})


def _report_of(source: Any, options: CompareOptions) -> PlansReport | FailedReport:
    started = time.perf_counter()
    try:
        given = source_of(source)
        shapes = shapes_for(given, name_of(given), options.input_shapes)
        report: PlansReport = compare_plans(
            given, replace(options, input_shapes=shapes), lambda stage: None
        ).report
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
        PlanCandidate(f"{file_label(place)}: {os.path.basename(network.name)}", "file", network.planned)
        for place, network in enumerate(networks)
    )
    return Comparison(report, plans, rows)
