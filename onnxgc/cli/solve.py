"""`onnxgc solve`: checkpoints of a bare graph, for the paper's objective."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api.solving import solve_graph
from onnxgc.cli.arguments import check_json_target, write_json
from onnxgc.solvers.registry import SOLVERS


def solve_command(
    graph: Annotated[
        str, typer.Argument(help="A JSON file with vertices (id, size), edges, source and target.")
    ],
    solver: Annotated[str, typer.Option(help=f"One of {', '.join(SOLVERS)}.")] = "acg",
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
) -> None:
    """Find the checkpoints of a forward graph: least sum of the checkpoints and the heaviest segment."""
    check_json_target(json_target, graph)
    names = None if checkpoints is None else [name.strip() for name in checkpoints.split(",") if name.strip()]
    found = solve_graph(
        graph,
        solver=solver,
        checkpoints=names,
        interior_only=interior_only,
        time_limit=time_limit,
        seed=seed,
    )
    write_json(found, json_target)
