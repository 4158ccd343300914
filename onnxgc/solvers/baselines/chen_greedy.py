"""Sublinear memory, greedily: end a segment as soon as it exceeds a budget, for several budgets.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, Algorithm 3 and the
search over its budget. Candidates for checkpoints are the tensors on every path (all inner tensors of a
chain). Deviation: plans are compared by the objective of Feng & Huang, not by the algorithm's own sum.
"""

from __future__ import annotations

from math import isqrt

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.virtual_terminals import VirtualTerminal, forced_checkpoints
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.families import splitting_vertices
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes

BUDGETS_TRIED = 16
"""Number of budgets between B / sqrt(2) and sqrt(2) B."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The best plan for a budget of 0 and for a grid of budgets around B. O(vertices + edges) for each.

    B is sqrt(x y), where the plan for budget 0 has x bytes of checkpoints, without the ends, and segments
    of up to y bytes. Among equally good plans the one with the least budget is returned.

    Args:
        problem: any acyclic graph, sizes in bytes.
        options: none is used.

    Source: Chen et al. 2016, Algorithm 3.
    """
    del options  # No option applies.
    candidates = frozenset(splitting_vertices(problem))
    plan, peak_bytes = _plan_under(problem, candidates, 0)
    best, value = plan, paper_objective(problem, plan)
    end_bytes = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
    for budget_bytes in _grid((value.checkpoint_bytes - end_bytes) * peak_bytes):
        plan, _ = _plan_under(problem, candidates, budget_bytes)
        candidate = paper_objective(problem, plan)
        if candidate.total_bytes < value.total_bytes:
            best, value = plan, candidate
    return Finding(best, Status.FEASIBLE, paper_lower_bound_bytes(problem))


def _grid(square: int) -> list[int]:
    """Evenly spaced budgets in bytes from B / sqrt(2) to sqrt(2) B, given B squared."""
    low, high = isqrt(square // 2), isqrt(2 * square)
    return list(
        dict.fromkeys(low + (high - low) * step // (BUDGETS_TRIED - 1) for step in range(BUDGETS_TRIED))
    )


def _plan_under(
    problem: CheckpointProblem, candidates: frozenset[Vertex], budget_bytes: int
) -> tuple[CheckpointPlan, int]:
    """Algorithm 3: a plan, and the heaviest run of tensors up to and including a checkpoint."""
    ends = forced_checkpoints(problem.graph)
    kept: list[Vertex] = []
    run_bytes = heaviest_bytes = 0
    for vertex in problem.closed_graph().vertices:
        if isinstance(vertex, VirtualTerminal) or vertex in ends:
            continue
        run_bytes += problem.size_bytes(vertex)
        heaviest_bytes = max(heaviest_bytes, run_bytes)
        if vertex in candidates and run_bytes > budget_bytes:
            kept.append(vertex)
            run_bytes = 0
    return CheckpointPlan.for_graph(problem.graph, kept), heaviest_bytes


CHEN_GREEDY = Solver(
    name="chen-greedy",
    summary="Chen et al.: segments closed greedily at a size, the best of a sweep over that size",
    search=search,
)
