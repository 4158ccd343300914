"""Solvers on one bare graph: checkpoints of a forward graph, or with a budget sequences of an operator graph."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgc.api.bare_graphs import solve
from onnxgc.api.plan_candidates import DEFAULT_LIMITS_SECONDS, solver_choices
from onnxgc.api.plan_options import Progress
from onnxgc.errors import BudgetError, PlanError
from onnxgc.graph.graph_file import parse_graph
from onnxgc.graph.graph_sources import forward_document, graph_document
from onnxgc.planning.order_choice import Order
from onnxgc.report.data.compare_report import GraphReport, GraphRow, OmittedRow
from onnxgc.solvers.base import PlanSearch, WrongFindingError
from onnxgc.solvers.registry import SOLVERS


def compare_on_graph(
    graph: Any,
    solvers: Sequence[str | PlanSearch] | None,
    budget: str | float | None,
    time_limit: float | None,
    seed: int,
    notify: Progress,
) -> GraphReport:
    """Figures of each solver that takes the graph, in its units; with a budget, of free and of fixed order.

    Raises:
        GraphFileError: the graph is not of a known form.
        PlanError: an unknown solver, or no solver takes the graph.
        BudgetError: no sequence fits the budget.
    """
    document = graph_document(graph)
    runs: dict[str, dict[str, Any]]
    if budget is None:
        parse_graph(forward_document(document))
        names, objects = solver_choices(solvers)
        known = [name for name, solver in SOLVERS.items() if solver.automatic and not solver.takes_budget]
        for name in names or ():
            if name not in known:
                raise PlanError(f"'{name}' is not a solver of bare forward graphs; known: {', '.join(known)}")
        chosen = {name: name for name in known if names is None or name in names} | objects
        if not chosen:
            raise PlanError("no solver is given; name some, or leave solvers out for all")
        runs = {name: {"solver": solver} for name, solver in chosen.items()}
    else:
        if solvers is not None:
            raise PlanError("a budget on a bare graph has the solver 'budget' only; leave --solvers out")
        runs = {f"budget, {order.value} order": {"budget": budget, "order": order.value} for order in Order}
    rows: list[GraphRow] = []
    failures: dict[str, PlanError | BudgetError] = {}
    for name, options in runs.items():
        notify(f"planning: {name}")
        limit = DEFAULT_LIMITS_SECONDS.get(name) if time_limit is None else time_limit
        try:
            solution = solve(document, **options, time_limit=limit, seed=seed, progress=notify)
        except WrongFindingError:
            raise
        except (PlanError, BudgetError) as error:
            failures[name] = error
        else:
            rows.append(_row(name, solution.report))
    if not rows:
        raise next(iter(failures.values()))
    left_out: list[OmittedRow] = [{"name": name, "reason": str(error)} for name, error in failures.items()]
    return {
        "kind": "graph",
        "model": os.fspath(graph) if isinstance(graph, str | os.PathLike) else "graph",
        "vertices": len(document.get("vertices", document.get("nodes"))),
        "baseline_peak": solution.memory_curve(baseline=True).max(),
        "rows": sorted(rows, key=lambda row: (row["peak"], row["name"])),
        "left_out": left_out,
    }


def _row(name: str, report: Mapping[str, Any]) -> GraphRow:
    return {
        "name": name,
        "peak": report["peak"],
        "sum": report.get("sum"),
        "overhead": report.get("overhead"),
        "lower_bound": report["lower_bound"],
        "status": report["status"],
        "checkpoints": report.get("checkpoints"),
        "sequence": report.get("sequence"),
        "seconds": report["seconds"],
    }
