"""`onnxgc solve`: checkpoints of a bare graph, or a sequence of a bare operator graph."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from onnxgc.api.bare_graphs import solve_graph, solve_operator_graph
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.cli.arguments import (
    PLAN,
    REPORT,
    SEARCH,
    SEED,
    STEP_LIMIT,
    TIME_LIMIT_WITH_BUDGET,
    Options,
    check_json_target,
    check_needs_budget,
    names_in,
    progress_line,
    with_flat_options,
    write_json,
)
from onnxgc.errors import PlanError
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import Objective
from onnxgc.solvers.registry import SOLVERS


class _Planning(Options, panel=PLAN):
    """What a plan minimises, and how it is found."""

    budget: str | None = Option(
        None,
        help="Minimise extra duration within this memory budget: a size in the file's unit such as 12 or "
        "4.5, a share of the peak in node order such as .8 or 80%, or min.",
    )
    extra_time: str | None = Option(
        None, help="Minimise the peak within this extra duration, such as 10%; in place of --budget."
    )
    order: Order | None = Option(
        None, help="With --budget, the order of nodes: free, or fixed as in the file [default: free]."
    )
    objective: Objective | None = Option(
        None,
        help="Minimise the sum of checkpoints and heaviest segment (paper), the same over more sets "
        "(general), or the peak of a backward that releases tensors after their last use (peak) "
        "[default: paper, or the solver's own].",
    )
    solver: str | None = Option(None, help=f"One of {', '.join(SOLVERS)} [default: acg, or the one for the objective].")
    checkpoints: str | None = Option(None, help="Vertices to keep, as a,b,c; selects the solver manual.")
    interior_only: bool = Option(False, help="Exclude source and target from the result.")
    time_limit: float | None = TIME_LIMIT_WITH_BUDGET
    step_limit: int | None = STEP_LIMIT
    seed: int = SEED
    slots: int | None = Option(None, min=1, rich_help_panel=SEARCH, help="States that revolve may store at once.")
    draws: int | None = Option(
        None, min=1, rich_help_panel=SEARCH, help="Valid sets that random compares [default: 10]."
    )
    json_target: str = Option("-", "--json", rich_help_panel=REPORT, help="JSON file of the result, or - for stdout.")

    @property
    def has_budget(self) -> bool:
        return self.budget is not None or self.extra_time is not None

    def check(self) -> None:
        """Fail if options do not apply."""
        if not self.has_budget:
            for_sequences = {"--order": self.order, "--step-limit": self.step_limit}
            check_needs_budget(False, for_sequences, "--budget, such as --budget .8")
            return
        for_checkpoints = {
            "--objective": self.objective,
            "--solver": None if self.solver == "budget" else self.solver,
            "--checkpoints": self.checkpoints,
            "--interior-only": self.interior_only or None,
            "--slots": self.slots,
            "--draws": self.draws,
        }
        for option, value in for_checkpoints.items():
            if value is not None:
                raise PlanError(f"{option} applies to checkpoints of a forward graph; drop it or --budget")


@with_flat_options
def solve_command(
    graph: Annotated[
        str,
        Argument(
            help="JSON file: vertices (id, size), edges, source, target; with --budget nodes "
            "(id, size, duration) and edges."
        ),
    ],
    planning: _Planning,
) -> None:
    """Plan a bare computation graph (JSON) instead of an ONNX model.

    Without a budget the result is a set of checkpoints; with one it is the fastest sequence of operators.
    """
    check_json_target(planning.json_target, graph)
    planning.check()
    with progress_line() as notify:
        notify("planning")
        if planning.has_budget:
            is_limited = planning.time_limit is not None or planning.step_limit is not None
            result = solve_operator_graph(
                graph,
                budget=planning.budget,
                extra_time=planning.extra_time,
                order=(planning.order or Order.FREE).value,
                time_limit=planning.time_limit if is_limited else DEFAULT_TIME_LIMIT_SECONDS,
                step_limit=planning.step_limit,
                seed=planning.seed,
                progress=notify,
            )
        else:
            result = solve_graph(
                graph,
                solver=planning.solver,
                objective=planning.objective.value if planning.objective else None,
                checkpoints=None if planning.checkpoints is None else names_in(planning.checkpoints),
                interior_only=planning.interior_only,
                time_limit=planning.time_limit,
                seed=planning.seed,
                slots=planning.slots,
                draws=planning.draws,
            )
    write_json(result, planning.json_target)
