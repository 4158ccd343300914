"""The paper's objective over all sets of checkpoints whose segments can be computed as one piece.

Reading G of `onnxgc.graph.segments`: a segment may read several checkpoints and feed several. All
that is asked is that segments can be put in a row, so that the backward pass of one ends before
that of another begins: contracted to one vertex each, they leave a graph without cycles.

On bare sets that is weighted vertex integrity, which is NP-hard. But computation graphs are narrow,
and there a dynamic programme over the frontier (`onnxgc.solvers.paper.frontier`) finds the optimum; the cap
on segments is searched as in the paper's Algorithm 6, by halving. Where the graph is too wide, the
same programme loses some states and finds a good set, and with states merged it finds a bound.

The search starts from the best of two plans that need no independent proof: the paper's own
(`onnxgc.solvers.paper.acg`; every set of reading A is one of reading G) and the best cuts over a few orders
(`onnxgc.solvers.paper.cuts`). It ends with the best set found, so it is never worse than either.

Effort is counted, not timed: without a time limit, a problem has one answer on every
machine.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from onnxgc.graph.orders import topological_orders
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes
from onnxgc.solvers.families import GraphFamily, why_not_in
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.paper.cuts import CutSearch
from onnxgc.solvers.paper.frontier import FrontierSearch, frontier_widths, narrow_order, narrow_part
from onnxgc.solvers.paper.indexed_problem import IndexedProblem, JudgedSet
from onnxgc.solvers.paper.segment_cap_search import deadline_of

logger = logging.getLogger(__name__)

Interval: TypeAlias = tuple[int, int, int, int]
"""Weights low..high of the heaviest segment that are not explored, and what is kept there at least:
(lower bound, low, high, floor)."""

MOST_CUT_VERTICES = 5000
"""Up to so many vertices, cuts over orders are tried."""
MANY_VERTICES = 1500
"""Above so many vertices, only over the first two orders."""
WIDEST_FRONTIER = 64
"""Up to so many vertices on the frontier, the dynamic programme is tried."""
NARROW_PART = 8
"""Of a wider graph, a part whose frontier has so many vertices gives a bound."""
STATES_A_WALK = 30_000
"""What the first walks may visit, roughly; each further round of walks visits four times as many."""
FIRST_ROUND_EFFORT = 600_000
MOST_EFFORT = 1_500_000
"""What the first round and all walks together may visit, where there is no time limit for the latter:
states, and shapes as `onnxgc.solvers.paper.frontier` counts them."""
_FEWEST_STATES, _MOST_STATES = 16, 1024
"""Bounds on the states that the first walks hold in each step."""
MOST_JUDGED_VERTICES = 1_000_000
"""Sets that are judged when a plan is improved vertex by vertex, times vertices."""


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The best of the paper's plan, cuts over orders, and the frontier's, with a lower bound.

    With a time limit it uses that time unless the optimum is proved earlier.
    """
    deadline = deadline_of(options)
    most_effort = MOST_EFFORT if options.time_limit_seconds is None else math.inf
    independent = ACG.search(problem, options)
    if why_not_in(GraphFamily.CHAIN, problem) is None:
        return independent  # On a chain all segments are independent.

    indexed = IndexedProblem.of(problem)
    index = problem.graph.topological_index
    best = indexed.judged(index(vertex) for vertex in independent.plan.checkpoints)
    assert best is not None, "segments with one entry and one exit can be put in a row"
    orders = [[index(v) for v in order] for order in topological_orders(problem.graph, problem.size_bytes)]
    if len(indexed) <= MOST_CUT_VERTICES:
        for order in orders[: 2 if len(indexed) > MANY_VERTICES else None]:
            best = _best_cuts(indexed, order, best, deadline)
    end_bytes = sum(size for size, forced in zip(indexed.sizes, indexed.forced, strict=True) if forced)
    bound = any_plan_lower_bound_bytes(problem) - end_bytes

    narrowest, widest = _narrowest(indexed, [*orders, narrow_order(indexed)])
    if widest <= WIDEST_FRONTIER:
        frontier = FrontierSearch(indexed, narrowest)
        capped = _CapSearch(indexed, frontier, best, deadline, most_effort)
        capped.run()
        best = capped.best
        bound = max(bound, capped.bound_bytes)
    elif best.total_bytes > bound:
        best = _improved(indexed, best, deadline)
        part, order = narrow_part(indexed, narrowest, NARROW_PART)
        # Only sets better than the best of the whole matter to the bound; that one is not the part's.
        rival = replace(best, kept=())
        capped = _CapSearch(part, FrontierSearch(part, order), rival, deadline, FIRST_ROUND_EFFORT)
        capped.run()
        bound = max(bound, capped.bound_bytes)
    return Finding(
        plan=CheckpointPlan.for_graph(problem.graph, (problem.graph.vertices[v] for v in best.kept)),
        status=Status.OPTIMAL if bound >= best.total_bytes else Status.FEASIBLE,
        lower_bound_bytes=min(bound, best.total_bytes) + end_bytes,
    )


