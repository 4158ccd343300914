"""The pipeline on one page: read, trace, solve, schedule, judge, emit."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from onnxgc.api.budgeting import (
    BudgetRequest,
    FrontierPoint,
    answer_to,
)
from onnxgc.api.optimizer_peaks import with_runtime_peaks
from onnxgc.api.trial_run import trial_run
from onnxgc.emission.plan_files import METADATA_KEY, model_of, plan_as_json, plan_of
from onnxgc.emission.training import TrainingGraph, emit_training_graph
from onnxgc.emission.write import check_model_writable, data_file, write_model
from onnxgc.errors import BudgetError, ModelFileError, OutputFileError, PlanError
from onnxgc.gradients.engine import fresh_name
from onnxgc.model.core.ir import Array, TrainableModel, dtype_name
from onnxgc.model.core.stored_weights import external_file
from onnxgc.model.files.load import load_proto, source_of
from onnxgc.model.read import read_model
from onnxgc.planning.objective import PaperObjective, paper_objective
from onnxgc.planning.order import Order
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, TimeCost, parse_objective
from onnxgc.planning.schedule import Schedule, build_schedule, with_late_replacements
from onnxgc.planning.simulate import MemoryProfile, simulate
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import solver_for
from onnxgc.tracing.gradient_types import type_of_array
from onnxgc.tracing.optimizers import (
    Optimizer,
    optimizer_as_json,
    optimizer_from_json,
    optimizer_of,
)
from onnxgc.tracing.solver_graph import TracedProblem, checkpoint_problem
from onnxgc.tracing.step_graph import TrainingStep, trace

LOSS_SCALE = "loss_scale"
# What a user asked for by name is done, whatever it costs.
_TAKEN_AS_THEY_ARE = ("manual", "store-all")
_INTERRUPTED = "the search was interrupted; this is the best plan until then"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a model was read and its step made; a training file carries it, so that both can be done again."""

    loss: str = "auto"
    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    keep_outputs: bool = False
    freeze_bn: bool = False
    untie: bool = False
    optimizer: Optimizer | None = None

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "optimizer": optimizer_as_json(self.optimizer)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReadOptions:
        """The options that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: the text is something else.
        """
        found = json.loads(text)
        trainable, freeze = (tuple(map(str, found[key])) for key in ("trainable", "freeze"))
        # Files of earlier versions do not state these.
        later = {key: bool(found.get(key, False)) for key in ("freeze_bn", "untie")}
        optimizer = optimizer_from_json(found.get("optimizer"))
        loss, keep_outputs = str(found["loss"]), bool(found["keep_outputs"])
        return cls(loss, trainable, freeze, keep_outputs, **later, optimizer=optimizer)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A model's training step under a plan: the decision, the schedule, and the judge's view of it.

    `step` and `regular_step` differ only where the plan asks for another order of forward. With a budget,
    `request` is what was asked for, `timing` names what times are taken from, `frontier` is the trade-off,
    where it was asked for, and `order_alone_peak_bytes` the lowest peak without recomputation.
    """

    model: TrainableModel
    step: TrainingStep
    traced: TracedProblem
    solution: Solution
    schedule: Schedule
    profile: MemoryProfile
    regular_schedule: Schedule
    regular_profile: MemoryProfile
    notes: tuple[str, ...] = ()
    request: BudgetRequest = field(default_factory=BudgetRequest)
    budget_bytes: int | None = None
    timing: str = ""
    frontier: tuple[FrontierPoint, ...] = ()
    order_alone_peak_bytes: int | None = None

    @property
    def raises_the_peak(self) -> bool:
        return self.profile.peak_bytes > self.regular_profile.peak_bytes

    @property
    def state_bytes(self) -> int:
        """What an optimizer keeps from step to step."""
        return 0 if self.step.updates is None else self.step.updates.state_bytes

    @property
    def objective(self) -> PaperObjective:
        return paper_objective(self.traced.problem, self.solution.plan)

    @property
    def extra_flops_ratio(self) -> float:
        """Recomputed floating-point operations, as a share of the regular step's."""
        graph = self.step.graph
        regular = sum(operator.flops for operator in graph.forward)
        regular += sum(operator.flops for chunk in graph.chunks for operator in chunk)
        return self.schedule.extra_flops / regular if regular else 0.0


