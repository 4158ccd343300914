"""The paper's objective over sets of checkpoints whose segments may have several entries and exits.

Reading G of `onnxgc.graph.segments`: the only condition is that segments can be ordered, so that the backward
pass of one ends before that of another begins. Contracted to one vertex each, they leave a graph
without cycles.

For sets alone the problem is weighted vertex integrity, which is NP-hard. Computation graphs are narrow,
however, and a dynamic programme over the frontier (`onnxgc.solvers.paper.frontier_search`) finds the
optimum there. The cap on segments is bisected as in the paper's Algorithm 6. On a graph that is too wide, the
programme with a limit on its states finds a good set, and with merged states a lower bound.

The search starts from the better of two plans: the paper's own (`onnxgc.solvers.paper.acg`; every set of
reading A is one of reading G) and the best cuts over a few orders (`onnxgc.solvers.paper.cuts`). The result
is never worse than either.

Effort is counted, not timed: without a time limit, the result is the same on every machine.
"""

import heapq
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnxgc.graph.orders import topological_orders
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions, deadline_of
from onnxgc.solvers.families import GraphFamily, why_not_in
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.paper.cuts import CutSearch
from onnxgc.solvers.paper.elimination_orders import frontier_widths, narrow_order, narrow_part
from onnxgc.solvers.paper.frontier_search import FrontierSearch
from onnxgc.solvers.paper.indexed_problem import EvaluatedSet, IndexedProblem
from onnxgc.solvers.paper.segment_cap_search import Interval, interval
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes

logger = logging.getLogger(__name__)

MAX_CUT_VERTICES = 5000
"""Largest graph for which cuts over orders are searched."""
MAX_VERTICES_FOR_ALL_ORDERS = 1500
"""Larger graphs are cut in the first two orders only."""
MAX_FRONTIER = 64
"""Widest frontier for which the dynamic programme runs."""
PART_WIDTH = 8
"""Width of the frontier of the part that bounds a wider graph."""
STATES_PER_WALK = 30_000
"""Approximate states that a walk of the first round visits; each further round visits four times as many."""
FIRST_ROUND_EFFORT = 600_000
MAX_EFFORT = 1_500_000
"""Effort of the first round, and of all walks together without a time limit: states and transitions as
`onnxgc.solvers.paper.frontier_search` counts them."""
_MIN_STATES, _MAX_STATES = 16, 1024
"""Bounds on the states after each vertex in the walks of the first round."""
MAX_EVALUATED_VERTICES = 1_000_000
"""Effort of the local search: evaluated sets times vertices."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise the paper's objective over all sets of reading G, with a lower bound.

    Exact if the frontier stays narrow: the states grow exponentially with its width, and linearly
    with the number of vertices. Otherwise the effort is limited by `MAX_EFFORT`, or by the time limit,
    which is used up unless the optimum is proved earlier. The result is at least as good as the plan
    of the solver `acg` and the best cuts over orders.

    Args:
        problem: any acyclic graph, sizes in bytes.
        options: `time_limit_seconds` is used.
    """
    deadline = deadline_of(options)
    max_effort = MAX_EFFORT if options.time_limit_seconds is None else math.inf
    independent = ACG.search(problem, options)
    if why_not_in(GraphFamily.CHAIN, problem) is None:
        return independent  # On a chain all segments are independent.

    indexed = IndexedProblem.from_problem(problem)
    index = problem.graph.topological_index
    best = indexed.evaluate(index(vertex) for vertex in independent.plan.checkpoints)
    assert best is not None, "segments with one entry and one exit can be ordered"
    orders = [[index(v) for v in order] for order in topological_orders(problem.graph, problem.size_bytes)]
    if len(indexed) <= MAX_CUT_VERTICES:
        for order in orders[: 2 if len(indexed) > MAX_VERTICES_FOR_ALL_ORDERS else None]:
            best = _best_cuts(indexed, order, best, deadline)
    end_bytes = sum(size for size, forced in zip(indexed.sizes, indexed.forced, strict=True) if forced)
    bound = paper_lower_bound_bytes(problem) - end_bytes

    narrowest, widest = _narrowest(indexed, [*orders, narrow_order(indexed)])
    if widest <= MAX_FRONTIER:
        frontier = FrontierSearch(indexed, narrowest)
        capped = _CapSearch(indexed, frontier, best, deadline, max_effort)
        capped.run()
        best = capped.best
        bound = max(bound, capped.bound_bytes)
    elif best.total_bytes > bound:
        best = _descend(indexed, best, deadline)
        part, order = narrow_part(indexed, narrowest, PART_WIDTH)
        # Only sets of the part that are better than the best set of the whole graph affect the bound.
        rival = replace(best, kept=())
        capped = _CapSearch(part, FrontierSearch(part, order), rival, deadline, FIRST_ROUND_EFFORT)
        capped.run()
        bound = max(bound, capped.bound_bytes)
    return Finding(
        plan=CheckpointPlan.for_graph(problem.graph, (problem.graph.vertices[v] for v in best.kept)),
        status=Status.OPTIMAL if bound >= best.total_bytes else Status.FEASIBLE,
        lower_bound_bytes=min(bound, best.total_bytes) + end_bytes,
    )


