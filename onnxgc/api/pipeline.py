"""The pipeline on one page: read, try, plan, emit, report."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.api.evaluation_model import evaluation_graph, evaluation_model
from onnxgc.api.optimize_report import optimize_report
from onnxgc.api.plan_options import PlanOptions, Progress
from onnxgc.api.planned_step import PlannedStep, emit, trace_problem
from onnxgc.api.pool_forms import INDICES, pools_of, with_least_pools
from onnxgc.api.read_options import LossModel, ReadOptions, name_of, read_with_options
from onnxgc.api.step_planning import plan_quickly, plan_step, plan_within, step_with_plan
from onnxgc.api.trial_run import trial_run, type_text
from onnxgc.api.written_files import Target
from onnxgc.budget.search import ignore_progress
from onnxgc.emission.atomic_files import MAX_SINGLE_FILE_BYTES
from onnxgc.emission.training_graph import TrainingGraph
from onnxgc.errors import ModelFileError, OutputFileError
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.core.stored_weights import external_file
from onnxgc.model.files.load import source_of
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.report.html.notebook_curve import curve_html
from onnxgc.report.text.units import megabytes
from onnxgc.solvers.base import PlanSearch
from onnxgc.tracing.gradient_types import type_of_array
from onnxgc.tracing.optimizers import Optimizer


@dataclass(frozen=True, repr=False)
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

    def memory_curve(self, baseline: bool = False) -> npt.NDArray[np.int64]:
        """Live bytes at each run of an operator, an optimizer's state included: [runs]."""
        profile = self.planned.regular_profile if baseline else self.planned.profile
        return np.array(profile.timeline, np.int64) + self.planned.state_bytes

    def __repr__(self) -> str:
        peak, baseline = (megabytes(int(self.memory_curve(one).max())) for one in (False, True))
        recomputed = f"{100 * self.planned.extra_flops_ratio:.1f} % extra operations"
        return f"<OptimizeResult of {self.report['model']}: peak {peak} (baseline {baseline}), {recomputed}>"

    def _repr_html_(self) -> str:
        return curve_html(repr(self), self.memory_curve(), self.memory_curve(baseline=True))


def optimize(
    source: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    solver: str | PlanSearch | None = None,
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
    device_memory: str | float | None = None,
    pareto: bool = False,
    order: str | None = None,
    device: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    external_data: bool = False,
    weights: str = "copy",
    dry_run: bool = False,
    check: bool = True,
    seed: int = 0,
    time_limit: float | None = None,
    step_limit: int | None = None,
    plan: Any = None,
    values: Mapping[str, Array] | None = None,
    progress: Progress | None = None,
    provider: str | None = None,
    barriers: str = "auto",
    state: str = "initializers",
    evaluation: str | os.PathLike[str] | None = None,
    loss_model: LossModel | None = None,
    pools: str | None = None,
    portable: bool = False,
) -> OptimizeResult:
    """Plan a forward model and emit a training graph that needs less memory than the baseline.

    Args:
        source: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        output: path of the training file; None writes no file.
        solver: name of a solver, or an object as `onnxgc.solvers.base.PlanSearch` describes it; None for the
            default of the objective.
        objective: `peak`, `activations` (the peak without parameter gradients) or `paper`.
        checkpoints: tensors to keep, which selects the solver `manual`.
        loss: `auto`, a kind with or without settings (`mse`, `cross-entropy(smoothing=0.1)`; `docs/models.md` lists
            them), or the name of a scalar output.
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
        device_memory: all memory of a device, such as 8GiB, or its name; the plan has the least extra time
            for which weights, states, inputs, the step and the runtime fit.
        pareto: add the trade-off between extra time and peak to the report.
        order: `free` or `fixed`, the order of operators; by default free with a budget, else fixed.
        device: name of a device whose data sheet gives durations; by default cpu, or a100 on CUDA.
        calibrate: file of durations measured on this machine; it is written if it does not exist.
        external_data: write weights to a file next to the training file, as is done beyond 2 GB in any case.
        weights: `copy`, or `reference` for weights that stay in the source's external data, which has to be in the
            training file's folder.
        dry_run: do not write the training file.
        check: run the forward model once before planning.
        seed: random seed of the search.
        time_limit: seconds for the search.
        step_limit: rounds of the search with a budget; then the result depends on the seed only.
        plan: a given plan in any form that `onnxgc.emission.plan_files.plan_of` reads; no search.
        values: weights by name, in place of the model's.
        progress: callback that receives the name of each stage.
        provider: `cpu` or `cuda`, whose forms gradients take; None for cuda where available.
        barriers: `auto`, or `none` for a file that only sessions of `make_session` run in its order.
        state: `initializers`, or `inputs` for parameters, statistics and states that must be fed; their first
            values and the file's contract are in a state file beside the training file (.safetensors).
        loss_model: a path or an `onnx.ModelProto` of a model whose only output, a scalar, is the loss. Inputs with
            the name of an output of `source` read it; the others are inputs of the step.
        pools: form of MaxPool's gradients: `indices` of forward, or `windows` that are compared in backward; None
            for the form in which the plan needs less memory.
        portable: avoid what other runtimes lack: indices, dimensions with names, unknown attributes.
        evaluation: path of an evaluation file: the model in evaluation mode with its loss, with parameters and
            statistics as inputs.

    Raises:
        OnnxgcError: one line that states what is wrong, where, and what to do.
    """
    notify = progress or ignore_progress
    request = BudgetRequest.from_options(
        budget, extra_time, pareto=pareto, order=order, device=device, calibrate=calibrate, device_memory=device_memory
    )
    how = PlanOptions.from_options(plan, solver, request, objective, checkpoints, time_limit, step_limit, seed, notify)
    read = ReadOptions.from_options(
        loss,
        trainable,
        freeze,
        freeze_bn,
        untie,
        optimizer,
        provider,
        keep_outputs=keep_outputs,
        barriers=barriers,
        state=state,
        loss_model=loss_model,
        pools=pools or INDICES,
        portable=portable,
    )
    if weights not in ("copy", "reference"):
        raise OutputFileError(f"'{weights}' is not a way to store weights; choose copy or reference")
    target = None
    if not dry_run and output is not None:
        evaluated = None if evaluation is None else os.fspath(evaluation)
        target = Target(os.fspath(output), external_data, read.stores_state, evaluated, references=weights != "copy")
    chooses = pools is None and not portable
    return planned_model(
        source, input_shapes, read, how, target, values=values or {}, check=check, chooses_pools=chooses
    )


