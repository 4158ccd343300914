"""Sublinear memory: about sqrt(n) segments of equal length, or segments closed greedily at a size.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The paper describes chains.
Other graphs are cut at tensors on every path, as is common practice; without such a tensor, only the ends
are kept. Deviation: plans are compared by the objective of Feng & Huang, not by the algorithm's own sum.
"""

from math import isqrt

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.virtual_terminals import VirtualTerminal, forced_checkpoints
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.families import GraphFamily, splitting_vertices, why_not_in
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes

BUDGETS_TRIED = 16
"""Number of budgets between B / sqrt(2) and sqrt(2) B."""


def search_sqrt(problem: CheckpointProblem, options: SolverOptions) -> Finding:
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


def search_greedily(problem: CheckpointProblem, options: SolverOptions) -> Finding:
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
    return list(dict.fromkeys(low + (high - low) * step // (BUDGETS_TRIED - 1) for step in range(BUDGETS_TRIED)))


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


CHEN_SQRT = Solver(
    name="chen-sqrt",
    summary="Chen et al.: about sqrt(n) segments of equal length, cut where every path passes",
    search=search_sqrt,
    exact_for=Objective.PAPER,
    exact_on=GraphFamily.EQUAL_CHAIN,
)

CHEN_GREEDY = Solver(
    name="chen-greedy",
    summary="Chen et al.: segments closed greedily at a size, the best of a sweep over that size",
    search=search_greedily,
)
