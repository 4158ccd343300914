"""`onnxgc solve`: checkpoints of a bare graph."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api.solving import solve_graph
from onnxgc.cli.arguments import check_json_target, write_json
from onnxgc.planning.plan import Objective
from onnxgc.solvers.registry import SOLVERS


def solve_command(
    graph: Annotated[
        str, typer.Argument(help="A JSON file with vertices (id, size), edges, source and target.")
    ],
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
    time_limit: Annotated[float | None, typer.Option(min=0.0, help="Seconds for the solver.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    slots: Annotated[int | None, typer.Option(min=1, help="States that revolve may store at once.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Valid sets that random compares.")] = 10,
) -> None:
    """Find the checkpoints of a forward graph: least sum of checkpoints and heaviest segment, or peak."""
    check_json_target(json_target, graph)
    names = None if checkpoints is None else [name.strip() for name in checkpoints.split(",") if name.strip()]
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
