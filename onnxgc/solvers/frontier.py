"""A dynamic programme over the frontier between the vertices decided and those to come.

Vertices are decided one after the other, kept or not, in any *elimination order*. What the decided
ones mean for the others shows at the frontier: the decided vertices that have a neighbour to come.
Which of them are kept, which share a component, what each component weighs so far, and which item
(a component or a kept vertex) has a path to which through decided vertices: sets with the same
*shape* differ by numbers only, and of two with the same shape one is often at least as good in
every number. Under a cap on components the cheapest set is then found exactly, in time that grows
with the width of the frontier and not with the number of sets.

Why paths need to be followed. A set is valid under reading G if its components, contracted to one
vertex each, leave a graph without cycles. Items that are joined must have no path between them,
and an item that gains a path to another must not be reached from it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from onnxgc.solvers.indexed import IndexedProblem

Shape: TypeAlias = tuple[tuple[int, ...], int]
"""Per frontier vertex its component's number, by first appearance, or -1 if it is kept; and bit
x * items + y is set where item x reaches item y. Components are the first items, then come the kept
frontier vertices in the frontier's order."""

Chain: TypeAlias = "tuple[int, Chain] | None"
"""Kept vertices, the last one first."""

State: TypeAlias = tuple[int, tuple[int, ...], Chain]
"""Bytes kept, bytes of each open component, and the vertices kept."""


@dataclass(frozen=True, slots=True)
class FrontierResult:
    """What one walk found under a cap.

    `kept` (forced vertices left out) is the cheapest set of `kept_bytes` bytes, `None` if there is
    none in the budget or it was lost. `floor_bytes` bounds the bytes kept by any set from below;
    where there is none in the budget, it may say no more than that. `least_bytes[n]` bounds those
    kept among the first n vertices of the elimination order.
    """

    kept: tuple[int, ...] | None
    kept_bytes: int
    floor_bytes: int
    least_bytes: list[int]
    most_states: int


