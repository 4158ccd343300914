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
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from onnxgc.solvers.paper.indexed_problem import IndexedProblem

Shape: TypeAlias = tuple[tuple[int, ...], int]
"""Per frontier vertex its component's number, by first appearance, or -1 if it is kept; and bit
x * items + y is set where item x reaches item y. Components are the first items, then come the kept
frontier vertices in the frontier's order."""

Chain: TypeAlias = "tuple[int, Chain] | None"
"""Kept vertices, the last one first."""

Ranked: TypeAlias = tuple["State", Shape]

State: TypeAlias = tuple[int, tuple[int, ...], Chain]
"""Bytes kept, bytes of each open component, and the vertices kept."""


_MOVE_EFFORT = 7
"""Working out what a decision makes of a shape takes as long as so many states."""
_FEW = 24
"""So many states are not worth a look at which of them are needed."""
_NARROW = 12
"""Up to so many frontier vertices, states of different shapes are compared."""
_MOST_COMPARED = 500
"""So many of the cheapest states are tried against all others."""


@dataclass(frozen=True, slots=True)
class FrontierResult:
    """What one walk found under a cap.

    `kept` (forced vertices left out) is the cheapest set in the budget that was found. No set under
    the cap keeps less than `floor_bytes`, which says no more than "none in the budget" if it lies
    above it. `effort` counts the states on the way and, several times, the shapes first met.
    """

    kept: tuple[int, ...] | None
    floor_bytes: int
    effort: int


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

    def __init__(self, problem: IndexedProblem, order: Sequence[int]) -> None:
        self._steps = _steps(problem, order)

    def under(
        self,
        cap_bytes: int,
        budget_bytes: int,
        most_states: int,
        *,
        price: float = 0.0,
        relax: bool = False,
        deadline: float = math.inf,
    ) -> FrontierResult:
        """Decide all vertices such that no component is heavier than a cap.

        Sets that keep more than `budget_bytes` are left out. Above `most_states` states a step the
        least promising are dropped or, with `relax`, replaced by one that is at least as good as
        each of them; `price` is what an open byte is expected to cost in kept bytes. At `deadline`
        the walk ends without a set.
        """
        groups: dict[Shape, list[State]] = {((), 0): [(0, (), None)]}
        lost: int | None = None
        effort = 0
        for step in self._steps:
            if time.perf_counter() >= deadline:
                floor_bytes = min(_cheapest(groups), _least_of(budget_bytes + 1, lost))
                return FrontierResult(None, floor_bytes, effort)
            known = len(step.moves)
            groups = self._advance(groups, step, cap_bytes, budget_bytes)
            effort += sum(map(len, groups.values())) + _MOVE_EFFORT * (len(step.moves) - known)
            groups = self._pruned(groups, step)
            if sum(map(len, groups.values())) > most_states:
                ranked = _ranked(groups, price)
                if relax:
                    groups = _relaxed(ranked, most_states)
                else:
                    groups = _grouped(ranked[:most_states])
                    lost = _least_of(min(state[0] for state, _ in ranked[most_states:]), lost)
            if not groups:
                break
        states = groups.get(((), 0), [])
        floor_bytes = _least_of(min((state[0] for state in states), default=budget_bytes + 1), lost)
        best = None if relax else min(states, key=itemgetter(0), default=None)
        return FrontierResult(
            kept=None if best is None else _members(best[2]),
            floor_bytes=floor_bytes,
            effort=effort,
        )

    def _pruned(self, groups: dict[Shape, list[State]], step: _Step) -> dict[Shape, list[State]]:
        groups = {shape: _undominated(states) for shape, states in groups.items()}
        if sum(map(len, groups.values())) <= _FEW:
            return groups
        width = len(step.staying_slots)
        if width > _NARROW:
            return _without_needless_paths(groups)
        for shape in groups:
            if shape not in step.words:
                step.words[shape] = _mask_words(shape, width)
        return _undominated_across(groups, step.words, width)

    def _advance(
        self, groups: dict[Shape, list[State]], step: _Step, cap: int, budget: int
    ) -> dict[Shape, list[State]]:
        advanced: dict[Shape, list[State]] = {}
        size, vertex = step.size_bytes, step.vertex
        for shape, states in groups.items():
            move = self._move(step, shape, keep=True)
            if move is not None:
                fresh = [
                    (
                        kept + size,
                        weights if move.unchanged else tuple([weights[s] for s in move.sources]),
                        chain if step.forced else (vertex, chain),
                    )
                    for kept, weights, chain in states
                    if kept + size <= budget
                ]
                if fresh:
                    advanced.setdefault(move.shape, []).extend(fresh)
            if step.forced:
                continue
            move = self._move(step, shape, keep=False)
            if move is None:
                continue
            fresh = []
            merged, sources = move.merged, move.sources
            for kept, weights, chain in states:
                total = size
                for component in merged:
                    total += weights[component]
                if total <= cap and kept <= budget:
                    fresh.append((kept, tuple([weights[s] if s >= 0 else total for s in sources]), chain))
            if fresh:
                advanced.setdefault(move.shape, []).extend(fresh)
        return advanced

    def _move(self, step: _Step, shape: Shape, *, keep: bool) -> _Move | None:
        key = (shape, keep)
        if key not in step.moves:
            step.moves[key] = _move(step, shape, keep=keep)
        return step.moves[key]