@dataclass(frozen=True)
class OptimizeResult:
    """What `optimize` returns: the plan, the figures as `--json` has them, and the emitted graph.

    The graph is put together when it is first asked for, since that reads the weights.
    """

    plan: CheckpointPlan
    report: Mapping[str, Any]
    planned: PlannedStep
    options: ReadOptions
    values: Mapping[str, Array]

    @cached_property
    def training_graph(self) -> TrainingGraph:
        return emit(self.planned, values=self.values, options=self.options)


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
    """A forward model as a training graph that runs in less memory.

    `source` is a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`. `output`
    is where the training file goes (nowhere if None or with `dry_run`). `checkpoints` are tensors to
    keep; naming any chooses the solver `manual`.
    `budget` is bytes, a share of the regular peak, or text such as 8GiB, 60% or min: the plan is then the
    one of least extra time within it. `extra_time` is a share of the time of every operator once: the
    plan is then the one of least peak that takes no more beyond it. `pareto` adds the whole trade-off to
    the report. Times are those of `device` (a card by name), or measured on this machine and kept in
    the file `calibrate`; `order` (free or fixed) says whether operators may first run in another order
    than the model's. `step_limit` ends that search after so many rounds, so that a seed alone decides.
    `optimizer` (sgd, adamw, or one with its settings) puts the parameters' updates into the graph.
    `plan` is one that was made before, in any form that `onnxgc.emission.plan_files.plan_of` reads, in the
    place of a search.
    `input_shapes` maps an input to its shape. `freeze_bn` and `untie` are those of `read_model`. With
    `check` the forward model is run once before anything is planned. `values` replaces weights by name.

    Raises:
        OnnxgcError: one line that says what is wrong, where and what to do.
    """
    source = source_of(source)
    tell = progress or (lambda stage: None)
    given = None if plan is None else plan_of(plan)
    if given is not None and (solver, objective, budget, extra_time, pareto, *checkpoints) != (
        *[None] * 4,
        False,
    ):
        raise PlanError(
            "a plan says what to do: leave out solver, objective, checkpoints, budget, extra time and pareto"
        )
    if given is not None and time_limit is not None:
        raise PlanError("a plan takes the place of a search: leave out --time-limit (time_limit)")
    wanted = parse_objective(objective)
    chosen = optimizer_of(optimizer)
    request = BudgetRequest.of(
        budget,
        extra_time=extra_time,
        pareto=pareto,
        order=order,
        device=device,
        calibrate=calibrate,
        solver="manual" if checkpoints else solver,
        objective=wanted,
    )
    of_budgets = {
        "order": None if request.order is Order.FREE else order,
        "device": device,
        "calibrate": calibrate,
        "step_limit": step_limit,
    }
    for key, value in of_budgets.items():
        if value is not None and not request.is_asked:
            raise PlanError(f"{key} goes with a budget, extra_time or pareto; give one, or leave it out")
    started = time.perf_counter()
    target = None if dry_run or output is None else os.fspath(output)
    if target is not None:
        check_model_writable(target)
        _check_apart(target, source if isinstance(source, str | os.PathLike) else None)
    tell("reading")
    read_options = ReadOptions(loss, tuple(trainable), tuple(freeze), keep_outputs, freeze_bn, untie, chosen)
    model = read_again(source, read_options, input_shapes)
    _check_values(model, values or {})
    if target is not None:
        for weight in model.weights.values():
            _check_apart(target, external_file(weight))
    read_seconds = time.perf_counter() - started
    if check:
        tell("trying the model")
        note = trial_run(source, model, input_shapes)
        model = replace(model, notes=(*model.notes, *filter(None, [note])))
    made_for = model_of(plan)
    name = source.graph.name if isinstance(source, onnx.ModelProto) else os.fspath(source)
    if made_for and os.path.basename(made_for) != os.path.basename(name):
        model = replace(model, notes=(*model.notes, f"the plan was made for '{made_for}'"))
    tell("planning")
    options = SolverOptions(
        tuple(checkpoints), wanted, time_limit, seed, most_rounds=step_limit, order=request.order, tell=tell
    )
    added: dict[str, Any] = {"keep_outputs": keep_outputs, "optimizer": chosen}
    if given is not None:
        planned = plan_step_again(model, given, **added)
    elif request.is_asked:
        planned = plan_within(model, request, options, **added)
    else:
        planned = plan_step(model, "manual" if checkpoints else solver, options, **added)
    planned_seconds = time.perf_counter() - started
    figures: dict[str, Any] = {}
    result = OptimizeResult(planned.solution.plan, figures, planned, read_options, dict(values or {}))
    if target is not None:
        tell("writing")
        write_model(result.training_graph.model, target, external_data=external_data)
    total = time.perf_counter() - started
    seconds = {
        "read": read_seconds,
        "solve": planned.solution.seconds,
        "emit": total - planned_seconds,
        "total": total,
    }
    figures.update(report(planned, name, target, seconds))
    return result


