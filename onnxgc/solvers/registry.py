"""All solvers by name.

The capabilities of a solver (graphs, objectives, guarantees) are the fields of `Solver`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Objective
from onnxgc.solvers.base import Solver
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


def solver_for(name: str | None, objective: Objective | None = None) -> Solver:
    """The solver of a name; without a name, the default solver for an objective.

    Raises:
        PlanError: there is no solver of that name.
    """
    if name is None:
        return DEFAULTS[objective or Objective.PEAK]
    if name not in SOLVERS:
        raise PlanError(f"solver '{name}' is not one of {', '.join(SOLVERS)}; pass one of them to --solver")
    return SOLVERS[name]
