"""Checkpoints of a bare graph."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from onnxgc.errors import PlanError
from onnxgc.graph.graph_file import read_graph_file
from onnxgc.planning.plan import Objective, parse_objective
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import solver_for


def solve_graph(
    path: str | os.PathLike[str],
    *,
    solver: str | None = None,
    objective: str | None = None,
    checkpoints: Sequence[str] | None = None,
    interior_only: bool = False,
    time_limit: float | None = None,
    seed: int = 0,
    slots: int | None = None,
    draws: int = 10,
) -> dict[str, Any]:
    """Find checkpoints for a graph file; the result is ready for JSON.

    Sizes in the result are in the file's own unit.

    Args:
        path: a file as `onnxgc.graph.graph_file` describes it.
        solver: a name in the registry; without one, the solver for the objective.
        objective: `paper` (the default), `general` or `peak`. The peak is that of
            `onnxgc.planning.joint.joint_of_bare_graph`.
        checkpoints: identifiers as text; these and no others are kept, whatever `solver` says.
        interior_only: leave the source and the target, which are always kept, out of the result.
        time_limit: seconds for the search.
        seed: of all that is drawn.
        slots: states that the solver `revolve` may store at once.
        draws: valid sets that the solver `random` compares.

    Raises:
        GraphFileError: the file is not a graph of the required form.
        PlanError: unknown solver or checkpoint, or the solver does not take this graph.
    """
    wanted = parse_objective(objective)
    chosen = solver_for(solver, wanted or Objective.PAPER)
    if solver == "manual" and checkpoints is None:
        raise PlanError("the solver 'manual' needs --checkpoints a,b,c")
    if slots is not None and chosen.name != "revolve":
        raise PlanError(f"--slots is for the solver 'revolve', not '{chosen.name}'; leave it out")
    file = read_graph_file(path)
    ends = {file.source, file.target} if interior_only else set()
    # The sum counts the ends whatever is kept. The peak holds each only for a while, so they weigh nothing.
    measured = (wanted or chosen.objectives[0]) in (Objective.PEAK, Objective.ACTIVATIONS)
    weightless = ends if measured else set()
    sizes = {vertex: 0 if vertex in weightless else size for vertex, size in file.sizes.items()}
    problem = CheckpointProblem(file.graph, {vertex: TensorCost(size) for vertex, size in sizes.items()})
    identifier = {str(vertex): vertex for vertex in file.graph.vertices}
    kept = tuple(identifier.get(text, text) for text in checkpoints or ())
    options = SolverOptions(kept, wanted, time_limit, seed, draws, slots)
    solution = (solver_for("manual") if checkpoints is not None else chosen).solve(problem, options)

    end_size = sum(sizes[vertex] for vertex in ends)
    return {
        "solver": solution.solver,
        "status": solution.status.value,
        "objective": file.in_file_units(solution.objective_bytes - end_size),
        "lower_bound": file.in_file_units(solution.lower_bound_bytes - end_size),
        "checkpoints": [vertex for vertex in solution.plan.checkpoints if vertex not in ends],
        "seconds": solution.seconds,
    }