def read_again(
    source: str | os.PathLike[str] | onnx.ModelProto,
    options: ReadOptions,
    input_shapes: Mapping[str, tuple[int, ...]] | None,
) -> TrainableModel:
    """The model as these options read it."""
    model = read_model(
        source,
        input_shapes=input_shapes,
        loss=options.loss,
        trainable=options.trainable,
        freeze=options.freeze,
        freeze_bn=options.freeze_bn,
        untie=options.untie,
        # Who trains by an optimizer in the graph resumes runs, and must then draw what would have been drawn.
        counted_draws=options.optimizer is not None,
    )
    if not options.keep_outputs:
        return model
    graph = load_proto(source)[0].graph
    fed = {value.name for value in (*graph.input, *graph.initializer)}
    left_out = [repr(value.name) for value in graph.output if value.name in fed]
    note = f"--keep-outputs leaves out {', '.join(left_out)}: the step is fed what it would return"
    return replace(model, notes=(*model.notes, note)) if left_out else model


def _check_apart(output: str, source: str | os.PathLike[str] | None) -> None:
    """Refuse to write where the model itself, or its weights, are read from."""
    if source is None or not os.path.exists(source):
        return
    for written in (output, data_file(output)):
        if os.path.exists(written) and os.path.samefile(written, source):
            raise OutputFileError(
                f"'{written}' belongs to the model that is read; give the training file another name"
            )


def _check_values(model: TrainableModel, values: Mapping[str, Array]) -> None:
    for name, value in values.items():
        if name not in model.weights:
            raise ModelFileError(
                f"a value is given for '{name}', which is no weight of the model; leave it out"
            )
        wanted, found = model.weights[name].type, type_of_array(np.asarray(value))
        if wanted != found:
            raise ModelFileError(
                f"the value given for '{name}' is {dtype_name(found.dtype)} {list(found.shape)}, "
                f"the model has {dtype_name(wanted.dtype)} {list(wanted.shape)}; give it as the model has it"
            )


