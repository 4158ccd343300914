"""The interface of solvers: options, result, and guarantees."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.deadline import Deadline
from onnxgc.planning.objective import objective_bytes
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, Status, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.families import GraphFamily, why_not_in
from onnxgc.solvers.reversal_schedule import ReversalObjective

DEFAULT_DRAWS = 10


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Options for all solvers; each solver reads those that apply to it.

    Attributes:
        checkpoints: the user's own checkpoints, for the solver `manual`.
        objective: the objective by which the plan is evaluated; `None` for the solver's first.
        time_limit_seconds: ends a search, which then returns its best plan.
        seed: seed of random searches; the same seed gives the same plan.
        draws: number of valid sets that a random search compares.
        slots: number of states that a reversal of a chain may store at once; `None` for the solver's choice.
        budget_bytes: for `budget`, the limit on the peak; for `bptt`, the limit on stored states.
        durations: for `budget`, times of operators by name; `None` for floating-point operations.
        order: for `budget`, the order in which operators may first run.
        max_rounds: for `budget`, ends the search after this many rounds.
        sequences: for `budget`, plans to start from.
        progress: callback that receives the name of each stage.

    Raises:
        PlanError: a limit is negative.
    """

    checkpoints: tuple[Vertex, ...] = ()
    objective: Objective | None = None
    time_limit_seconds: float | None = None
    seed: int = 0
    draws: int = DEFAULT_DRAWS
    slots: int | None = None
    budget_bytes: int | None = None
    durations: Mapping[str, int] | None = field(default=None, compare=False, repr=False)
    order: Order = Order.FREE
    max_rounds: int | None = None
    sequences: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    progress: Callable[[str], None] = field(default=lambda stage: None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("time_limit", self.time_limit_seconds), ("step_limit", self.max_rounds)):
            if value is not None and not value >= 0:
                raise PlanError(f"{name} is {value}; give a number of at least 0, or leave it out")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a search; `Solver.solve` evaluates the plan independently.

    `lower_bound_bytes` is in terms of the search's objective; `bound_operator` is the operator that sets it,
    if one does. `interrupted` if a user ended the search.
    """

    plan: CheckpointPlan
    status: Status
    lower_bound_bytes: int
    bound_operator: str = ""
    time: TimeCost | None = None
    interrupted: bool = False


Search: TypeAlias = Callable[[CheckpointProblem, SolverOptions], Finding]


class WrongFindingError(PlanError):
    """A search returned no `Finding`, an invalid plan, or a false bound."""


@runtime_checkable
class PlanSearch(Protocol):
    """A solver of a user: the least that `optimize`, `compare` and `solve` accept as a solver object.

    `Solver` has these attributes too. An object may also have its other fields, such as `objectives` (by
    default `PEAK` and `ACTIVATIONS`) and `summary`; they have the same meaning.
    """

    @property
    def name(self) -> str:
        """Name in tables and reports."""

    def search(self, problem: CheckpointProblem, options: SolverOptions, /) -> Finding:
        """A plan for the problem.

        Raises:
            PlanError: the solver refuses the problem, for a reason of one line.
        """


@dataclass(frozen=True, slots=True)
class Solver:
    """A search algorithm with its guarantees.

    Attributes:
        name: name on the command line.
        summary: one line for users.
        search: the algorithm.
        objectives: objectives that it can minimise, the default first.
        exact_for: the objective for which a plan with status `optimal` is optimal; `None` without
            guarantee. For a `ReversalObjective` the plan is optimal among sequences and the status is
            `feasible`, since the status refers to `objectives`.
        exact_on: the graphs on which `exact_for` holds.
        family: the graphs that it accepts.
        takes_budget: whether it plans for a memory budget.
        automatic: whether it works without checkpoints or a budget from the user.
        max_vertices: the largest graph that it accepts; `None` for no limit.
    """

    name: str
    summary: str
    search: Search = field(repr=False)
    objectives: tuple[Objective, ...] = (Objective.PAPER,)
    exact_for: Objective | ReversalObjective | None = None
    exact_on: GraphFamily = GraphFamily.ANY
    family: GraphFamily = GraphFamily.ANY
    takes_budget: bool = False
    automatic: bool = True
    max_vertices: int | None = None

    def refusal(self, problem: CheckpointProblem) -> str | None:
        """Why the solver rejects a problem, in one line; `None` if it accepts it."""
        if self.max_vertices is not None and len(problem.graph) > self.max_vertices:
            return (
                f"solver {self.name!r} takes graphs of up to {self.max_vertices} vertices, "
                f"this one has {len(problem.graph)}; use solver 'acg'"
            )
        reason = why_not_in(self.family, problem)
        if reason is not None:
            return f"solver {self.name!r} takes {self.family.value} only, and {reason}; use solver 'acg'"
        return None

    def solve(self, problem: CheckpointProblem, options: SolverOptions | None = None) -> Solution:
        """Search for a plan, and evaluate it by `objective_bytes`, independently of the search.

        Raises:
            PlanError: the solver rejects the graph or an option.
            WrongFindingError: the plan names an unknown tensor or operator, or is below its lower bound.
            BudgetError: no plan fits the budget.
        """
        options = options or SolverOptions()
        objective = options.objective or self.objectives[0]
        if objective not in self.objectives:
            raise PlanError(
                f"solver {self.name!r} has the objective '{self.objectives[0].value}', not "
                f"'{objective.value}'; leave --objective out, or use another solver"
            )
        refusal = self.refusal(problem)
        if refusal is not None:
            raise PlanError(refusal)
        start = time.perf_counter()
        finding = self.search(problem, replace(options, objective=objective))
        seconds = time.perf_counter() - start
        value = _evaluated(self.name, problem, finding, objective)
        return Solution(
            plan=finding.plan,
            solver=self.name,
            status=finding.status,
            objective=objective,
            objective_bytes=value,
            lower_bound_bytes=finding.lower_bound_bytes,
            seconds=seconds,
            bound_operator=finding.bound_operator,
            time=finding.time,
            interrupted=finding.interrupted,
        )


def _evaluated(name: str, problem: CheckpointProblem, finding: Any, objective: Objective) -> int:
    """The value of a finding's plan.

    Raises:
        WrongFindingError: it is no finding, the plan is not valid, or its value is below the lower bound.
    """

    def wrong(reason: str) -> WrongFindingError:
        return WrongFindingError(f"solver {name!r} returned {reason}")

    if not isinstance(finding, Finding):
        raise wrong(f"a {type(finding).__name__}; return an onnxgc.solvers.base.Finding")
    plan: Any = finding.plan
    bound: Any = finding.lower_bound_bytes
    status: Any = finding.status
    if not isinstance(plan, CheckpointPlan) or not isinstance(status, Status):
        raise wrong("a Finding without a CheckpointPlan or a Status; give both")
    if not all(isinstance(part, tuple) for part in (plan.checkpoints, plan.order, plan.sequence)):
        raise wrong("a plan whose parts are not tuples")
    if isinstance(bound, bool) or not hasattr(bound, "__index__"):
        raise wrong(f"the lower bound {bound!r}; give a whole number")
    vertices: tuple[Any, ...] = (*plan.checkpoints, *plan.order)
    for vertex in vertices:
        if not isinstance(vertex, Hashable) or vertex not in problem.graph:
            raise wrong(f"a plan with {vertex!r}, which is not a tensor of the graph")
    if plan.order and len(set(plan.order)) < len(problem.graph):
        raise wrong("an order without all tensors of the graph")
    try:
        value = objective_bytes(problem, plan, objective)
    except (PlanError, ValueError) as error:
        raise wrong(f"an invalid plan: {error}") from error
    if value < bound:
        raise wrong(f"the lower bound {bound:,}, but its plan has the value {value:,}; the bound is false")
    return value


def deadline_of(options: SolverOptions) -> float:
    """End of the search on the clock of `time.perf_counter`."""
    return Deadline(options.time_limit_seconds).end
