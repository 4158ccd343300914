"""What every solver is: a search, and what it promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.objective import objective_bytes
from onnxgc.planning.order import Order
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, Status, TimeCost
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.chain_reversal import ReversalObjective
from onnxgc.solvers.families import GraphFamily, why_not_in

DEFAULT_DRAWS = 10


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Everything that a caller may tell a solver; each reads what concerns it.

    `objective` is what the plan is valued by; `None` leaves it to the solver. `checkpoints` are the
    user's own. `time_limit_seconds` stops a search that can give its best plan so far. `seed` is for
    searches that draw numbers: the same seed, the same plan; `draws` is how many valid sets they
    compare. `slots` is the number of states that a reversal of a chain may store at once,
    `budget_bytes` the same in bytes; without them a solver chooses. `tell` hears what is being done.

    For the solver `budget`, `budget_bytes` is the peak, `durations` are times of operators by name (else
    flops count), `order` says in which order operators may first run, `most_rounds` ends its search
    after so many rounds, and `sequences` are plans to begin with.
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
    most_rounds: int | None = None
    sequences: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    tell: Callable[[str], None] = field(default=lambda stage: None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a search found; its value is judged outside of it.

    `lower_bound_bytes` is on the objective of the search; `bound_operator` is the operator that sets
    it, where one does. `interrupted` says that a user ended the search.
    """

    plan: CheckpointPlan
    status: Status
    lower_bound_bytes: int
    bound_operator: str = ""
    time: TimeCost | None = None
    interrupted: bool = False


Search: TypeAlias = Callable[[CheckpointProblem, SolverOptions], Finding]


@dataclass(frozen=True, slots=True)
class Solver:
    """A way to choose checkpoints.

    Attributes:
        name: what the command line calls it.
        summary: one line for people.
        search: the algorithm.
        objectives: what it can make small, what it does when nothing is said first.
        exact_for: the objective for which its plan is optimal when it says so; `None` if it
            promises nothing. Where it is a `ReversalObjective`, the optimum is a schedule, of which
            a plan can show the first sweep only, and the status says `feasible`.
        exact_on: the graphs on which that holds.
        family: the graphs that it accepts.
        takes_budget: whether it plans for a memory budget.
        automatic: whether it chooses the checkpoints without being told any.
        max_vertices: the largest graph that it accepts; `None` for any.
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

    def accepts(self, problem: CheckpointProblem) -> bool:
        return self.refusal(problem) is None

    def refusal(self, problem: CheckpointProblem) -> str | None:
        """Why the solver does not take a problem, in one line; `None` if it does."""
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
        """Search, and value the plan by `objective_bytes`, not by what the search believes.

        Raises:
            PlanError: the solver does not take this graph, or an option does not fit it.
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
        return Solution(
            plan=finding.plan,
            solver=self.name,
            status=finding.status,
            objective=objective,
            objective_bytes=objective_bytes(problem, finding.plan, objective),
            lower_bound_bytes=finding.lower_bound_bytes,
            seconds=seconds,
            bound_operator=finding.bound_operator,
            time=finding.time,
            interrupted=finding.interrupted,
        )
