"""Options of planning, checked before a model is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.emission.plan_files import model_of, plan_of
from onnxgc.errors import PlanError
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan, parse_objective
from onnxgc.solvers.base import PlanSearch, SolverOptions
from onnxgc.solvers.budget_solver import BUDGET
from onnxgc.solvers.registry import solver_for

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A given plan, or the options of a search: a budget's, else a solver's.

    `solver` is a name or a solver object. `made_for` is the model that the given plan was made for, or "" if
    unknown.
    """

    given: CheckpointPlan | None
    made_for: str
    request: BudgetRequest
    solver: Any
    search: SolverOptions

    @classmethod
    def from_options(
        cls,
        plan: Any,
        solver: str | PlanSearch | None,
        request: BudgetRequest,
        objective: str | None,
        checkpoints: Sequence[str],
        time_limit: float | None,
        step_limit: int | None,
        seed: int,
        progress: Progress,
    ) -> "PlanOptions":
        """The options as `onnxgc.optimize` takes them.

        Raises:
            PlanError: options contradict each other, or the plan is not valid.
        """
        given = None if plan is None else plan_of(plan)
        chosen = "manual" if checkpoints else solver
        name = chosen if chosen is None or isinstance(chosen, str) else solver_for(chosen).name
        options = SolverOptions(
            tuple(checkpoints),
            parse_objective(objective),
            time_limit,
            seed,
            max_rounds=step_limit,
            order=request.order,
            progress=progress,
        )
        if given is not None:
            _check_without_search(name, request, options)
        elif not request.is_requested and chosen is None and options.objective is None:
            request = request.as_default()
            options = replace(options, order=request.order)
        _check_budget(name, request, options)
        return cls(given, model_of(plan), request, chosen, options)


def _check_without_search(solver: str | None, request: BudgetRequest, options: SolverOptions) -> None:
    if request.is_requested or solver is not None or options.objective is not None:
        raise PlanError(
            "a plan replaces a search: leave out solver, objective, checkpoints, budget, extra time and pareto"
        )
    if options.time_limit_seconds is not None:
        raise PlanError("a plan replaces a search: leave out --time-limit (time_limit)")


def _check_budget(solver: str | None, request: BudgetRequest, options: SolverOptions) -> None:
    """Fail if options do not apply with a budget, or without one."""
    if request.is_requested:
        if solver == "manual":
            raise PlanError("--checkpoints chooses the plan by hand, a budget by a search; drop one of them")
        if options.objective is not None:
            raise PlanError(f"--objective {options.objective.value} does not apply to a budget; drop one of them")
        if solver not in (None, BUDGET.name):
            raise PlanError(f"--budget and --pareto use the solver '{BUDGET.name}', not '{solver}'; leave --solver out")
        return
    if solver == BUDGET.name:
        raise PlanError(f"the solver '{BUDGET.name}' needs --budget, such as 8GiB or 60%")
    for_budgets = {
        "order": request.order is not Order.FREE,
        "device": request.device is not None,
        "calibrate": request.calibrate is not None,
        "step_limit": options.max_rounds is not None,
    }
    for name, is_given in for_budgets.items():
        if is_given:
            raise PlanError(f"{name} applies to a budget, extra_time or pareto only; give one, or leave it out")