def planned_model(
    given: Any,
    input_shapes: Mapping[str, tuple[int, ...]] | None,
    read: ReadOptions,
    how: PlanOptions,
    target: Target | None = None,
    *,
    values: Mapping[str, Array] = MappingProxyType({}),
    check: bool,
    chooses_pools: bool = False,
) -> OptimizeResult:
    """As `optimize`, with checked options; with `chooses_pools` the plan takes the form that needs less memory."""
    started = time.perf_counter()
    source, notify = source_of(given), how.search.progress
    if target is not None:
        target.check_writable()
        target.check_apart(None if isinstance(source, onnx.ModelProto) else source)
    notify("reading")
    model = read_with_options(source, read, input_shapes)
    _check_values(model, values)
    if target is not None:
        target.check_apart(*map(external_file, model.weights.values()))
    read_end = time.perf_counter()
    if check:
        notify("trying the model")
        model = _with_note(model, trial_run(source, model, input_shapes))
    name = name_of(source)
    if how.made_for and os.path.basename(how.made_for) != os.path.basename(name):
        model = _with_note(model, f"the plan was made for '{how.made_for}'")
    notify("planning")
    planned = _plan(model, read, how)
    if chooses_pools:
        planned = with_least_pools(planned)
        read = replace(read, pools=pools_of(planned.model))
    plan_end = time.perf_counter()
    graph, streams = None, False
    if target is not None:
        notify("writing")
        weights = planned.model.weights
        streams = target.references or target.external_data
        streams = streams or sum(weight.type.size_bytes for weight in weights.values()) > MAX_SINGLE_FILE_BYTES
        graph = emit(planned, values=values, options=read, streams=streams)
        evaluated = None if target.evaluation is None else _evaluation_file(source, read, planned, values)
        target.write(graph, evaluated, weights)
    end = time.perf_counter()
    seconds = {
        "read": read_end - started,
        "solve": planned.solution.seconds,
        "emit": end - plan_end,
        "total": end - started,
    }
    report = optimize_report(planned, name, None if target is None else target.path, seconds)
    if target is not None:
        report["more_files"] = [path for path in (target.state, target.evaluation) if path is not None]
    return OptimizeResult(planned.solution.plan, report, planned, read, values, None if streams else graph)


def _evaluation_file(
    source: str | os.PathLike[str] | onnx.ModelProto,
    read: ReadOptions,
    planned: PlannedStep,
    values: Mapping[str, Array],
) -> onnx.ModelProto:
    """The model in evaluation mode, for the shapes of the planned step."""
    model, types = planned.model, planned.step.types
    evaluated = evaluation_model(source, read, {name: types[name].shape for name in model.inputs})
    weights = (*planned.step.parameter_gradients, *(statistic.name for statistic in model.statistics))
    return evaluation_graph(evaluated, weights, values, stores_state=read.stores_state)[0]


def _plan(model: TrainableModel, read: ReadOptions, how: PlanOptions) -> PlannedStep:
    outputs, optimizer = read.keep_outputs, read.optimizer
    if how.given is not None:
        return step_with_plan(model, how.given, keep_outputs=outputs, optimizer=optimizer)
    if how.request.is_quick:
        return plan_quickly(model, trace_problem(model, outputs, optimizer), how.request, how.search)
    if how.request.is_requested:
        return plan_within(model, trace_problem(model, outputs, optimizer), how.request, how.search)
    return plan_step(model, how.solver, how.search, keep_outputs=outputs, optimizer=optimizer)


def _with_note(model: TrainableModel, note: str) -> TrainableModel:
    return replace(model, notes=(*model.notes, note)) if note else model


def _check_values(model: TrainableModel, values: Mapping[str, Array]) -> None:
    for name, value in values.items():
        if name not in model.weights:
            raise ModelFileError(f"a value is given for '{name}', which is not a weight of the model; leave it out")
        wanted, given = model.weights[name].type, type_of_array(np.asarray(value))
        if wanted != given:
            raise ModelFileError(
                f"the value of '{name}' is {type_text(given)}, but the model has {type_text(wanted)}; give a "
                "value of the model's type and shape"
            )
