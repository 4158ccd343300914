"""The paper's search for arbitrary computation graphs, made exact.

The plan minimises the paper's objective over all sets of checkpoints whose segments are independent
(reading A of `onnxgc.graph.segments`), on any directed acyclic graph.

Source: the paper, Algorithms 1, 5 and 6. What differs from the printed text:

* Algorithm 5 on a Linear segment is one shortest path over all of its splitting vertices, in which a
  member that is too heavy costs what breaking it costs, its two ends being kept. (As printed it
  solves only what stands before such a member, and recurses into the wrong segment.)
* Algorithm 6 does not try every cost of every segment as the cap C on segments. The cost f(C) of an
  optimal set never rises with C, so f(high) + low bounds every solution whose heaviest segment lies
  between low and high; intervals of C are halved, the most promising one first.

Why the division tree loses nothing. Call a tree node *closed* when both its ends are kept.

1. A Branch or Complicate segment (no splitting vertex) with an inner checkpoint is closed. Suppose
   its target j is not kept, and let K be the component of j. On a path through the inner checkpoint
   to j, the last checkpoint w feeds K. Since w does not split the segment, and no path reaches the
   segment's source through w, there is a path from the graph's source to j without w; its last
   checkpoint feeds K too. So K has two entries. The argument for the source mirrors this.
2. So between two neighbouring kept splitting vertices of a closed Linear segment there is either one
   member, itself closed, or several that are whole and form one component.
3. In a closed Branch segment each branch is a component, or closed, on its own.
4. A Complicate segment with an inner checkpoint keeps all its connectors. Suppose connector x is not
   kept, and let a, b be the entry and exit of its component K. Removing two vertices never
   separates connectors (ends included): what is cut off from both ends of the segment would be
   a smaller segment around one of them. So K has all connectors but a and b, and those are the
   two ends, which are kept by 1; then K is the whole interior and there is no inner checkpoint.

By induction from the root, whose ends are always kept, every valid set is found in the tree, and
each set found there is valid.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from dataclasses import dataclass

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.division import DivisionKind, DivisionTree, build_division_tree
from onnxgc.graph.terminals import forced_checkpoints
from onnxgc.planning.objective import Objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CappedOptimum:
    """The cheapest checkpoints under a cap on segments.

    `interior_bytes` and `checkpoints` leave out the graph's source and target.
    `heaviest_segment_bytes` may lie below the cap.
    """

    checkpoints: tuple[Vertex, ...]
    interior_bytes: int
    heaviest_segment_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.interior_bytes + self.heaviest_segment_bytes


class CappedSearch:
    """Algorithm 5: the cheapest checkpoints such that no segment is heavier than a cap.

    Build it once a problem (one division tree), ask it for any number of caps.
    """

    def __init__(self, problem: CheckpointProblem) -> None:
        graph = problem.closed_graph()
        self._nodes: list[_Node] = []
        if len(graph) == 1:
            return
        # Of sets of equal bytes the one with fewest checkpoints is taken: each counts 1 in a
        # weight whose unit byte is larger than any number of checkpoints.
        self._unit = len(graph)
        number: dict[int, int] = {}
        for tree in build_division_tree(graph).walk():
            number[id(tree)] = len(self._nodes)
            self._nodes.append(self._prepare(problem, tree, [number[id(member)] for member in tree.members]))

    def under(self, cap_bytes: int) -> CappedOptimum:
        """The optimum where each segment has at most `cap_bytes`, which is at least 0.

        O(vertices): a Linear segment is a shortest path over its splitting vertices, whose
        admissible predecessors form a sliding window.
        """
        if not self._nodes:
            return CappedOptimum((), 0, 0)
        weights = [0] * len(self._nodes)
        previous_stop: dict[int, list[int]] = {}
        for number, node in enumerate(self._nodes):
            if node.interior_bytes <= cap_bytes:
                continue
            if node.kind is DivisionKind.LINEAR:
                weights[number], previous_stop[number] = self._shortest_path(node, weights, cap_bytes)
            else:
                weights[number] = sum(node.connector_weights) + sum(weights[m] for m in node.members)
        return self._trace(previous_stop, cap_bytes)

    def _prepare(self, problem: CheckpointProblem, tree: DivisionTree, members: list[int]) -> _Node:
        sizes = [problem.size_bytes(vertex) for vertex in tree.connectors]
        inside = [self._nodes[member].interior_bytes for member in members]
        before = [0]
        if tree.kind is DivisionKind.LINEAR:
            for size, member_bytes in zip([0, *sizes], inside, strict=True):
                before.append(before[-1] + size + member_bytes)
        return _Node(
            kind=tree.kind,
            members=members,
            connectors=tree.connectors,
            connector_sizes=sizes,
            connector_weights=[size * self._unit + 1 for size in sizes],
            interior_bytes=sum(sizes) + sum(inside),
            bytes_before=before,
        )

    @staticmethod
    def _shortest_path(node: _Node, weights: list[int], cap_bytes: int) -> tuple[int, list[int]]:
        """Algorithm 1 over the stops of a Linear segment: its source, its splitting vertices, its target.

        Returns the weight of the kept splitting vertices with all that is kept in broken members,
        and for each stop the kept stop before it on the best path there.
        """
        before = node.bytes_before
        sizes = [0, *node.connector_sizes, 0]
        stop_weights = [0, *node.connector_weights, 0]
        best = [0] * len(before)
        previous = [0] * len(before)
        # Stops from which a segment may still reach the current one, the best in front. Each is worse
        # than those in front of it and stays admissible for longer; any other stop is never needed.
        window: deque[int] = deque()
        for stop in range(1, len(before)):
            newest = stop - 1
            while window and best[window[-1]] >= best[newest]:
                window.pop()
            window.append(newest)
            reach = before[stop] - cap_bytes
            while window and before[window[0]] + sizes[window[0]] < reach:
                window.popleft()
            # The member in between on its own, whole or broken, needs no cap.
            choice, weight = newest, best[newest] + weights[node.members[newest]]
            if window and best[window[0]] < weight:
                choice, weight = window[0], best[window[0]]
            best[stop] = weight + stop_weights[stop]
            previous[stop] = choice
        return best[-1], previous

    def _trace(self, previous_stop: dict[int, list[int]], cap_bytes: int) -> CappedOptimum:
        """Walk the choices from the root down; every node that is reached is closed."""
        checkpoints: list[Vertex] = []
        kept_bytes = 0
        heaviest = 0
        reached = [len(self._nodes) - 1]
        while reached:
            number = reached.pop()
            node = self._nodes[number]
            if node.kind is DivisionKind.BRANCH:
                reached.extend(node.members)
            elif node.interior_bytes <= cap_bytes:
                heaviest = max(heaviest, node.interior_bytes)
            elif node.kind is DivisionKind.COMPLICATE:
                checkpoints.extend(node.connectors)
                kept_bytes += sum(node.connector_sizes)
                reached.extend(node.members)
            else:
                previous = previous_stop[number]
                stop = len(previous) - 1
                while stop:
                    start = previous[stop]
                    if start == stop - 1:
                        reached.append(node.members[start])
                    else:
                        heaviest = max(heaviest, node.segment_bytes(start, stop))
                    if start:
                        checkpoints.append(node.connectors[start - 1])
                        kept_bytes += node.connector_sizes[start - 1]
                    stop = start
        return CappedOptimum(tuple(checkpoints), kept_bytes, heaviest)


@dataclass(frozen=True, slots=True)
class _Node:
    """A division tree node with its sizes added up.

    `members` are node numbers. The stops of a Linear node are its source, its connectors and its
    target; `bytes_before[stop]` is all that lies between the source and that stop.
    """

    kind: DivisionKind
    members: list[int]
    connectors: tuple[Vertex, ...]
    connector_sizes: list[int]
    connector_weights: list[int]
    interior_bytes: int
    bytes_before: list[int]

    def segment_bytes(self, start: int, stop: int) -> int:
        """All that lies between two stops of a Linear node."""
        start_size = self.connector_sizes[start - 1] if start else 0
        return self.bytes_before[stop] - self.bytes_before[start] - start_size


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Algorithm 6: the best cap on segments, by halving.

    With a time limit the best plan so far is returned when time is up, with a lower bound.
    """
    limit = options.time_limit_seconds
    deadline = math.inf if limit is None else time.perf_counter() + limit
    capped = CappedSearch(problem)
    best = capped.under(problem.total_bytes)
    # Heaviest segments low..high that are not explored, and what their checkpoints cost at least:
    # (lower bound, low, high, floor).
    unexplored = [(best.interior_bytes, 0, best.heaviest_segment_bytes - 1, best.interior_bytes)]
    asked = 1
    out_of_time = False
    while unexplored and unexplored[0][0] < best.total_bytes and not out_of_time:
        _, low, high, floor = heapq.heappop(unexplored)
        cap = (low + high) // 2
        found = capped.under(cap)
        asked += 1
        best = min(best, found, key=lambda optimum: optimum.total_bytes)
        # From the heaviest segment found up to the cap, nothing is cheaper than what was found.
        below = (low, found.heaviest_segment_bytes - 1, found.interior_bytes)
        above = (cap + 1, high, floor)
        for low, high, floor in (below, above):
            if low <= high:
                heapq.heappush(unexplored, (floor + low, low, high, floor))
        out_of_time = time.perf_counter() >= deadline
    logger.debug("%d caps tried, best %d bytes beside the ends", asked, best.total_bytes)

    bound = min(best.total_bytes, unexplored[0][0]) if unexplored else best.total_bytes
    end_bytes = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
    return Finding(
        plan=CheckpointPlan.for_graph(problem.graph, best.checkpoints),
        status=Status.OPTIMAL if bound == best.total_bytes else Status.FEASIBLE,
        lower_bound_bytes=bound + end_bytes,
    )


ACG = Solver(
    name="acg",
    summary="the paper's optimal search over independent segments",
    search=search,
    exact_for=Objective.PAPER,
)