@dataclass(frozen=True, slots=True)
class _Step:
    """How the frontier changes when a vertex is decided.

    Slots number the frontier's vertices before the step, the new vertex behind them.
    """

    vertex: int
    size_bytes: int
    forced: bool
    predecessor_slots: tuple[int, ...]
    successor_slots: tuple[int, ...]
    staying_slots: tuple[int, ...]
    entered: tuple[bool, ...]
    """Of each staying slot: whether all predecessors are decided."""
    left: tuple[bool, ...]
    """Of each staying slot: whether all successors are decided."""
    moves: dict[tuple[Shape, bool], _Move | None] = field(default_factory=dict)
    words: dict[Shape, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Move:
    """What a decision makes of a shape. `merged` are the components that join the new vertex.

    `sources` says for each component of the new shape which old one it is, -1 for the joined one.
    """

    shape: Shape
    merged: tuple[int, ...]
    sources: tuple[int, ...]
    unchanged: bool


class FrontierSearch:
    """The cheapest sets under a cap, along one elimination order."""

    def __init__(self, problem: IndexedProblem, order: Sequence[int], *, convex: bool = True) -> None:
        """With `convex` false, paths are not followed: a relaxation that needs fewer shapes."""
        self.order = tuple(order)
        self._convex = convex
        self._steps = _steps(problem, order)

    @property
    def widths(self) -> list[int]:
        """Number of frontier vertices after each step."""
        return [len(step.staying_slots) for step in self._steps]

    def under(
        self,
        cap_bytes: int,
        budget_bytes: int,
        rest_bytes: Sequence[int],
        most_states: int,
        *,
        relax: bool = False,
        deadline: float = float("inf"),
    ) -> FrontierResult:
        """Decide all vertices.

        Sets that keep more than `budget_bytes` in the end are left out; `rest_bytes[n]` bounds what
        any set keeps behind the first n vertices. Above `most_states` sets a step the dearest are
        dropped or, with `relax`, replaced by one that is at least as good as each of them.
        """
        groups: dict[Shape, list[State]] = {((), 0): [(0, (), None)]}
        least = [0]
        dropped = peak = 0
        lost: int | None = None
        for number, step in enumerate(self._steps, start=1):
            if time.perf_counter() >= deadline:
                reached = (
                    min((s[0] for g in groups.values() for s in g), default=budget_bytes)
                    + rest_bytes[number - 1]
                )
                return FrontierResult(None, 0, _least_of(reached, lost), least, peak)
            groups = self._advance(groups, step, cap_bytes, budget_bytes - rest_bytes[number])
            groups = {shape: _undominated(states) for shape, states in groups.items()}
            count = sum(map(len, groups.values()))
            if count > _FEW and len(step.staying_slots) <= _NARROW:
                groups = self._undominated_across(step, groups)
            elif count > _FEW and self._convex:
                groups = _without_needless_paths(groups)
            if count > _FEW:
                count = sum(map(len, groups.values()))
            peak = max(peak, count)
            if count > most_states:
                if relax:
                    groups = _relaxed(groups, most_states)
                else:
                    groups, cheapest = _restricted(groups, most_states)
                    dropped += 1
                    lost = _least_of(cheapest + rest_bytes[number], lost)
            least.append(min((s[0] for g in groups.values() for s in g), default=budget_bytes + 1))
        states = groups.get(((), 0), [])
        if not states:
            return FrontierResult(None, 0, _least_of(budget_bytes + 1, lost), least, peak)
        best = min(states, key=itemgetter(0))
        return FrontierResult(
            kept=None if relax else _members(best[2]),
            kept_bytes=best[0],
            floor_bytes=_least_of(best[0], lost),
            least_bytes=least,
            most_states=peak,
        )

    def _advance(
        self, groups: dict[Shape, list[State]], step: _Step, cap: int, budget: int
    ) -> dict[Shape, list[State]]:
        advanced: dict[Shape, list[State]] = {}
        size, vertex = step.size_bytes, step.vertex
        for shape, states in groups.items():
            move = self._move(step, shape, keep=True)
            if move is not None:
                sources = move.sources
                fresh = advanced.setdefault(move.shape, [])
                most = budget - size
                if step.forced:
                    fresh += [
                        (kept, weights if move.unchanged else tuple([weights[s] for s in sources]), chain)
                        for kept, weights, chain in states
                        if kept <= most
                    ]
                elif move.unchanged:
                    fresh += [
                        (kept + size, weights, (vertex, chain))
                        for kept, weights, chain in states
                        if kept <= most
                    ]
                else:
                    fresh += [
                        (kept + size, tuple([weights[s] for s in sources]), (vertex, chain))
                        for kept, weights, chain in states
                        if kept <= most
                    ]
            if step.forced:
                continue
            move = self._move(step, shape, keep=False)
            if move is None:
                continue
            fresh = advanced.setdefault(move.shape, [])
            merged, sources = move.merged, move.sources
            for kept, weights, chain in states:
                total = size
                for component in merged:
                    total += weights[component]
                if total <= cap and kept <= budget:
                    fresh.append((kept, tuple([weights[s] if s >= 0 else total for s in sources]), chain))
        return advanced

    def _undominated_across(self, step: _Step, groups: dict[Shape, list[State]]) -> dict[Shape, list[State]]:
        width = len(step.staying_slots)
        for shape in groups:
            if shape not in step.words:
                step.words[shape] = _mask_words(shape, width)
        return _undominated_across(groups, step.words, width)

    def _move(self, step: _Step, shape: Shape, *, keep: bool) -> _Move | None:
        key = (shape, keep)
        if key not in step.moves:
            step.moves[key] = _move(step, shape, keep=keep, convex=self._convex)
        return step.moves[key]


def _least_of(bytes_: int, lost: int | None) -> int:
    return bytes_ if lost is None else min(bytes_, lost)


def _steps(problem: IndexedProblem, order: Sequence[int]) -> list[_Step]:
    undecided_above = [len(tails) for tails in problem.predecessors]
    undecided_below = [len(heads) for heads in problem.successors]
    frontier: list[int] = []
    steps = []
    for vertex in order:
        for head in problem.successors[vertex]:
            undecided_above[head] -= 1
        for tail in problem.predecessors[vertex]:
            undecided_below[tail] -= 1
        slot = {v: place for place, v in enumerate(frontier)}
        frontier.append(vertex)
        staying = [place for place, v in enumerate(frontier) if undecided_above[v] or undecided_below[v]]
        frontier_after = [frontier[place] for place in staying]
        steps.append(
            _Step(
                vertex=vertex,
                size_bytes=0 if problem.forced[vertex] else problem.sizes[vertex],
                forced=problem.forced[vertex],
                predecessor_slots=tuple(slot[v] for v in problem.predecessors[vertex] if v in slot),
                successor_slots=tuple(slot[v] for v in problem.successors[vertex] if v in slot),
                staying_slots=tuple(staying),
                entered=tuple(undecided_above[v] == 0 for v in frontier_after),
                left=tuple(undecided_below[v] == 0 for v in frontier_after),
            )
        )
        frontier = frontier_after
    return steps


def _move(step: _Step, shape: Shape, *, keep: bool, convex: bool) -> _Move | None:
    """The shape after a decision; `None` if it makes the set invalid."""
    labels, paths = shape
    components = max(labels, default=-1) + 1
    items: list[int] = []  # per slot
    count = components
    for label in labels:
        items.append(label if label >= 0 else count)
        count += label < 0
    row = (1 << count) - 1
    reach = [paths >> (x * count) & row for x in range(count)]
    new = count
    merged: list[int] = []
    inputs = outputs = 0  # bitsets of items
    for slot in step.predecessor_slots:
        if keep or labels[slot] < 0:
            inputs |= 1 << items[slot]
        elif items[slot] not in merged:
            merged.append(items[slot])
    for slot in step.successor_slots:
        if keep or labels[slot] < 0:
            outputs |= 1 << items[slot]
        elif items[slot] not in merged:
            merged.append(items[slot])
    joined = sum(1 << item for item in merged)
    if convex:
        above, below = inputs, outputs
        for item in range(count):
            if reach[item] & (joined | inputs):
                above |= 1 << item
            if (joined | outputs) >> item & 1:
                below |= reach[item]
        if (above | joined) & below or above & joined:
            return None
        for item in range(count):
            if above >> item & 1:
                reach[item] |= below | 1 << new
        reach.append(below)

    # Names for what stays: components by first appearance, then kept vertices.
    new_labels: list[int] = []
    name: dict[int, int] = {}
    sources: list[int] = []
    kept_items: list[tuple[int, bool, bool]] = []
    for staying, slot in enumerate(step.staying_slots):
        if slot < len(labels):
            item = items[slot]
            is_kept = labels[slot] < 0
            if joined >> item & 1:
                item = new
        else:
            item, is_kept = new, keep
        if is_kept:
            new_labels.append(-1)
            kept_items.append((item, step.entered[staying], step.left[staying]))
            continue
        if item not in name:
            name[item] = len(sources)
            sources.append(-1 if item == new else item)
        new_labels.append(name[item])
    new_paths = 0
    if convex:
        # A kept vertex that nothing new will reach starts no new cycle; likewise at its other end.
        rows = [(item, True, True) for item in name] + [(i, not e, not o) for i, e, o in kept_items]
        width = len(rows)
        for x, (item, counts, _) in enumerate(rows):
            if counts and reach[item]:
                for y, (other, _, counted) in enumerate(rows):
                    if counted and reach[item] >> other & 1:
                        new_paths |= 1 << (x * width + y)
    return _Move(
        shape=(tuple(new_labels), new_paths),
        merged=tuple(merged),
        sources=tuple(sources),
        unchanged=sources == list(range(components)),
    )


def _undominated(states: list[State]) -> list[State]:
    """Of states of one shape those that no other matches in every number."""
    if len(states) < 2:
        return states
    states.sort(key=itemgetter(0, 1))
    width = len(states[0][1])
    if width == 0:
        return states[:1]
    if width == 1:
        least = states[0][1][0] + 1
        found = []
        for state in states:
            weight = state[1][0]
            if weight < least:
                least = weight
                found.append(state)
        return found
    found = []
    fronts: list[tuple[int, ...]] = []
    if width == 2:
        for state in states:
            a, b = state[1]
            for c, d in fronts:
                if c <= a and d <= b:
                    break
            else:
                fronts.append(state[1])
                found.append(state)
        return found
    for state in states:
        weights = state[1]
        for other in fronts:
            for theirs, ours in zip(other, weights, strict=True):
                if theirs > ours:
                    break
            else:
                break
        else:
            fronts.append(weights)
            found.append(state)
    return found


def _without_needless_paths(groups: dict[Shape, list[State]]) -> dict[Shape, list[State]]:
    """Drop states that one with the same labels and fewer paths matches in every number."""
    by_labels: dict[tuple[int, ...], list[int]] = {}
    for labels, paths in groups:
        by_labels.setdefault(labels, []).append(paths)
    found: dict[Shape, list[State]] = {}
    for labels, several in by_labels.items():
        several.sort(key=lambda paths: (paths.bit_count(), paths))
        for place, paths in enumerate(several):
            states = groups[labels, paths]
            for fewer in several[:place]:
                if fewer & ~paths == 0 and states:
                    better = found.get((labels, fewer), ())
                    states = [
                        (kept, weights, chain)
                        for kept, weights, chain in states
                        if not any(k <= kept and all(map(int.__le__, w, weights)) for k, w, _ in better)
                    ]
            if states:
                found[labels, paths] = states
    return found


def _mask_words(shape: Shape, width: int) -> list[int]:
    """Which frontier vertices are open, share a component, or reach which, in words of 63 bits."""
    labels, paths = shape
    components = max(labels, default=-1) + 1
    items: list[int] = []
    count = components
    for label in labels:
        items.append(label if label >= 0 else count)
        count += label < 0
    bits = place = 0
    for a in range(width):
        for b in range(width):
            if labels[a] >= 0 and labels[a] == labels[b]:
                bits |= 1 << place
            if paths >> (items[a] * count + items[b]) & 1:
                bits |= 1 << place + 1
            place += 2
    words = []
    for _ in range(max(1, -(-2 * width * width // 63))):
        words.append(bits & (1 << 63) - 1)
        bits >>= 63
    return words


def _undominated_across(
    groups: dict[Shape, list[State]], words_of: dict[Shape, list[int]], width: int
) -> dict[Shape, list[State]]:
    """Drop states that another one, of whatever shape, matches in every number.

    A set is at least as good for all that is to come as another one if it keeps no more, and of
    the frontier vertices no more are open, no more share a component, none lies in a heavier
    component, and none reaches more of the others. For then every choice that the other one admits
    makes components that are parts of the other one's, and a cycle through them would, by the other
    one's components, be a cycle there or lie inside one of them; but no path leads from one part of
    a component to another.
    """
    everything = [(state, shape) for shape, states in groups.items() for state in states]
    everything.sort(key=lambda entry: entry[0][0])
    kept = np.array([state[0] for state, _ in everything])
    words = np.array([words_of[shape] for _, shape in everything])
    weights = np.array(
        [[state[1][label] if label >= 0 else 0 for label in shape[0]] for state, shape in everything]
    ).reshape(len(everything), width)
    few = min(len(everything), _MOST_COMPARED)
    matched = kept[:few, None] <= kept[None, :]
    for word in range(words.shape[1]):
        column = words[:, word]
        matched &= (column[:few, None] & ~column[None, :]) == 0
    for slot in range(width):
        column = weights[:, slot]
        matched &= column[:few, None] <= column[None, :]
    np.fill_diagonal(matched, False)
    dropped = matched.any(axis=0)
    found: dict[Shape, list[State]] = {}
    for (state, shape), drop in zip(everything, dropped.tolist(), strict=True):
        if not drop:
            found.setdefault(shape, []).append(state)
    return found


def _restricted(groups: dict[Shape, list[State]], most_states: int) -> tuple[dict[Shape, list[State]], int]:
    """The cheapest states, and what the cheapest of the dropped ones keeps."""
    everything = [
        (s[0], max(s[1], default=0), n, s, shape)
        for n, (shape, states) in enumerate(groups.items())
        for s in states
    ]
    everything.sort(key=itemgetter(0, 1, 2))
    found: dict[Shape, list[State]] = {}
    for _, _, _, state, shape in everything[:most_states]:
        found.setdefault(shape, []).append(state)
    return found, everything[most_states][0]


def _relaxed(groups: dict[Shape, list[State]], most_states: int) -> dict[Shape, list[State]]:
    """The cheapest states, and for the others some that are at least as good."""
    everything = [
        (s[0], max(s[1], default=0), n, s, shape)
        for n, (shape, states) in enumerate(groups.items())
        for s in states
    ]
    everything.sort(key=itemgetter(0, 1, 2))
    found: dict[Shape, list[State]] = {}
    for _, _, _, state, shape in everything[: most_states // 2]:
        found.setdefault(shape, []).append(state)
    rest = everything[most_states // 2 :]
    # One state for each choice of labels: the least of each number, the paths they have in common.
    merged: dict[tuple[int, ...], tuple[int, tuple[int, ...], int]] = {}
    for kept, _, _, state, (labels, paths) in rest:
        known = merged.get(labels)
        if known is None:
            merged[labels] = (kept, state[1], paths)
        else:
            merged[labels] = (min(kept, known[0]), tuple(map(min, state[1], known[1])), paths & known[2])
    ranked = sorted(merged.items(), key=lambda entry: (entry[1][0], entry[0]))
    for labels, (kept, weights, paths) in ranked[: most_states // 2 - 1]:
        found.setdefault((labels, paths), []).append((kept, weights, None))
    dearest = ranked[most_states // 2 - 1 :]
    if dearest:
        # Kept frontier vertices weigh nothing and join nothing.
        labels = (-1,) * len(dearest[0][0])
        found.setdefault((labels, 0), []).append((dearest[0][1][0], (), None))
    return {shape: _undominated(states) for shape, states in found.items()}


_FEW = 24
_NARROW = 12
_MOST_COMPARED = 500


def _members(chain: Chain) -> tuple[int, ...]:
    found = []
    while chain is not None:
        found.append(chain[0])
        chain = chain[1]
    return tuple(sorted(found))


def narrow_order(problem: IndexedProblem) -> list[int]:
    """An elimination order that keeps the frontier small, whatever the direction of edges.

    Of the vertices beside the frontier the one goes next that leaves the smallest frontier, and of
    equals the first.
    """
    count = len(problem)
    around = [(*problem.predecessors[v], *problem.successors[v]) for v in range(count)]
    left = [len(neighbours) for neighbours in around]  # undecided neighbours
    decided = [False] * count
    # What deciding a vertex adds to the frontier: itself, less those that it was the last to wait for.
    change = [(1 if left[v] else 0) for v in range(count)]
    for v in range(count):
        change[v] -= 0
    queue: list[tuple[int, int]] = []
    queued = [False] * count
    order: list[int] = []
    start = 0
    while len(order) < count:
        while queue:
            believed, vertex = heapq.heappop(queue)
            if not decided[vertex] and believed == change[vertex]:
                break
        else:
            while decided[start]:
                start += 1
            vertex = start
        decided[vertex] = True
        order.append(vertex)
        for neighbour in around[vertex]:
            left[neighbour] -= 1
            touched = [neighbour] if not decided[neighbour] else []
            if not decided[neighbour] and left[neighbour] == 0:
                change[neighbour] -= 1
            if decided[neighbour] and left[neighbour] == 1:
                last = next(v for v in around[neighbour] if not decided[v])
                change[last] -= 1
                touched.append(last)
            for one in touched:
                queued[one] = True
                heapq.heappush(queue, (change[one], one))
        if left[vertex] == 1:
            last = next(v for v in around[vertex] if not decided[v])
            change[last] -= 1
            heapq.heappush(queue, (change[last], last))
    return order


__all__ = ["FrontierResult", "FrontierSearch", "narrow_order"]