def _best_cuts(problem: IndexedProblem, order: Sequence[int], best: EvaluatedSet, deadline: float) -> EvaluatedSet:
    """The better of `best` and the cuts over an order, at caps found by bisection."""
    cuts = CutSearch(problem, order, best.total_bytes, deadline)
    unexplored: list[Interval] = [(0, 0, best.total_bytes, 0)]
    resolution = best.total_bytes // 256
    while unexplored and unexplored[0][0] < best.total_bytes and time.perf_counter() < deadline:
        _, low, high, floor = heapq.heappop(unexplored)
        if high - low < resolution:
            continue
        cap = (low + high) // 2
        kept = cuts.cheapest_under(cap)
        parts = interval(cap + 1, high, floor)
        if kept is not None:
            candidate = problem.evaluate(kept)
            assert candidate is not None, "segments between two cuts are convex"
            parts += interval(low, candidate.heaviest_segment_bytes - 1, candidate.interior_bytes)
            best = _better(best, candidate)
        for part in parts:
            heapq.heappush(unexplored, part)
    return best


class _CapSearch:
    """Search for the best cap on segments with walks that may be inexact.

    The search runs in rounds. Each passes the unsettled intervals to the next one, which keeps four times
    as many states after each vertex.
    """

    def __init__(
        self, problem: IndexedProblem, frontier: FrontierSearch, best: EvaluatedSet, deadline: float, max_effort: float
    ) -> None:
        self.best = best
        self._problem = problem
        self._frontier = frontier
        self._deadline = deadline
        self._max_effort = max_effort
        self._effort = 0
        self._total_bytes = sum(problem.sizes)
        self._open: list[Interval] = interval(0, best.total_bytes, 0)

    @property
    def bound_bytes(self) -> int:
        """Lower bound on every set, without forced vertices."""
        return min((part[0] for part in self._open), default=self.best.total_bytes)

    def run(self) -> None:
        max_states = max(_MIN_STATES, min(_MAX_STATES, STATES_PER_WALK // len(self._problem)))
        resolution = self.best.total_bytes // 32
        self._round(max_states, resolution, min(FIRST_ROUND_EFFORT, self._max_effort))
        if self._is_open():
            self._intensify(8 * max_states)
        while self._is_open() and not self._is_spent(self._max_effort):
            max_states *= 4
            resolution //= 2
            self._round(max_states, resolution, self._max_effort)
        logger.debug("effort %d, best %d bytes without the ends", self._effort, self.best.total_bytes)

    def _is_open(self) -> bool:
        return self.bound_bytes < self.best.total_bytes

    def _is_spent(self, max_effort: float) -> bool:
        return self._effort >= max_effort or time.perf_counter() >= self._deadline

    def _round(self, max_states: int, resolution: int, max_effort: float) -> None:
        """Bisect intervals by rising lower bound; narrow intervals that stay unsettled are set aside."""
        heapq.heapify(self._open)
        aside: list[Interval] = []
        while self._open and self._is_open() and not self._is_spent(max_effort):
            _, low, high, floor = heapq.heappop(self._open)
            cap = (low + high) // 2
            high_below, floor_below, is_exact = self._search_below(low, cap, max_states)
            below = interval(low, high_below, max(floor, floor_below))
            parts = below + interval(cap + 1, high, floor)
            if high - low <= resolution and not is_exact:
                aside += parts
                continue
            for part in parts:
                heapq.heappush(self._open, part)
        self._open += aside

    def _intensify(self, max_states: int) -> None:
        """Walk with more states at the cap of the best set, and improve that set by local search."""
        self._walk(self.best.heaviest_segment_bytes, self.best.total_bytes - 1, max_states)
        self.best = _descend(self._problem, self.best, self._deadline)

    def _search_below(self, low: int, cap: int, max_states: int) -> tuple[int, int, bool]:
        """Search for better sets with a heaviest segment of `low` to `cap` bytes.

        Returns the new upper end of the unexplored interval, the least bytes that a set there keeps, and
        whether this is exact, so that more states cannot improve it.
        """
        max_kept = self.best.total_bytes - 1 - low
        floor = 0
        for relax in (False, True):
            candidate, walk_floor = self._walk(cap, max_kept, max_states, relax=relax)
            floor = max(floor, walk_floor)
            if floor > max_kept:
                return cap, floor, True
            if candidate is not None and floor >= candidate.interior_bytes:
                # No set with a heaviest segment from there to the cap is cheaper.
                return candidate.heaviest_segment_bytes - 1, floor, True
        return cap, floor, False

    def _walk(
        self, cap: int, max_kept: int, max_states: int, *, relax: bool = False
    ) -> tuple[EvaluatedSet | None, int]:
        """The cheapest set that a walk finds, if any, and the least bytes that any set keeps."""
        price = max(0, self.best.total_bytes - cap) / max(1, self._total_bytes)
        walk = self._frontier.cheapest_under(
            cap, max_kept, max_states, price=price, relax=relax, deadline=self._deadline
        )
        self._effort += walk.effort
        if walk.kept is None:
            return None, walk.floor_bytes
        candidate = self._problem.evaluate(walk.kept)
        assert candidate is not None, "the frontier admits no cycle"
        self.best = _better(self.best, candidate)
        return candidate, walk.floor_bytes


def _descend(problem: IndexedProblem, best: EvaluatedSet, deadline: float) -> EvaluatedSet:
    """Local search: discard a checkpoint, or replace it by a neighbour, while the set improves."""
    evaluations = MAX_EVALUATED_VERTICES // len(problem)
    improved = True
    while improved:
        improved = False
        for vertex in best.kept:
            if problem.forced[vertex] or vertex not in best.kept:
                continue
            others = [other for other in best.kept if other != vertex]
            for instead in ([], *([n] for n in problem.neighbours[vertex] if n not in best.kept)):
                if evaluations == 0 or time.perf_counter() >= deadline:
                    return best
                evaluations -= 1
                candidate = problem.evaluate([*others, *instead])
                if candidate is not None and _better(best, candidate) is not best:
                    best = candidate
                    improved = True
                    break
    return best


def _better(best: EvaluatedSet, other: EvaluatedSet) -> EvaluatedSet:
    """Of equally good sets the one with fewer checkpoints."""
    return min(best, other, key=lambda candidate: (candidate.total_bytes, len(candidate.kept)))


def _narrowest(problem: IndexedProblem, orders: Iterable[Sequence[int]]) -> tuple[Sequence[int], int]:
    """The elimination order with the fewest expected shapes, and the width of its frontier."""
    widths = [(order, frontier_widths(problem, order)) for order in orders]
    order, best = min(widths, key=lambda entry: sum(4**width for width in entry[1]))
    return order, max(best)


GENERAL = Solver(
    name="general",
    summary="the paper's objective over segments with several ends: exact on narrow graphs, else bounded",
    search=search,
    objectives=(Objective.GENERAL,),
    exact_for=Objective.GENERAL,
    exact_on=GraphFamily.CHAIN,
)
