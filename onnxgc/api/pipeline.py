"""The pipeline on one page: read, try, plan, emit, report."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from onnxgc.api.optimize_report import optimize_report
from onnxgc.api.output_options import OutputOptions
from onnxgc.api.plan_options import PlanOptions, Progress
from onnxgc.api.planned_step import PlannedStep, emit
from onnxgc.api.read_options import ReadOptions, read_with_options
from onnxgc.api.step_planning import plan_step, plan_within, step_with_plan
from onnxgc.api.trial_run import trial_run
from onnxgc.emission.training_graph import TrainingGraph
from onnxgc.errors import ModelFileError
from onnxgc.model.core.ir import Array, TrainableModel, dtype_name
from onnxgc.model.files.load import source_of
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.tracing.gradient_types import type_of_array
from onnxgc.tracing.optimizers import Optimizer, optimizer_of


@dataclass(frozen=True)
class OptimizeResult:
    """The result of `optimize`.

    Attributes:
        plan: checkpoints, or a sequence of operators.
        report: the figures, as `--json` writes them.
        planned: the traced step with its schedule.
        options: how the model was read.
        values: weights that replace those of the model, by name.
    """

    plan: CheckpointPlan
    report: OptimizeReport
    planned: PlannedStep
    options: ReadOptions
    values: Mapping[str, Array]
    _written: TrainingGraph | None = None

    @cached_property
    def training_graph(self) -> TrainingGraph:
        """The emitted graph; if no file was written, the first access reads the weights and builds it."""
        return self._written or emit(self.planned, values=self.values, options=self.options)


def optimize(
    source: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    solver: str | None = None,
    objective: str | None = None,
    checkpoints: Sequence[str] = (),
    loss: str = "auto",
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    untie: bool = False,
    keep_outputs: bool = False,
    optimizer: Optimizer | str | None = None,
    budget: str | float | None = None,
    extra_time: str | float | None = None,
    pareto: bool = False,
    order: str = Order.FREE.value,
    device: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    external_data: bool = False,
    dry_run: bool = False,
    check: bool = True,
    seed: int = 0,
    time_limit: float | None = None,
    step_limit: int | None = None,
    plan: Any = None,
    values: Mapping[str, Array] | None = None,
    progress: Progress | None = None,
) -> OptimizeResult:
    """Plan a forward model and emit a training graph that needs less memory than the baseline.

    Args:
        source: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        output: path of the training file; None writes no file.
        solver: name of a solver; None for the default of the objective.
        objective: `peak`, `activations` (the peak without parameter gradients) or `paper`.
        checkpoints: tensors to keep, which selects the solver `manual`.
        loss: `auto`, `cross-entropy`, `mse`, `bce`, `l1`, or the name of a scalar output.
        input_shapes: shapes by input, in place of the file's.
        trainable: globs of weights that train.
        freeze: globs of weights that do not train.
        freeze_bn: keep the running statistics of BatchNormalization.
        untie: give each node its own copy of a parameter that several nodes use in the same role.
        keep_outputs: return the model's own outputs as well.
        optimizer: `sgd`, `adamw`, or one with its settings: the graph contains the updates.
        budget: bytes, a share of the baseline's peak, or text such as 8GiB, 60% or min. The plan has the
            least extra time found within the budget.
        extra_time: a share of the baseline's time. The plan has the lowest peak found within it.
        pareto: add the trade-off between extra time and peak to the report.
        order: `free` or `fixed`, the order of operators with a budget.
        device: name of a device whose data sheet gives durations.
        calibrate: file of durations measured on this machine; it is written if it does not exist.
        external_data: write weights to a file next to the training file.
        dry_run: do not write the training file.
        check: run the forward model once before planning.
        seed: random seed of the search.
        time_limit: seconds for the search.
        step_limit: rounds of the search with a budget; then the result depends on the seed only.
        plan: a given plan in any form that `onnxgc.emission.plan_files.plan_of` reads; no search.
        values: weights by name, in place of the model's.
        progress: callback that receives the name of each stage.

    Raises:
        OnnxgcError: one line that states what is wrong, where, and what to do.
    """
    given = source_of(source)
    notify = progress or (lambda stage: None)
    how = PlanOptions.of(
        plan=plan,
        solver=solver,
        objective=objective,
        checkpoints=checkpoints,
        budget=budget,
        extra_time=extra_time,
        pareto=pareto,
        order=order,
        device=device,
        calibrate=calibrate,
        time_limit=time_limit,
        step_limit=step_limit,
        seed=seed,
        progress=notify,
    )
    read = ReadOptions(
        loss,
        tuple(trainable),
        tuple(freeze),
        keep_outputs,
        freeze_bn,
        untie,
        optimizer_of(optimizer),
    )
    target = OutputOptions.of(output, external_data=external_data, dry_run=dry_run)
    return _run(given, read, how, target, input_shapes, dict(values or {}), check=check, progress=notify)


def _run(
    source: str | os.PathLike[str] | onnx.ModelProto,
    read: ReadOptions,
    how: PlanOptions,
    target: OutputOptions,
    input_shapes: Mapping[str, tuple[int, ...]] | None,
    values: Mapping[str, Array],
    *,
    check: bool,
    progress: Progress,
) -> OptimizeResult:
    started = time.perf_counter()
    target.check(source)
    progress("reading")
    model = read_with_options(source, read, input_shapes)
    _check_values(model, values)
    target.check_weights(model)
    read_end = time.perf_counter()
    if check:
        progress("trying the model")
        model = _with_note(model, trial_run(source, model, input_shapes))
    name = source.graph.name if isinstance(source, onnx.ModelProto) else os.fspath(source)
    if how.made_for and os.path.basename(how.made_for) != os.path.basename(name):
        model = _with_note(model, f"the plan was made for '{how.made_for}'")
    progress("planning")
    planned = _plan(model, read, how)
    plan_end = time.perf_counter()
    graph = None
    if target.path is not None:
        progress("writing")
        graph = emit(planned, values=values, options=read)
        target.write(graph.model)
    end = time.perf_counter()
    seconds = {
        "read": read_end - started,
        "solve": planned.solution.seconds,
        "emit": end - plan_end,
        "total": end - started,
    }
    report = optimize_report(planned, name, target.path, seconds)
    return OptimizeResult(planned.solution.plan, report, planned, read, values, graph)


def _plan(model: TrainableModel, read: ReadOptions, how: PlanOptions) -> PlannedStep:
    outputs, optimizer = read.keep_outputs, read.optimizer
    if how.given is not None:
        return step_with_plan(model, how.given, keep_outputs=outputs, optimizer=optimizer)
    if how.request.is_requested:
        return plan_within(model, how.request, how.search, keep_outputs=outputs, optimizer=optimizer)
    return plan_step(model, how.solver, how.search, keep_outputs=outputs, optimizer=optimizer)


def _with_note(model: TrainableModel, note: str) -> TrainableModel:
    return replace(model, notes=(*model.notes, note)) if note else model


def _check_values(model: TrainableModel, values: Mapping[str, Array]) -> None:
    for name, value in values.items():
        if name not in model.weights:
            raise ModelFileError(
                f"a value is given for '{name}', which is not a weight of the model; leave it out"
            )
        wanted, found = model.weights[name].type, type_of_array(np.asarray(value))
        if wanted != found:
            raise ModelFileError(
                f"the value of '{name}' is {dtype_name(found.dtype)} {list(found.shape)}, but the model has "
                f"{dtype_name(wanted.dtype)} {list(wanted.shape)}; give a value of the model's type and shape"
            )
