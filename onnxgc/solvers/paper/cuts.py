"""The best cuts over one order of the vertices: a segment lies between two cuts.

A cut at a position keeps every tensor that is computed before it and read after it. Segments need not be
independent, so cuts help where the paper's segments are large. They depend on the order, however, and
a cut keeps everything that is live at its position.
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from onnxgc.graph.components import connected_components, contracts_without_cycle
from onnxgc.solvers.paper.indexed_problem import IndexedProblem

MAX_PAIRS = 2_000_000
"""Pairs of cuts over one order; in a larger graph, pairs that are far apart are left out."""
MAX_PATH_EFFORT = 100_000
"""Effort of all searches over one order: shortest paths times vertices."""

_NEVER = 2**60
"""More than any number of bytes."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """The cuts that may follow one cut, the nearest first.

    By following cut: the heaviest segment between the two (rising), and the bytes that it keeps in addition
    to those that the first cut keeps.
    """

    heaviest_bytes: list[int]
    added_bytes: NDArray[np.int64]


class CutSearch:
    """The cheapest cuts over an order such that no segment is heavier than a cap.

    Cut number c lies after the first c vertices of the order. The constructor tabulates all pairs of cuts
    with segments of up to `max_bytes` between them: O(vertices * edges) at worst, for at most `MAX_PAIRS`
    pairs. After `deadline` it includes neighbouring cuts only.
    """

    def __init__(self, problem: IndexedProblem, order: Sequence[int], max_bytes: int, deadline: float) -> None:
        self._problem = problem
        self._order = order
        position = [0] * len(problem)
        for index, vertex in enumerate(order):
            position[vertex] = index
        self._position = position
        self._last_read = [max([position[v], *(position[head] for head in problem.successors[v])]) for v in order]
        self._paths_left = MAX_PATH_EFFORT // len(problem)
        self._convex: dict[tuple[int, int], bool] = {}
        self._tables = self._tabulate(max_bytes, deadline)

    def cheapest_under(self, cap_bytes: int) -> list[int] | None:
        """The vertices to keep under a cap; `None` if no cuts meet it, or the effort is spent."""
        while self._paths_left > 0:
            self._paths_left -= 1
            cuts = self._shortest_path(cap_bytes)
            if cuts is None:
                return None
            not_convex = [arc for arc in pairwise(cuts) if not self._is_convex(*arc)]
            if not not_convex:
                return self._kept_at(cuts)
            for start, stop in not_convex:
                self._tables[start].added_bytes[stop - start - 1] = _NEVER
        return None

    def _tabulate(self, max_bytes: int, deadline: float) -> list[_Reach]:
        problem, order = self._problem, self._order
        count = len(order)
        sizes = [0 if problem.forced[v] else problem.sizes[v] for v in order]
        free = [not problem.forced[v] for v in order]
        neighbours = [[self._position[n] for n in problem.neighbours[v]] for v in order]
        last_read = self._last_read
        ending: list[list[int]] = [[] for _ in order]
        for index in range(count):
            if free[index]:
                ending[last_read[index]].append(index)
        tables = []
        for start in range(count):
            heaviest_bytes: list[int] = []
            added_bytes: list[int] = []
            root: dict[int, int] = {}
            weight: dict[int, int] = {}
            heaviest = live = 0
            max_stops = MAX_PAIRS // count if time.perf_counter() < deadline else 1
            stops = range(start, min(count, start + max_stops))
            for stop in stops:
                live += sizes[stop]
                for index in ending[stop]:
                    if index < start:
                        continue
                    live -= sizes[index]
                    root[index] = index
                    total = sizes[index]
                    for neighbour in neighbours[index]:
                        if neighbour in root:
                            while root[neighbour] != neighbour:
                                root[neighbour] = neighbour = root[root[neighbour]]
                            if neighbour != index:
                                root[neighbour] = index
                                total += weight[neighbour]
                    weight[index] = total
                    if total > heaviest:
                        heaviest = total
                if heaviest > max_bytes:
                    break
                heaviest_bytes.append(heaviest)
                added_bytes.append(live)
            tables.append(_Reach(heaviest_bytes, np.array(added_bytes, dtype=np.int64)))
        return tables

    def _shortest_path(self, cap_bytes: int) -> list[int] | None:
        count = len(self._order)
        least = np.full(count + 1, _NEVER, dtype=np.int64)
        least[0] = 0
        before = np.zeros(count + 1, dtype=np.int64)
        for start, reach in enumerate(self._tables):
            width = bisect_right(reach.heaviest_bytes, cap_bytes)
            if width == 0 or least[start] >= _NEVER:
                continue
            through = reach.added_bytes[:width] + least[start]
            window = least[start + 1 : start + 1 + width]
            better = through < window
            window[better] = through[better]
            before[start + 1 : start + 1 + width][better] = start
        if least[count] >= _NEVER:
            return None
        cuts = [count]
        while cuts[-1]:
            cuts.append(int(before[cuts[-1]]))
        return cuts[::-1]

    def _kept_at(self, cuts: Sequence[int]) -> list[int]:
        kept = []
        stop = iter(cuts)
        cut = next(stop)
        for index, vertex in enumerate(self._order):
            while cut <= index:  # The first cut after the vertex.
                cut = next(stop)
            if self._last_read[index] >= cut:
                kept.append(vertex)
        return kept

    def _is_convex(self, start: int, stop: int) -> bool:
        """Whether the segments between two cuts can be ordered."""
        known = self._convex.get((start, stop))
        if known is None:
            known = self._convex[start, stop] = self._segments_contract(start, stop)
        return known

    def _segments_contract(self, start: int, stop: int) -> bool:
        problem, order = self._problem, self._order
        inside = set(order[start:stop])
        discarded = [
            order[index]
            for index in range(start, stop)
            if self._last_read[index] < stop and not problem.forced[order[index]]
        ]
        group = {vertex: vertex for vertex in inside}
        for segment in connected_components(discarded, problem.neighbours.__getitem__):
            group.update(dict.fromkeys(segment, segment[0]))
        edges = ((tail, head) for tail in inside for head in problem.successors[tail] if head in inside)
        return contracts_without_cycle(group, edges)