def _best_cuts(problem: IndexedProblem, order: Sequence[int], best: JudgedSet, deadline: float) -> JudgedSet:
    """The better of `best` and the cuts over an order, at caps that halve intervals."""
    cuts = CutSearch(problem, order, best.total_bytes, deadline)
    unexplored: list[Interval] = [(0, 0, best.total_bytes, 0)]
    resolution = best.total_bytes // 256
    while unexplored and unexplored[0][0] < best.total_bytes and time.perf_counter() < deadline:
        _, low, high, floor = heapq.heappop(unexplored)
        if high - low < resolution:
            continue
        cap = (low + high) // 2
        kept = cuts.under(cap)
        if kept is None:
            below: list[Interval] = []
        else:
            found = problem.judged(kept)
            assert found is not None, "each segment between two cuts was found convex"
            below = _interval(low, found.heaviest_segment_bytes - 1, found.interior_bytes)
            best = _better(best, found)
        for interval in (*below, *_interval(cap + 1, high, floor)):
            heapq.heappush(unexplored, interval)
    return best


class _CapSearch:
    """The best cap on segments where a walk under a cap may be inexact.

    In rounds: each leaves the intervals that it could not settle to the next one, which holds four
    times as many states in each step of a walk.
    """

    def __init__(
        self,
        problem: IndexedProblem,
        frontier: FrontierSearch,
        best: JudgedSet,
        deadline: float,
        most_effort: float,
    ) -> None:
        self.best = best
        self._problem = problem
        self._frontier = frontier
        self._deadline = deadline
        self._most_effort = most_effort
        self._effort = 0
        self._total_bytes = sum(problem.sizes)
        self._open: list[Interval] = _interval(0, best.total_bytes, 0)

    @property
    def bound_bytes(self) -> int:
        """What no set goes below, its forced vertices left out."""
        return min((interval[0] for interval in self._open), default=self.best.total_bytes)

    def run(self) -> None:
        states_a_step = max(_FEWEST_STATES, min(_MOST_STATES, STATES_A_WALK // len(self._problem)))
        resolution = self.best.total_bytes // 32
        self._round(states_a_step, resolution, min(FIRST_ROUND_EFFORT, self._most_effort))
        if self._is_open():
            self._look_closely(8 * states_a_step)
        while self._is_open() and not self._is_spent(self._most_effort):
            states_a_step *= 4
            resolution //= 2
            self._round(states_a_step, resolution, self._most_effort)
        logger.debug("effort %d, best %d bytes beside the ends", self._effort, self.best.total_bytes)

    def _is_open(self) -> bool:
        return self.bound_bytes < self.best.total_bytes

    def _is_spent(self, most_effort: float) -> bool:
        return self._effort >= most_effort or time.perf_counter() >= self._deadline

    def _round(self, states_a_step: int, resolution: int, most_effort: float) -> None:
        """Halve intervals, the most promising first; set aside what is narrow and was not settled."""
        heapq.heapify(self._open)
        aside: list[Interval] = []
        while self._open and self._is_open() and not self._is_spent(most_effort):
            _, low, high, floor = heapq.heappop(self._open)
            cap = (low + high) // 2
            most, floor_below, is_exact = self._search_below(low, cap, states_a_step)
            is_aside = high - low <= resolution and not is_exact
            for part in (
                *_interval(low, most, max(floor, floor_below)),
                *_interval(cap + 1, high, floor),
            ):
                if is_aside:
                    aside.append(part)
                else:
                    heapq.heappush(self._open, part)
        self._open += aside

    def _look_closely(self, states_a_step: int) -> None:
        """Search with more states where the best set was found, and improve that vertex by vertex."""
        self._walk(self.best.heaviest_segment_bytes, self.best.total_bytes - 1, states_a_step)
        self.best = _improved(self._problem, self.best, self._deadline)

    def _search_below(self, low: int, cap: int, states_a_step: int) -> tuple[int, int, bool]:
        """Find sets with a heaviest segment of `low` to `cap` bytes that are better than the best.

        Returns up to which heaviest segment there may be more, what is kept there at least, and
        whether more states cannot tell more.
        """
        budget = self.best.total_bytes - 1 - low
        floor = 0
        for relax in (False, True):
            found, walk_floor = self._walk(cap, budget, states_a_step, relax=relax)
            floor = max(floor, walk_floor)
            if floor > budget:
                return cap, floor, True
            if found is not None and floor >= found.interior_bytes:
                # From the heaviest segment found up to the cap, nothing is cheaper.
                return found.heaviest_segment_bytes - 1, floor, True
        return cap, floor, False

    def _walk(
        self, cap: int, budget: int, states_a_step: int, *, relax: bool = False
    ) -> tuple[JudgedSet | None, int]:
        """The cheapest set that a walk finds, if it finds one, and what any set keeps at least."""
        price = max(0, self.best.total_bytes - cap) / max(1, self._total_bytes)
        walk = self._frontier.under(
            cap, budget, states_a_step, price=price, relax=relax, deadline=self._deadline
        )
        self._effort += walk.effort
        if walk.kept is None:
            return None, walk.floor_bytes
        found = self._problem.judged(walk.kept)
        assert found is not None, "the frontier's paths leave no cycle"
        self.best = _better(self.best, found)
        return found, walk.floor_bytes


def _improved(problem: IndexedProblem, best: JudgedSet, deadline: float) -> JudgedSet:
    """Give up a checkpoint, or keep a neighbour in its place, as long as that is better."""
    judgements = MOST_JUDGED_VERTICES // len(problem)
    improved = True
    while improved:
        improved = False
        for vertex in best.kept:
            if problem.forced[vertex] or vertex not in best.kept:
                continue
            others = [other for other in best.kept if other != vertex]
            neighbours = (*problem.predecessors[vertex], *problem.successors[vertex])
            for instead in ([], *([n] for n in neighbours if n not in best.kept)):
                if judgements == 0 or time.perf_counter() >= deadline:
                    return best
                judgements -= 1
                found = problem.judged([*others, *instead])
                if found is not None and _better(best, found) is not best:
                    best = found
                    improved = True
                    break
    return best


def _interval(low: int, high: int, floor: int) -> list[Interval]:
    """The interval, or nothing if it is empty."""
    return [(floor + low, low, high, floor)] if low <= high else []


def _better(best: JudgedSet, found: JudgedSet) -> JudgedSet:
    """Of equally good sets the one with fewer checkpoints."""
    return min(best, found, key=lambda judged: (judged.total_bytes, len(judged.kept)))


def _narrowest(problem: IndexedProblem, orders: Iterable[Sequence[int]]) -> tuple[Sequence[int], int]:
    """The elimination order that promises the fewest shapes at its frontier, and its widest frontier."""
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
