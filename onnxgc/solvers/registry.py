"""All solvers by name.

The capabilities of a solver (graphs, objectives, guarantees) are the fields of `Solver`.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Objective
from onnxgc.solvers.base import PlanSearch, Solver
from onnxgc.solvers.baselines.bptt import BPTT
from onnxgc.solvers.baselines.chen import CHEN_GREEDY, CHEN_SQRT
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.baselines.fixed_plans import MANUAL, STORE_ALL
from onnxgc.solvers.baselines.random_draws import RANDOM
from onnxgc.solvers.baselines.revolve import REVOLVE
from onnxgc.solvers.budget_solver import BUDGET
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.paper.lcg import LCG
from onnxgc.solvers.paper.orderable_segments import GENERAL
from onnxgc.solvers.peak.cut_search import PEAK

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        solver.name: solver
        for solver in (
            PEAK,
            ACG,
            GENERAL,
            LCG,
            CHEN_SQRT,
            CHEN_GREEDY,
            REVOLVE,
            BPTT,
            RANDOM,
            STORE_ALL,
            MANUAL,
            EXHAUSTIVE,
            BUDGET,
        )
    }
)

DEFAULTS: Mapping[Objective, Solver] = MappingProxyType(
    {
        Objective.PEAK: PEAK,
        Objective.TIME: BUDGET,
        Objective.ACTIVATIONS: PEAK,
        Objective.PAPER: ACG,
        Objective.GENERAL: GENERAL,
    }
)


def solver_for(given: str | PlanSearch | None, objective: Objective | None = None) -> Solver:
    """The solver of a name, or a user's object; for None, the default solver for an objective.

    Raises:
        PlanError: there is no solver of that name, or the object is not a solver.
    """
    if given is None:
        return DEFAULTS[objective or Objective.PEAK]
    if not isinstance(given, str):
        return _solver_of(given)
    if given not in SOLVERS:
        raise PlanError(f"solver '{given}' is not one of {', '.join(SOLVERS)}; pass one of them to --solver")
    return SOLVERS[given]


def _solver_of(given: Any) -> Solver:
    """A user's object as a solver."""
    if isinstance(given, type) or not isinstance(given, PlanSearch) or not callable(given.search):
        is_class = isinstance(given, type)
        shown = f"the class {given.__name__}, not an object of it" if is_class else f"{given!r:.60}"
        raise PlanError(
            f"a solver is a name, or an object with a name and a method search(problem, options), not {shown}"
        )
    name: Any = given.name
    if not isinstance(name, str) or not name.strip():
        raise PlanError(f"the name of a solver is {name!r:.60}; give it a text")
    if name in SOLVERS and given is not SOLVERS[name]:
        raise PlanError(f"the name '{name}' of a solver is that of a solver of onnxgc; give it another name")
    if isinstance(given, Solver):
        return given
    known = {field.name for field in fields(Solver)} - {"name", "search", "summary", "objectives"}
    return Solver(
        name,
        str(getattr(given, "summary", "")),
        given.search,
        _objectives_of(given),
        **{field: getattr(given, field) for field in sorted(known) if hasattr(given, field)},
    )


def _objectives_of(given: Any) -> tuple[Objective, ...]:
    objectives = getattr(given, "objectives", (Objective.PEAK, Objective.ACTIVATIONS))
    is_sequence = isinstance(objectives, tuple | list) and bool(objectives)
    if not is_sequence or not all(isinstance(objective, Objective) for objective in objectives):
        raise PlanError(
            f"the objectives of solver '{given.name}' are {objectives!r:.60}; give a tuple of members of "
            "onnxgc.planning.plan.Objective"
        )
    return tuple(objectives)
