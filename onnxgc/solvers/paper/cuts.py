"""The best cuts over one order of the steps: a segment is what is computed between two cuts.

A cut after some step keeps all that was computed by then and is read later. Nothing needs to be
independent for that, so cuts serve where the paper's segments are large; but they depend on the
order, and at a cut they keep everything that is alive.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from onnxgc.solvers.paper.indexed_problem import IndexedProblem

MOST_PAIRS = 2_000_000
"""Pairs of cuts over one order; in a larger graph, cuts that are far apart are left out."""
MOST_STEPS = 100_000
"""The effort of all searches over one order: paths that are searched, times vertices."""

_NEVER = 2**60
"""More than any number of bytes."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """The cuts that may follow one cut, the nearest first.

    Of each: the heaviest segment between the two (rising), and the bytes that it keeps beside what
    the first one keeps.
    """

    heaviest_bytes: list[int]
    added_bytes: NDArray[np.int64]


class CutSearch:
    """The cheapest cuts over an order such that no segment is heavier than a cap.

    Build it once an order; it holds pairs of cuts with segments of up to `most_bytes` between them,
    and ends early, with fewer pairs, at `deadline`.

    Cut number c lies after the first c steps.
    """

    def __init__(
        self, problem: IndexedProblem, order: Sequence[int], most_bytes: int, deadline: float
    ) -> None:
        self._problem = problem
        self._order = order
        position = [0] * len(problem)
        for place, vertex in enumerate(order):
            position[vertex] = place
        self._position = position
        self._last_read = [
            max([position[v], *(position[head] for head in problem.successors[v])]) for v in order
        ]
        self._paths_left = MOST_STEPS // len(problem)
        self._convex: dict[tuple[int, int], bool] = {}
        self._tables = self._tabulate(most_bytes, deadline)

    def under(self, cap_bytes: int) -> list[int] | None:
        """The vertices to keep under a cap; `None` if cuts cannot meet it, or all effort is spent."""
        while self._paths_left > 0:
            self._paths_left -= 1
            cuts = self._shortest_path(cap_bytes)
            if cuts is None:
                return None
            crooked = [arc for arc in pairwise(cuts) if not self._is_convex(*arc)]
            if not crooked:
                return self._kept_at(cuts)
            for start, stop in crooked:
                self._tables[start].added_bytes[stop - start - 1] = _NEVER
        return None

    def _tabulate(self, most_bytes: int, deadline: float) -> list[_Reach]:
        problem, order = self._problem, self._order
        count = len(order)
        sizes = [0 if problem.forced[v] else problem.sizes[v] for v in order]
        free = [not problem.forced[v] for v in order]
        neighbours = [
            [self._position[n] for n in (*problem.predecessors[v], *problem.successors[v])] for v in order
        ]
        last_read = self._last_read
        ending: list[list[int]] = [[] for _ in order]
        for place in range(count):
            if free[place]:
                ending[last_read[place]].append(place)
        tables = []
        for start in range(count):
            heaviest_bytes: list[int] = []
            added_bytes: list[int] = []
            root: dict[int, int] = {}
            weight: dict[int, int] = {}
            heaviest = alive = 0
            most = MOST_PAIRS // count if time.perf_counter() < deadline else 1
            stops = range(start, min(count, start + most))
            for stop in stops:
                alive += sizes[stop]
                for place in ending[stop]:
                    if place < start:
                        continue
                    alive -= sizes[place]
                    root[place] = place
                    total = sizes[place]
                    for neighbour in neighbours[place]:
                        if neighbour in root:
                            while root[neighbour] != neighbour:
                                root[neighbour] = neighbour = root[root[neighbour]]
                            if neighbour != place:
                                root[neighbour] = place
                                total += weight[neighbour]
                    weight[place] = total
                    if total > heaviest:
                        heaviest = total
                if heaviest > most_bytes:
                    break
                heaviest_bytes.append(heaviest)
                added_bytes.append(alive)
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
        for place, vertex in enumerate(self._order):
            while cut <= place:  # The first cut behind the step of the vertex.
                cut = next(stop)
            if self._last_read[place] >= cut:
                kept.append(vertex)
        return kept

    def _is_convex(self, start: int, stop: int) -> bool:
        """Whether the segments between two cuts can be put in a row."""
        known = self._convex.get((start, stop))
        if known is None:
            known = self._convex[start, stop] = self._contracts_without_cycle(start, stop)
        return known

    def _contracts_without_cycle(self, start: int, stop: int) -> bool:
        problem, order = self._problem, self._order
        inside = {order[place]: place for place in range(start, stop)}
        loose = {v for v, place in inside.items() if self._last_read[place] < stop and not problem.forced[v]}
        group: dict[int, int] = {}
        for first in inside:
            if first in group:
                continue
            group[first] = first
            found = [first]
            for vertex in found:  # grows while it is walked
                if vertex not in loose:
                    break
                for neighbour in (*problem.predecessors[vertex], *problem.successors[vertex]):
                    if neighbour in loose and neighbour not in group:
                        group[neighbour] = first
                        found.append(neighbour)
        heads: dict[int, list[int]] = {number: [] for number in group.values()}
        waiting = dict.fromkeys(heads, 0)
        for tail in inside:
            for head in problem.successors[tail]:
                if head in inside and group[head] != group[tail]:
                    heads[group[tail]].append(group[head])
                    waiting[group[head]] += 1
        ready = [number for number, left in waiting.items() if left == 0]
        for number in ready:  # grows while it is walked
            for head in heads[number]:
                waiting[head] -= 1
                if waiting[head] == 0:
                    ready.append(head)
        return len(ready) == len(heads)