def plan_step(
    model: TrainableModel,
    solver: str | None = None,
    options: SolverOptions | None = None,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> PlannedStep:
    """Trace a model, solve for its checkpoints, and schedule and judge the result.

    Without a name it is the solver for the objective of the options.

    Raises:
        PlanError: unknown solver or checkpoint, or a solver that has not the objective.
    """
    options = options or SolverOptions()
    chosen = solver_for(solver, options.objective)
    traced = trace_problem(model, keep_outputs, optimizer)
    named = tuple(traced.vertex(str(name)) for name in options.checkpoints)
    solution = chosen.solve(traced.problem, replace(options, checkpoints=named))
    planned = judged(model, traced, solution)
    if (
        chosen.name not in _TAKEN_AS_THEY_ARE
        and Objective.PEAK not in chosen.objectives
        and planned.raises_the_peak
    ):
        # The paper's objective does not see everything that the judge sees.
        stored = judged(model, traced, solver_for("store-all").solve(traced.problem, options))
        note = (
            f"the plan of '{chosen.name}' would raise the peak, so everything is stored: "
            f"{planned.profile.peak_bytes} bytes against {planned.regular_profile.peak_bytes}"
        )
        return replace(stored, notes=(*stored.notes, note))
    return planned


def plan_within(
    model: TrainableModel,
    request: BudgetRequest,
    options: SolverOptions,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> PlannedStep:
    """Trace a model, and schedule and judge the plan of least extra time within a budget.

    Raises:
        BudgetError: no plan fits.
        DurationError: there is no such device, or the calibration file is not one.
    """
    return plan_traced_within(model, trace_problem(model, keep_outputs, optimizer), request, options)


def plan_traced_within(
    model: TrainableModel, traced: TracedProblem, request: BudgetRequest, options: SolverOptions
) -> PlannedStep:
    """The same for a model that is traced already."""
    durations, timing, note = request.durations(traced.step)
    updates = traced.step.updates
    if updates is not None and request.budget is not None:
        request = replace(request, budget=replace(request.budget, held_bytes=updates.state_bytes))
    answer = answer_to(request, traced.problem, durations, options)
    if updates is not None:

        def run(solution: Solution) -> tuple[Schedule, int]:
            planned = judged(model, traced, solution)
            return planned.schedule, planned.profile.peak_bytes

        answer = with_runtime_peaks(answer, request, traced.problem, durations, options, run)
    solution = answer.solution
    planned = judged(model, traced, solution)
    budget, regular = request.budget, planned.regular_profile.peak_bytes
    limit = None if budget is None or budget.is_least else budget.bytes_of(regular)
    if limit is not None and planned.profile.peak_bytes > limit:
        assert updates is not None, "a plan within a budget keeps to it"
        raise BudgetError(
            f"no plan was found within {limit:,} bytes beside the optimizer's state: updates that wait for "
            f"the last reader of a parameter take it to {planned.profile.peak_bytes:,}; give more memory"
        )
    return replace(
        planned,
        notes=(*planned.notes, *filter(None, [note, _INTERRUPTED if solution.interrupted else ""])),
        request=request,
        budget_bytes=limit,
        timing=timing,
        frontier=answer.frontier,
        order_alone_peak_bytes=answer.order_alone_peak_bytes,
    )


def plan_step_again(
    model: TrainableModel,
    plan: CheckpointPlan,
    *,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> PlannedStep:
    """Trace a model, and schedule and judge a plan that was made for it.

    Raises:
        PlanError: the plan names what is no tensor of the model.
    """
    try:
        return plan_traced_again(model, trace_problem(model, keep_outputs, optimizer), plan)
    except PlanError as error:
        if optimizer is None and any("/update/" in name for name in plan.sequence):
            raise PlanError("the plan was made with an optimizer; give the same one (--optimizer)") from error
        raise PlanError(
            f"{error}; `onnxgc compare` carries it over to another file of the same network "
            "(--plan, --carry-over)"
        ) from error


def plan_traced_again(
    model: TrainableModel, traced: TracedProblem, plan: CheckpointPlan, like: PlannedStep | None = None
) -> PlannedStep:
    """The same for a model that is traced already; `like` as in `judged`."""
    try:
        return _traced_again(model, traced, plan, like)
    except PlanError as error:
        raise PlanError(
            f"{error}; a plan is for the model and the shapes that it was made with (--input-shapes)"
        ) from error


def _traced_again(
    model: TrainableModel, traced: TracedProblem, plan: CheckpointPlan, like: PlannedStep | None
) -> PlannedStep:
    if plan.sequence:
        kept = traced.problem.graph.in_order(plan.checkpoints)
        known = CheckpointPlan(kept, keeps_last_segment=False, sequence=plan.sequence)
    else:
        known = CheckpointPlan.for_graph(traced.problem.graph, plan.checkpoints)
    if plan.order and set(plan.order) != set(traced.problem.graph.vertices):
        raise PlanError("the plan's order does not have the model's tensors; make the plan for this model")
    options = SolverOptions(known.checkpoints, Objective.PEAK)
    solution = solver_for("manual").solve(traced.problem, options)
    planned = judged(model, traced, replace(solution, plan=plan), like)
    # The solver knows of the checkpoints alone.
    found = replace(planned.solution, solver="plan", objective_bytes=planned.profile.peak_bytes)
    return replace(planned, solution=found)


def trace_problem(
    model: TrainableModel, keep_outputs: bool = False, optimizer: Optimizer | None = None
) -> TracedProblem:
    """What a solver sees of a model's training step."""
    seed = fresh_name(LOSS_SCALE, set(model.types))
    return checkpoint_problem(trace(model, seed=seed, keep_outputs=keep_outputs, optimizer=optimizer))


def judged(
    model: TrainableModel, traced: TracedProblem, solution: Solution, like: PlannedStep | None = None
) -> PlannedStep:
    """A solution with its schedule and what the judge says of it, beside the step that stores everything.

    `like` is another plan of the same traced step, whose view of storing everything is taken over.
    """
    joint = traced.problem.joint()
    names = _copy_namer(traced.step)
    graph, schedule = joint.scheduled(solution.plan, names)
    step = traced.step_in_order(tuple(operator.name for operator in graph.forward))
    schedule = with_late_replacements(schedule, graph)
    profile = simulate(schedule, graph)
    if like is not None:
        regular_schedule, regular_profile = like.regular_schedule, like.regular_profile
    else:
        regular_schedule = build_schedule(joint.step, frozenset(), names)
        regular_profile = simulate(regular_schedule, joint.step)
    return PlannedStep(model, step, traced, solution, schedule, profile, regular_schedule, regular_profile)


def store_all_schedule(planned: PlannedStep) -> Schedule:
    """The schedule that stores everything, in the plan's order: what a plan is checked against."""
    return build_schedule(planned.step.graph, frozenset(), _copy_namer(planned.step))


def emit(
    planned: PlannedStep,
    *,
    schedule: Schedule | None = None,
    values: Mapping[str, Array] | None = None,
    options: ReadOptions | None = None,
) -> TrainingGraph:
    """The training graph of a planned step, or of another schedule of the same step."""
    chosen = schedule or planned.schedule
    peak = simulate(chosen, planned.step.graph).peak_bytes
    solution = planned.solution
    metadata = {
        METADATA_KEY: json.dumps(plan_as_json(solution.plan, solution.solver)),
        "onnxgc.simulated_peak_bytes": str(peak),
        "onnxgc.loss": planned.model.loss_kind,
        "onnxgc.options": (options or ReadOptions()).to_json(),
    }
    return emit_training_graph(planned.step, chosen, metadata=metadata, values=values)


def report(
    planned: PlannedStep, name: str, output: str | None, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of one optimisation, as `--json` prints them; bytes and seconds are numbers.

    An optimizer's state is part of every peak, and of bounds on it.
    """
    held = planned.state_bytes
    problem, solution, objective = planned.traced.problem, planned.solution, planned.objective
    types, model = planned.step.types, planned.model
    return {
        "model": name,
        "output": output,
        "objective": solution.objective.value,
        "solver": solution.solver,
        "status": solution.status.value,
        "loss": model.loss_kind,
        "vertices": len(problem.graph.vertices),
        "operators": len({node.origin for node in model.nodes}),
        "parameters": {
            "count": len(planned.step.parameter_gradients),
            "bytes": sum(types[parameter].size_bytes for parameter in planned.step.parameter_gradients),
        },
        "regular": {
            "activation_bytes": problem.total_bytes,
            "simulated_peak_bytes": planned.regular_profile.peak_bytes + held,
            "simulated_activation_peak_bytes": planned.regular_profile.activation_peak_bytes,
        },
        "planned": {
            "checkpoint_bytes": objective.checkpoint_bytes,
            "heaviest_segment_bytes": objective.heaviest_segment_bytes,
            "paper_objective_bytes": objective.total_bytes,
            "simulated_peak_bytes": planned.profile.peak_bytes + held,
            "simulated_activation_peak_bytes": planned.profile.activation_peak_bytes,
            "peak_step": planned.profile.peak_step,
            "extra_flops_ratio": planned.extra_flops_ratio,
        },
        **_report_on_optimizer(planned),
        **_report_on_time(planned),
        **_bound(planned),
        "checkpoints": list(solution.plan.checkpoints),
        "notes": [*model.notes, *_notes_on_types(model), *planned.notes, *_notes_on_saving(planned)],
        "seconds": dict(seconds),
    }


def _bound(planned: PlannedStep) -> dict[str, Any]:
    solution = planned.solution
    bound, gap = solution.lower_bound_bytes, solution.gap
    if solution.objective in (Objective.PEAK, Objective.TIME):
        bound += planned.state_bytes
    if solution.objective is Objective.PEAK and planned.state_bytes:
        peak = solution.objective_bytes + planned.state_bytes
        gap = max(0, peak - bound) / peak
    return {"lower_bound_bytes": bound, "bound_operator": solution.bound_operator, "gap": gap}


def _report_on_optimizer(planned: PlannedStep) -> dict[str, Any]:
    updates = planned.step.updates
    if updates is None:
        return {}
    return {"optimizer": {"name": updates.optimizer.name, "state_bytes": updates.state_bytes}}


def _report_on_time(planned: PlannedStep) -> dict[str, Any]:
    """What a budget adds to the report; ratios are shares of the time without recomputation."""
    cost = planned.solution.time
    if cost is None:
        return {}
    held = planned.state_bytes
    budget = planned.request.budget
    allowed = None if budget is None else budget.most_extra
    return {
        "budget": {
            "bytes": None if planned.budget_bytes is None else planned.budget_bytes + held,
            "most_extra_time_ratio": None if allowed is None else float(allowed),
            "timing": planned.timing,
            "order": planned.request.order.value,
            "order_alone_peak_bytes": None
            if planned.order_alone_peak_bytes is None
            else planned.order_alone_peak_bytes + held,
            "regular_seconds": cost.regular / 1e9,
            **_ratios(cost),
        },
        "frontier": [
            {
                "budget_bytes": point.budget_bytes + held,
                "simulated_peak_bytes": point.solution.objective_bytes + held,
                "status": point.solution.status.value,
                **_ratios(point.solution.time),
            }
            for point in planned.frontier
            if point.solution.time is not None
        ],
    }


def _ratios(cost: TimeCost) -> dict[str, float]:
    return {
        "extra_time_ratio": cost.extra_ratio,
        "lower_bound_ratio": cost.lower_bound_ratio,
        "gap": cost.gap,
        "gap_of_extra": cost.gap_of_extra,
    }


def _notes_on_types(model: TrainableModel) -> list[str]:
    other = {model.types[name].dtype for name in model.parameters} - {onnx.TensorProto.FLOAT}
    if not other:
        return []
    names = ", ".join(sorted(dtype_name(dtype) for dtype in other))
    return [f"parameters are {names}; not every runtime has all kernels for other types than float32"]


def _notes_on_saving(planned: PlannedStep) -> list[str]:
    """What to know where checkpoints do not lower the peak."""
    if planned.profile.peak_bytes < planned.regular_profile.peak_bytes or not planned.schedule.recomputed:
        return []
    return [
        f"recomputation does not lower the peak here: it is set by '{planned.profile.peak_step}', "
        "whose working set no checkpoint changes; --solver store-all saves the extra time"
    ]


def _copy_namer(step: TrainingStep) -> Callable[[str], str]:
    taken = set(step.types) | set(step.constants)
    copies: Counter[str] = Counter()

    def name_of_copy(name: str) -> str:
        copies[name] += 1
        suffix = "__recompute" if copies[name] == 1 else f"__recompute{copies[name]}"
        return fresh_name(f"{name}{suffix}", taken)

    return name_of_copy
