"""A training step under a plan: its schedule and simulated memory, and the graph emitted from it."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from onnxgc.api.budget_plans import BudgetRequest, FrontierPoint
from onnxgc.api.read_options import ReadOptions
from onnxgc.emission.plan_files import METADATA_KEY, plan_as_json
from onnxgc.emission.training_graph import TrainingGraph, emit_training_graph
from onnxgc.model.core.draft import fresh_name
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.planning.column_memory import free_bytes
from onnxgc.planning.objective import PaperObjective, paper_objective
from onnxgc.planning.plan import Solution
from onnxgc.planning.schedule import Schedule, build_schedule, copy_namer, with_late_replacements
from onnxgc.planning.sequence_transfer import transferred_sequence
from onnxgc.planning.simulate import MemoryProfile, simulate
from onnxgc.tracing.checkpoint_problem import TracedProblem, checkpoint_problem
from onnxgc.tracing.optimizers import Optimizer
from onnxgc.tracing.step_graph import TrainingStep, trace

LOSS_SCALE = "loss_scale"


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A model's training step under a plan, with schedules and simulated memory of plan and baseline.

    `step` has the plan's order of forward, the baseline (`regular_*`) has the model's. With a budget,
    `request` is the user's request, `timing` the source of durations, `frontier` the trade-off if requested,
    and `order_alone_peak_bytes` the lowest peak by reordering only.
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
        """Bytes of an optimizer's state."""
        return 0 if self.step.updates is None else self.step.updates.state_bytes

    @property
    def objective(self) -> PaperObjective:
        return paper_objective(self.traced.problem, self.solution.plan)

    @property
    def extra_flops_ratio(self) -> float:
        """Recomputed floating-point operations, as a share of the baseline's."""
        graph = self.step.graph
        baseline = sum(operator.flops for operator in chain(graph.forward, *graph.chunks))
        return self.schedule.extra_flops / baseline if baseline else 0.0

    def modules_of(self, names: Iterable[str]) -> dict[str, str]:
        """The modules of these names, the checkpoints and the peak's operator; none for a name in two."""
        paths: dict[str, str] = {}
        for step, schedule in ((self.traced.step, self.regular_schedule), (self.step, self.schedule)):
            for run in schedule.runs:
                module = step.nodes[getattr(run, "source", run.operator.name)].module
                for name in (run.operator.name, *run.operator.outputs):
                    if paths.setdefault(name, module) != module:
                        paths[name] = ""
        wanted = (*names, self.profile.peak_operator, *map(str, self.solution.plan.checkpoints))
        return {name: paths[name] for name in wanted if paths.get(name)}

    def extra_time_ratio(self, durations: Mapping[str, int]) -> float:
        """The time of recomputed operators, as a share of the baseline's, by durations of operators."""
        extra = sum(durations[run.source] for run in self.schedule.recomputed)
        return extra / max(sum(durations.values()), 1)


def trace_problem(
    model: TrainableModel, keep_outputs: bool = False, optimizer: Optimizer | None = None
) -> TracedProblem:
    """The training step of a model as a problem for solvers."""
    seed = fresh_name(LOSS_SCALE, set(model.types))
    return checkpoint_problem(trace(model, seed=seed, keep_outputs=keep_outputs, optimizer=optimizer))


def schedule_solution(
    model: TrainableModel, traced: TracedProblem, solution: Solution, like: PlannedStep | None = None
) -> PlannedStep:
    """Schedule and simulate a solution, and the baseline.

    `like` is another plan of the same traced step; its baseline is used again. On CUDA gradients of weights
    get the memory that is free below the peaks.
    """
    planned = _scheduled(model, traced, solution, like)
    has_columns = any(node.op in ("Conv", "ConvTranspose") for node in model.nodes)
    if model.provider == "cpu" or not has_columns:
        return planned
    return _with_free_memory_used(planned)


_FREE_SHARES = (1.0, 0.75, 0.5)
"""Shares of the free memory that are tried, since other storages may end later than before."""


def _with_free_memory_used(planned: PlannedStep) -> PlannedStep:
    """The plan with fewer, larger weight gradients of convolutions, if the peaks stay as they are."""
    model, step, traced = planned.model, planned.step, planned.traced
    free = free_bytes(planned.schedule, step.graph, planned.profile)
    free_in_baseline = free_bytes(planned.regular_schedule, traced.step.graph, planned.regular_profile)
    for share in _FREE_SHARES:
        limits = {name: int(share * min(free[name], free_in_baseline.get(name, 0))) for name in free}
        changed = replace(model, column_bytes=limits)
        optimizer = None if step.updates is None else step.updates.optimizer
        wider = trace_problem(changed, step.keeps_outputs, optimizer)
        solution = planned.solution
        if solution.plan.sequence:
            sequence = transferred_sequence(solution.plan.sequence, wider.step.graph)
            if sequence is None:
                continue
            solution = replace(solution, plan=replace(solution.plan, sequence=sequence))
        # The plan stays that of the few columns, from which this step follows again.
        candidate = replace(_scheduled(changed, wider, solution, None), solution=planned.solution)
        if (
            candidate.profile.peak_bytes <= planned.profile.peak_bytes
            and candidate.regular_profile.peak_bytes <= planned.regular_profile.peak_bytes
        ):
            return candidate
    return planned


def _scheduled(
    model: TrainableModel, traced: TracedProblem, solution: Solution, like: PlannedStep | None
) -> PlannedStep:
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
    """The baseline's schedule in the plan's order; a plan is verified against it."""
    return build_schedule(planned.step.graph, frozenset(), _copy_namer(planned.step))


def emit(
    planned: PlannedStep,
    *,
    schedule: Schedule | None = None,
    values: Mapping[str, Array] | None = None,
    options: ReadOptions | None = None,
    streams: bool = False,
) -> TrainingGraph:
    """The training graph of a planned step, or of another schedule; with `streams`, without large weights."""
    chosen, options = schedule or planned.schedule, options or ReadOptions(provider=planned.model.provider)
    peak = simulate(chosen, planned.step.graph).peak_bytes
    solution = planned.solution
    metadata = {
        METADATA_KEY: json.dumps(plan_as_json(solution.plan, solution.solver)),
        "onnxgc.simulated_peak_bytes": str(peak),
        "onnxgc.loss": planned.model.loss_kind,
        "onnxgc.options": options.to_json(),
    }
    return emit_training_graph(
        planned.step,
        chosen,
        metadata=metadata,
        values=values,
        has_barriers=options.has_barriers,
        stores_state=options.stores_state,
        streams=streams,
    )


def _copy_namer(step: TrainingStep) -> Callable[[str], str]:
    taken = set(step.types) | set(step.constants)
    copy_name = copy_namer()
    return lambda name: fresh_name(copy_name(name), taken)
