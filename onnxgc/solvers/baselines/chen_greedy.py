"""Sublinear memory, greedily: close a segment as soon as it holds more than a budget; try some budgets.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, Algorithm 3 and the
search over its budget. The candidates for checkpoints are the tensors that every path visits (all
inner tensors of a chain), and every plan is judged by the paper's objective here instead of by
the sum that the algorithm keeps.
"""

from __future__ import annotations

from math import isqrt

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.terminals import VirtualTerminal, forced_checkpoints
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes
from onnxgc.solvers.families import splitting_vertices

GRID = 16
"""How many budgets are tried between B / sqrt(2) and sqrt(2) B."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The best of the plans for a budget of 0 and for a grid of budgets around B.

    With x bytes of checkpoints, without the ends that are always kept, and segments of up to y bytes
    at a budget of 0, B is sqrt(x y). Of equally good plans it takes the one of the least budget.
    """
    del options  # Nothing to choose.
    candidates = frozenset(splitting_vertices(problem))
    plan, peak_bytes = _plan_under(problem, candidates, 0)
    best, value = plan, paper_objective(problem, plan)
    end_bytes = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
    for budget_bytes in _grid((value.checkpoint_bytes - end_bytes) * peak_bytes):
        plan, _ = _plan_under(problem, candidates, budget_bytes)
        judged = paper_objective(problem, plan)
        if judged.total_bytes < value.total_bytes:
            best, value = plan, judged
    return Finding(best, Status.FEASIBLE, any_plan_lower_bound_bytes(problem))


def _grid(square: int) -> list[int]:
    """Budgets from B / sqrt(2) to sqrt(2) B at equal distances, in whole bytes, given B squared."""
    low, high = isqrt(square // 2), isqrt(2 * square)
    return list(dict.fromkeys(low + (high - low) * step // (GRID - 1) for step in range(GRID)))


def _plan_under(
    problem: CheckpointProblem, candidates: frozenset[Vertex], budget_bytes: int
) -> tuple[CheckpointPlan, int]:
    """Algorithm 3: a plan, and the heaviest run of tensors up to and with a checkpoint."""
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
