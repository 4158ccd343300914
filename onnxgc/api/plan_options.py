"""Options of planning, checked before a model is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.emission.plan_files import model_of, plan_of
from onnxgc.errors import PlanError
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import CheckpointPlan, parse_objective
from onnxgc.solvers.base import SolverOptions

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A given plan, or the options of a search: a budget's, else a solver's.

    `made_for` is the model that the given plan was made for, or "" if unknown.
    """

    given: CheckpointPlan | None
    made_for: str
    request: BudgetRequest
    solver: str | None
    search: SolverOptions

    @classmethod
    def of(
        cls,
        *,
        plan: Any,
        solver: str | None,
        objective: str | None,
        checkpoints: Sequence[str],
        budget: str | float | None,
        extra_time: str | float | None,
        pareto: bool,
        order: str,
        device: str | None,
        calibrate: str | os.PathLike[str] | None,
        time_limit: float | None,
        step_limit: int | None,
        seed: int,
        progress: Progress,
    ) -> PlanOptions:
        """The options of `optimize`.

        Raises:
            PlanError: options that contradict each other, or an invalid plan.
            BudgetFormError, DurationError: an invalid budget, an unknown device.
        """
        given = None if plan is None else plan_of(plan)
        searched = (solver, objective, budget, extra_time, pareto, *checkpoints)
        if given is not None and searched != (None, None, None, None, False):
            raise PlanError(
                "a plan replaces a search: leave out solver, objective, checkpoints, budget, extra time and "
                "pareto"
            )
        if given is not None and time_limit is not None:
            raise PlanError("a plan replaces a search: leave out --time-limit (time_limit)")
        chosen = "manual" if checkpoints else solver
        wanted = parse_objective(objective)
        request = BudgetRequest.of(
            budget,
            extra_time=extra_time,
            pareto=pareto,
            order=order,
            device=device,
            calibrate=calibrate,
            solver=chosen,
            objective=wanted,
        )
        for_budgets = {
            "order": None if request.order is Order.FREE else order,
            "device": device,
            "calibrate": calibrate,
            "step_limit": step_limit,
        }
        for name, value in for_budgets.items():
            if value is not None and not request.is_requested:
                raise PlanError(
                    f"{name} applies to a budget, extra_time or pareto only; give one, or leave it out"
                )
        search = SolverOptions(
            tuple(checkpoints),
            wanted,
            time_limit,
            seed,
            max_rounds=step_limit,
            order=request.order,
            progress=progress,
        )
        return cls(given, model_of(plan), request, chosen, search)