def _least_of(bytes_: int, lost: int | None) -> int:
    return bytes_ if lost is None else min(bytes_, lost)


def _cheapest(groups: dict[Shape, list[State]]) -> int:
    return min(state[0] for states in groups.values() for state in states)


def frontier_widths(problem: IndexedProblem, order: Sequence[int]) -> list[int]:
    """Number of vertices on the frontier after each step of an elimination order."""
    undecided = [
        len(tails) + len(heads) for tails, heads in zip(problem.predecessors, problem.successors, strict=True)
    ]
    decided = [False] * len(problem)
    width = 0
    widths = []
    for vertex in order:
        decided[vertex] = True
        width += undecided[vertex] > 0
        for neighbours in (problem.predecessors[vertex], problem.successors[vertex]):
            for neighbour in neighbours:
                undecided[neighbour] -= 1
                width -= decided[neighbour] and undecided[neighbour] == 0
        widths.append(width)
    return widths


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


def _move(step: _Step, shape: Shape, *, keep: bool) -> _Move | None:
    """The shape after a decision; `None` if it makes the set invalid."""
    labels, paths = shape
    components = max(labels, default=-1) + 1
    items: list[int] = []  # per slot
    count = components
    for label in labels:
        items.append(label if label >= 0 else count)
        count += label < 0
    reach = [0] * count
    rest = paths
    while rest:
        lowest = rest & -rest
        x, y = divmod(lowest.bit_length() - 1, count)
        reach[x] |= 1 << y
        rest ^= lowest
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
    above, below = inputs, outputs
    for item, reached in enumerate(reach):
        if reached:
            if reached & (joined | inputs):
                above |= 1 << item
            if (joined | outputs) >> item & 1:
                below |= reached
    if (above | joined) & below or above & joined:
        return None
    rest = above
    while rest:
        lowest = rest & -rest
        reach[lowest.bit_length() - 1] |= below | 1 << new
        rest ^= lowest
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
    if any(reach):
        # A kept vertex that nothing new will reach starts no new cycle; likewise at its other end.
        rows = [(item, True, True) for item in name] + [(i, not e, not o) for i, e, o in kept_items]
        column = {item: y for y, (item, _, counted) in enumerate(rows) if counted}
        counted = sum(1 << item for item in column)
        for x, (item, counts, _) in enumerate(rows):
            rest = reach[item] & counted if counts else 0
            while rest:
                lowest = rest & -rest
                new_paths |= 1 << x * len(rows) + column[lowest.bit_length() - 1]
                rest ^= lowest
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
    if width == 2:
        return _undominated_pairs(states)
    if len(states) > _FEW:
        return _undominated_tuples(states)
    found = []
    for state in states:
        for other in found:
            if all(map(int.__le__, other[1], state[1])):
                break
        else:
            found.append(state)
    return found


def _undominated_pairs(states: list[State]) -> list[State]:
    """The same for two components, states sorted: what is left is a staircase that falls."""
    found = []
    firsts: list[int] = []
    seconds: list[int] = []
    for state in states:
        first, second = state[1]
        place = bisect_right(firsts, first)
        if place and seconds[place - 1] <= second:
            continue
        found.append(state)
        start = bisect_left(firsts, first)
        stop = start
        while stop < len(seconds) and seconds[stop] >= second:
            stop += 1
        firsts[start:stop] = [first]
        seconds[start:stop] = [second]
    return found


def _undominated_tuples(states: list[State]) -> list[State]:
    """The same for any number of components, states sorted; some that are dominated may be left."""
    distinct: dict[tuple[int, ...], State] = {}
    for state in states:
        distinct.setdefault(state[1], state)
    states = list(distinct.values())
    weights = np.array([state[1] for state in states])
    few = min(len(states), _MOST_COMPARED)
    # Sorted by what they keep, only an earlier state can match a later one.
    matched = np.triu(np.ones((few, len(states)), dtype=bool), 1)
    for column in weights.T:
        matched &= column[:few, None] <= column[None, :]
    dropped = np.logical_or.reduce(matched)
    return [state for state, drop in zip(states, dropped, strict=True) if not drop]


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
    dropped = np.logical_or.reduce(matched)
    found: dict[Shape, list[State]] = {}
    for (state, shape), drop in zip(everything, dropped, strict=True):
        if not drop:
            found.setdefault(shape, []).append(state)
    return found


def _ranked(groups: dict[Shape, list[State]], price: float) -> list[Ranked]:
    """The most promising first: the bytes kept, and what the open ones are expected to cost."""
    everything = [
        (state[0] + price * sum(state[1]), number, state, shape)
        for number, (shape, states) in enumerate(groups.items())
        for state in states
    ]
    everything.sort(key=itemgetter(0, 1))
    return [(state, shape) for _, _, state, shape in everything]


