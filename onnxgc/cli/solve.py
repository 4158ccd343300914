"""`onnxgc solve`: checkpoints of a bare graph, or a sequence of a bare operator graph."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onnxgc.api.bare_graphs import solve_graph, solve_operator_graph
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.cli.arguments import (
    PLAN,
    REPORT,
    SEARCH,
    Seed,
    StepLimit,
    check_json_target,
    check_needs_budget,
    progress_line,
    time_limit_option,
    write_json,
)
from onnxgc.errors import PlanError
from onnxgc.planning.order_choice import Order
from onnxgc.planning.plan import Objective
from onnxgc.solvers.registry import SOLVERS


def solve_command(
    graph: Annotated[
        str,
        typer.Argument(
            help="JSON file: vertices (id, size), edges, source, target; with --budget nodes "
            "(id, size, duration) and edges."
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN,
            help="Minimise extra duration within this memory budget: a size in the file's unit such as 12 or "
            "4.5, a share of the peak in node order such as .8 or 80%, or min.",
        ),
    ] = None,
    extra_time: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN,
            help="Minimise the peak within this extra duration, such as 10%; in place of --budget.",
        ),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(
            rich_help_panel=PLAN,
            help="With --budget, the order of nodes: free, or fixed as in the file [default: free].",
        ),
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option(
            rich_help_panel=PLAN,
            help="Minimise the sum of checkpoints and heaviest segment (paper), the same over more sets "
            "(general), or the peak of a backward that releases tensors after their last use (peak) "
            "[default: paper, or the solver's own].",
        ),
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN,
            help=f"One of {', '.join(SOLVERS)} [default: acg, or the one for the objective].",
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(rich_help_panel=PLAN, help="Vertices to keep, as a,b,c; selects the solver manual."),
    ] = None,
    interior_only: Annotated[
        bool,
        typer.Option(
            "--interior-only", rich_help_panel=PLAN, help="Exclude source and target from the result."
        ),
    ] = False,
    time_limit: Annotated[
        float | None,
        time_limit_option(f"{DEFAULT_TIME_LIMIT_SECONDS:.0f} with a budget and no --step-limit"),
    ] = None,
    step_limit: StepLimit = None,
    seed: Seed = 0,
    slots: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=SEARCH, help="States that revolve may store at once."),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=SEARCH, help="Valid sets that random compares [default: 10]."),
    ] = None,
    json_target: Annotated[
        str, typer.Option("--json", rich_help_panel=REPORT, help="JSON file of the result, or - for stdout.")
    ] = "-",
) -> None:
    """Plan a bare computation graph (JSON) instead of an ONNX model.

    Without a budget the result is a set of checkpoints; with one it is the fastest sequence of operators.
    """
    check_json_target(json_target, graph)
    has_budget = budget is not None or extra_time is not None
    for_checkpoints = {
        "--objective": objective,
        "--solver": None if has_budget and solver == "budget" else solver,
        "--checkpoints": checkpoints,
        "--interior-only": interior_only or None,
        "--slots": slots,
        "--draws": draws,
    }
    for_sequences = {"--order": order, "--step-limit": step_limit}
    if not has_budget:
        check_needs_budget(False, for_sequences, "--budget, such as --budget .8")
    elif extra := [name for name, value in for_checkpoints.items() if value is not None]:
        raise PlanError(f"{extra[0]} applies to checkpoints of a forward graph; drop it or --budget")
    with progress_line() as notify:
        notify("planning")
        if has_budget:
            if time_limit is None and step_limit is None:
                time_limit = DEFAULT_TIME_LIMIT_SECONDS
            result: dict[str, Any] = solve_operator_graph(
                graph,
                budget=budget,
                extra_time=extra_time,
                order=(order or Order.FREE).value,
                time_limit=time_limit,
                step_limit=step_limit,
                seed=seed,
                progress=notify,
            )
        else:
            result = solve_graph(
                graph,
                solver=solver,
                objective=objective.value if objective else None,
                checkpoints=_names(checkpoints),
                interior_only=interior_only,
                time_limit=time_limit,
                seed=seed,
                slots=slots,
                draws=draws,
            )
    write_json(result, json_target)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
