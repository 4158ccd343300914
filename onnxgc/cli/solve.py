"""`onnxgc solve`: checkpoints of a bare graph, or a sequence of a bare operator graph."""

from typing import Annotated

from typer import Argument, Option

from onnxgc.api.bare_graphs import solve
from onnxgc.cli.arguments import (
    PLAN,
    REPORT,
    SEARCH,
    SEED,
    STEP_LIMIT,
    TIME_LIMIT_WITH_BUDGET,
    Options,
    check_json_target,
    names_in,
    progress_line,
    with_flat_options,
    write_json,
)
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


@with_flat_options
def solve_command(
    graph: Annotated[
        str,
        Argument(
            help="JSON file: vertices (id, size) and edges; with --budget nodes (id, size, duration) and "
            "edges; also networkx's node-link form."
        ),
    ],
    planning: _Planning,
) -> None:
    """Plan a bare computation graph (JSON) instead of an ONNX model.

    Without a budget the result is a set of checkpoints; with one it is the fastest sequence of operators.
    """
    check_json_target(planning.json_target, graph)
    checkpoints = None if planning.checkpoints is None else names_in(planning.checkpoints)
    with progress_line() as notify:
        notify("planning")
        solution = solve(
            graph, **planning.values("checkpoints", "json_target"), checkpoints=checkpoints, progress=notify
        )
    write_json(solution.report, planning.json_target)