def _grouped(ranked: Iterable[Ranked]) -> dict[Shape, list[State]]:
    groups: dict[Shape, list[State]] = {}
    for state, shape in ranked:
        groups.setdefault(shape, []).append(state)
    return groups


def _relaxed(ranked: list[Ranked], most_states: int) -> dict[Shape, list[State]]:
    """The most promising states, and for the others some that are at least as good."""
    found = _grouped(ranked[: most_states // 2])
    rest = ranked[most_states // 2 :]
    # One state for each choice of labels: the least of each number, the paths they have in common.
    merged: dict[tuple[int, ...], tuple[int, tuple[int, ...], int]] = {}
    for (kept, weights, _), (labels, paths) in rest:
        known = merged.get(labels)
        if known is not None:
            kept, weights, paths = (
                min(kept, known[0]),
                tuple(map(min, weights, known[1])),
                paths & known[2],
            )
        merged[labels] = (kept, weights, paths)
    choices = sorted(merged.items(), key=lambda choice: (choice[1][0], choice[0]))
    few = most_states // 2 - 1
    for labels, (kept, weights, paths) in choices[:few]:
        found.setdefault((labels, paths), []).append((kept, weights, None))
    if choices[few:]:
        # Kept frontier vertices weigh nothing and join nothing.
        labels, (kept, _, _) = choices[few]
        found.setdefault(((-1,) * len(labels), 0), []).append((kept, (), None))
    return {shape: _undominated(states) for shape, states in found.items()}


def _members(chain: Chain) -> tuple[int, ...]:
    found = []
    while chain is not None:
        found.append(chain[0])
        chain = chain[1]
    return tuple(sorted(found))


def narrow_part(
    problem: IndexedProblem, order: Sequence[int], most_width: int
) -> tuple[IndexedProblem, list[int]]:
    """A problem on some of the vertices, and an order of it that has a narrow frontier.

    What a set keeps of the part is valid there, and no component grows: so no set of the whole
    problem is better than the best of the part. Vertices are left out where the frontier would
    be wider than `most_width`, those with the most neighbours to come first.
    """
    position = [0] * len(problem)
    for place, vertex in enumerate(order):
        position[vertex] = place
    around = [(*tails, *heads) for tails, heads in zip(problem.predecessors, problem.successors, strict=True)]
    undecided = [len(neighbours) for neighbours in around]
    taken = [False] * len(problem)
    frontier: set[int] = set()
    for vertex in order:
        taken[vertex] = True
        if undecided[vertex]:
            frontier.add(vertex)
        for neighbour in around[vertex]:
            undecided[neighbour] -= 1
            if undecided[neighbour] == 0:
                frontier.discard(neighbour)
        if len(frontier) > most_width:
            widest = max(frontier, key=lambda v: (undecided[v], -problem.sizes[v], position[v]))
            frontier.remove(widest)
            taken[widest] = False
    number = {vertex: place for place, vertex in enumerate(v for v in range(len(problem)) if taken[v])}
    part = IndexedProblem(
        sizes=[problem.sizes[v] for v in number],
        predecessors=[[number[n] for n in problem.predecessors[v] if taken[n]] for v in number],
        successors=[[number[n] for n in problem.successors[v] if taken[n]] for v in number],
        forced=[problem.forced[v] for v in number],
    )
    return part, [number[v] for v in order if taken[v]]


def narrow_order(problem: IndexedProblem) -> list[int]:
    """An elimination order that keeps the frontier small, whatever the direction of edges.

    Of the vertices beside the frontier the one goes next that leaves the smallest frontier, and of
    equals the first.
    """
    count = len(problem)
    around = [(*problem.predecessors[v], *problem.successors[v]) for v in range(count)]
    undecided = [len(neighbours) for neighbours in around]
    decided = [False] * count
    # What deciding a vertex adds to the frontier: itself, less those that wait for it alone.
    change = [1 if neighbours else 0 for neighbours in around]
    queue: list[tuple[int, int]] = []
    order: list[int] = []
    unseen = 0
    while len(order) < count:
        while queue:
            believed, vertex = heapq.heappop(queue)
            if not decided[vertex] and believed == change[vertex]:
                break
        else:
            while decided[unseen]:
                unseen += 1
            vertex = unseen
        decided[vertex] = True
        order.append(vertex)
        for neighbour in around[vertex]:
            undecided[neighbour] -= 1
            if not decided[neighbour]:
                change[neighbour] -= undecided[neighbour] == 0
                heapq.heappush(queue, (change[neighbour], neighbour))
        for one in (vertex, *around[vertex]):
            if decided[one] and undecided[one] == 1:
                last = next(v for v in around[one] if not decided[v])
                change[last] -= 1
                heapq.heappush(queue, (change[last], last))
    return order
