"""Plans for one model by solvers, rules and files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.api.plan_options import Progress
from onnxgc.api.planned_step import PlannedStep, schedule_solution
from onnxgc.api.read_options import ReadOptions
from onnxgc.api.step_planning import plan_within, traced_step_with_plan
from onnxgc.errors import BudgetError, OnnxgcError, PlanError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import PlanSearch, Solver, SolverOptions, WrongFindingError
from onnxgc.solvers.registry import SOLVERS, solver_for
from onnxgc.tracing.checkpoint_problem import TracedProblem
from onnxgc.tracing.ort_layerwise import layerwise_checkpoints
from onnxgc.tracing.repeated_blocks import Blocks, repeated_blocks

PER_BLOCK, LAYER_WISE, TORCH_BUDGET = "per-block", "layer-wise", "torch-budget"
RULES = (PER_BLOCK, LAYER_WISE, TORCH_BUDGET)
"""Other practice: checkpoints by hand, ONNX Runtime's own recomputation, and PyTorch's memory budget."""
TORCH_SHARE = 0.5
"""PyTorch's memory budget, a share of the tensors that it saves by default."""
STORE_ALL = "store-all"
DEFAULT_LIMITS_SECONDS = {"peak": 60.0}
"""Default time limits by solver; the others end without one."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan with its name, its kind (solver, rule, plan or file) and a description."""

    name: str
    kind: str
    planned: PlannedStep
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OmittedCandidate:
    """The reason why a requested plan is missing."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Checked options of `compare`; worker processes receive them.

    `solvers` are names of rows; `objects` has those that users gave as objects.
    """

    solvers: tuple[str, ...]
    plans: Mapping[str, CheckpointPlan]
    request: BudgetRequest
    time_limit: float | None
    seed: int
    read: ReadOptions
    input_shapes: Mapping[str, tuple[int, ...]]
    objects: Mapping[str, Solver] = field(default_factory=dict)

    def search_options(self, solver: str, progress: Progress) -> SolverOptions:
        limit = DEFAULT_LIMITS_SECONDS.get(solver) if self.time_limit is None else self.time_limit
        return SolverOptions(time_limit_seconds=limit, seed=self.seed, order=self.request.order, progress=progress)


def solver_choices(given: Sequence[str | PlanSearch] | None) -> tuple[list[str] | None, dict[str, Solver]]:
    """Names of rows (None for all), and a user's solver objects by name.

    Raises:
        PlanError: an object is not a solver, or its name is taken.
    """
    if given is None:
        return None, {}
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PlanError(f"solvers is {given!r:.60}; give a list of names or solver objects")
    names: list[str] = []
    objects: dict[str, Solver] = {}
    for solver in given:
        found = solver if isinstance(solver, str) else solver_for(solver)
        if isinstance(found, str) or found.name in SOLVERS:
            names.append(found if isinstance(found, str) else found.name)
        elif found.name in RULES or found.name in objects:
            raise PlanError(f"two rows have the name '{found.name}'; give the solver object another name")
        else:
            objects[found.name] = found
    return names, objects


def plan_candidates(
    source: Any, model: TrainableModel, traced: TracedProblem, options: CompareOptions, notify: Progress
) -> Iterator[PlanCandidate | OmittedCandidate]:
    """Each requested plan, or the reason why it is missing."""
    stored = schedule_solution(
        model, traced, SOLVERS[STORE_ALL].solve(traced.problem, SolverOptions(objective=Objective.PEAK))
    )
    yield PlanCandidate(STORE_ALL, "solver", stored, SOLVERS[STORE_ALL].summary)
    for name in options.solvers:
        notify(f"planning: {name}")
        if name == "budget":
            yield _by_budget(model, traced, options.request, options.search_options(name, notify))
        elif name == PER_BLOCK:
            yield _by_blocks(model, traced, stored)
        elif name == LAYER_WISE:
            yield _by_layers(model, traced, stored)
        elif name == TORCH_BUDGET:
            yield _by_torch_budget(source, model, traced, options.read, stored)
        elif name != STORE_ALL:
            solver = options.objects.get(name) or SOLVERS[name]
            yield _by_solver(solver, model, traced, options.search_options(name, notify), stored)
    for name, plan in options.plans.items():
        notify(f"simulating: {name}")
        try:
            yield PlanCandidate(name, "plan", traced_step_with_plan(model, traced, plan, stored))
        except PlanError as error:
            raise PlanError(f"plan '{name}' does not fit this model: {error}") from error


