"""`onnxgc solve`: checkpoints of a bare graph, or a sequence of a bare operator graph."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api.solving import solve_graph, solve_operator_graph
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.cli.arguments import (
    Seed,
    check_json_target,
    check_with_budget,
    finite,
    stages,
    write_json,
)
from onnxgc.errors import PlanError
from onnxgc.planning.order import Order
from onnxgc.planning.plan import Objective
from onnxgc.solvers.registry import SOLVERS


def solve_command(
    graph: Annotated[
        str,
        typer.Argument(
            help="A JSON file: vertices (id, size), edges, source, target; with --budget nodes "
            "(id, size, duration) and edges."
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            help="Least extra time in so much memory: a size in the file's unit such as 12 or 4.5, .8 or 80% "
            "of the peak in node order, or min."
        ),
    ] = None,
    extra_time: Annotated[
        str | None,
        typer.Option(help="In place of --budget: the least peak at so much extra duration, such as 10%."),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(help="With --budget: first runs in any order, or as in the file [default: free]."),
    ] = None,
    step_limit: Annotated[
        int | None,
        typer.Option(min=0, help="With --budget: rounds of the search, so that the seed alone decides."),
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option(
            help="paper: sum of the checkpoints + heaviest segment; general: the same over more sets; "
            "peak: of a backward that releases as it goes [default: paper, or the solver's own]."
        ),
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(SOLVERS)} [default: acg, or the one for the objective]."),
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Vertices to keep, as a,b,c; chooses the solver manual.")
    ] = None,
    interior_only: Annotated[
        bool, typer.Option("--interior-only", help="Leave source and target out of the result.")
    ] = False,
    json_target: Annotated[
        str, typer.Option("--json", help="Where the result goes: a file, or - for stdout.")
    ] = "-",
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.0, callback=finite, help="Seconds for the solver [with --budget and no --step-limit: 30]."
        ),
    ] = None,
    seed: Seed = 0,
    slots: Annotated[int | None, typer.Option(min=1, help="States that revolve may store at once.")] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Valid sets that random compares [default: 10].")
    ] = None,
) -> None:
    """Find the checkpoints of a forward graph, or the fastest sequence of operators in a memory budget."""
    check_json_target(json_target, graph)
    if budget is not None or extra_time is not None:
        given = {
            "--objective": objective,
            "--solver": None if solver == "budget" else solver,
            "--checkpoints": checkpoints,
            "--interior-only": interior_only or None,
            "--slots": slots,
            "--draws": draws,
        }
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None:
            raise PlanError(f"{extra} is for checkpoints of a forward graph; leave it or --budget out")
        if time_limit is None and step_limit is None:
            time_limit = DEFAULT_TIME_LIMIT_SECONDS
        with stages() as tell:
            solved = solve_operator_graph(
                graph,
                budget=budget,
                extra_time=extra_time,
                order=(order or Order.FREE).value,
                time_limit=time_limit,
                step_limit=step_limit,
                seed=seed,
                progress=tell,
            )
        write_json(solved, json_target)
        return
    of_budgets = {"--order": order, "--step-limit": step_limit}
    check_with_budget(False, of_budgets, "--budget; give one, such as --budget .8")
    names = None if checkpoints is None else [name.strip() for name in checkpoints.split(",") if name.strip()]
    with stages() as tell:
        tell("planning")
        found = solve_graph(
            graph,
            solver=solver,
            objective=objective.value if objective else None,
            checkpoints=names,
            interior_only=interior_only,
            time_limit=time_limit,
            seed=seed,
            slots=slots,
            draws=draws,
        )
    write_json(found, json_target)
