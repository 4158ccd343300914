"""Sublinear memory: about sqrt(n) segments of equal length.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.1. The paper
describes chains. Other graphs are cut at tensors on every path, as is common practice; without such a
tensor, only the ends are kept.
"""

from __future__ import annotations

from math import isqrt

from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.families import GraphFamily, splitting_vertices, why_not_in
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Cut at evenly spaced splitting vertices, independently of their sizes. O(vertices + edges).

    On a chain of equal states this is optimal: with n tensors between the ends, s segments cost
    s - 1 checkpoints and at most ceil((n + 1) / s) - 1 tensors at once, and s = ceil(sqrt(n + 1))
    reaches the minimum of s + ceil((n + 1) / s), which is ceil(2 sqrt(n + 1)).

    Args:
        problem: any acyclic graph.
        options: none is used.

    Source: Chen et al. 2016, section 4.1.
    """
    del options  # No option applies.
    candidates = splitting_vertices(problem)
    gaps = len(candidates) + 1
    segments = min(_ceil_sqrt(len(problem.graph) - 1), gaps)
    plan = CheckpointPlan.for_graph(
        problem.graph, [candidates[number * gaps // segments - 1] for number in range(1, segments)]
    )
    if why_not_in(GraphFamily.EQUAL_CHAIN, problem) is None:
        return Finding(plan, Status.OPTIMAL, paper_objective(problem, plan).total_bytes)
    return Finding(plan, Status.FEASIBLE, paper_lower_bound_bytes(problem))


def _ceil_sqrt(number: int) -> int:
    """The least integer whose square is at least `number`, and at least 1."""
    return 1 + isqrt(number - 1) if number > 0 else 1


CHEN_SQRT = Solver(
    name="chen-sqrt",
    summary="Chen et al.: about sqrt(n) segments of equal length, cut where every path passes",
    search=search,
    exact_for=Objective.PAPER,
    exact_on=GraphFamily.EQUAL_CHAIN,
)