def _by_solver(
    solver: Solver, model: TrainableModel, traced: TracedProblem, options: SolverOptions, stored: PlannedStep
) -> PlanCandidate | OmittedCandidate:
    solution = solution_or_reason(solver, traced.problem, options)
    if isinstance(solution, str):
        return OmittedCandidate(solver.name, solution)
    planned = schedule_solution(model, traced, solution, stored)
    return PlanCandidate(solver.name, "solver", planned, solver.summary)


def solution_or_reason(solver: Solver, problem: CheckpointProblem, options: SolverOptions) -> Solution | str:
    """A solver's solution, or why it rejects the problem.

    Raises:
        WrongFindingError: the solver's plan or bound is wrong.
    """
    try:
        return solver.solve(problem, options)
    except WrongFindingError:
        raise
    except PlanError as error:
        return str(error)


def _by_budget(
    model: TrainableModel, traced: TracedProblem, request: BudgetRequest, options: SolverOptions
) -> PlanCandidate | OmittedCandidate:
    try:
        planned = plan_within(model, traced, request, options)
    except BudgetError as error:
        return OmittedCandidate("budget", str(error))
    return PlanCandidate("budget", "solver", planned, SOLVERS["budget"].summary)


def _by_blocks(model: TrainableModel, traced: TracedProblem, stored: PlannedStep) -> PlanCandidate | OmittedCandidate:
    """Repeated blocks at the level of nesting with the lowest peak."""

    def planned(blocks: Blocks) -> PlannedStep:
        return traced_step_with_plan(model, traced, CheckpointPlan(blocks.checkpoints), stored)

    tried = [(blocks, planned(blocks)) for blocks in repeated_blocks(traced)]
    if not tried:
        return OmittedCandidate(PER_BLOCK, "the names of tensors, nodes and parameters show no repeated blocks")
    blocks, best = min(tried, key=lambda one: one[1].profile.peak_bytes)
    return PlanCandidate(
        PER_BLOCK, "rule", best, f"{blocks.count} blocks like {blocks.pattern} are recomputed, each as a whole"
    )


def _by_layers(model: TrainableModel, traced: TracedProblem, stored: PlannedStep) -> PlanCandidate | OmittedCandidate:
    checkpoints = layerwise_checkpoints(traced)
    if checkpoints is None:
        return OmittedCandidate(LAYER_WISE, "there are no transformer layers with a normalisation before attention")
    planned = traced_step_with_plan(model, traced, CheckpointPlan(checkpoints), stored)
    return PlanCandidate(LAYER_WISE, "rule", planned, "ONNX Runtime's ORTMODULE_MEMORY_OPT_LEVEL=1, as modelled")


def _by_torch_budget(
    source: Any, model: TrainableModel, traced: TracedProblem, read: ReadOptions, stored: PlannedStep
) -> PlanCandidate | OmittedCandidate:
    try:
        from onnxgc.torch.partitioner_plan import tensors_saved

        saved = tensors_saved(
            source,
            TORCH_SHARE,
            input_shapes={name: model.types[name].shape for name in model.inputs},
            trainable=read.trainable,
            freeze=read.freeze,
            freeze_bn=read.freeze_bn,
        )
    except OnnxgcError as error:
        return OmittedCandidate(TORCH_BUDGET, str(error))
    wanted = {traced.vertex_of[name] for name in saved if name in traced.vertex_of}
    kept = tuple(vertex for vertex in traced.problem.graph.vertices if vertex in wanted)
    planned = traced_step_with_plan(model, traced, CheckpointPlan(kept), stored)
    return PlanCandidate(
        TORCH_BUDGET,
        "rule",
        planned,
        f"tensors that PyTorch saves with activation_memory_budget={TORCH_SHARE}: {len(kept)}",
    )
