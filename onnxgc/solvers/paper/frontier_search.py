"""Dynamic programme over the frontier between decided and undecided vertices.

Vertices are decided in an *elimination order*: each is kept or discarded. The *frontier* is the set of
decided vertices with an undecided neighbour. Later decisions depend on a set of decisions only through
the frontier: which of its vertices are kept, which share a component, the bytes of each component, and
which item (component or kept vertex) has a path to which through decided vertices. Sets with the
same *shape* differ only in bytes, and of two such sets one is often at least as good in every number
(`onnxgc.solvers.paper.dominance`). The cheapest set under a cap on components is then found exactly, in time
that grows with the width of the frontier and not with the number of sets.

Paths matter because a set is valid under reading G only if its components, contracted to one vertex
each, leave a graph without cycles: items that are joined must have no path between them, and an item
that gains a path to another must not be reachable from it.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from onnxgc.solvers.paper.dominance import (
    MAX_UNPRUNED_STATES,
    Groups,
    KeptList,
    State,
    mask_words,
    undominated,
    undominated_across,
    without_needless_paths,
)
from onnxgc.solvers.paper.frontier_states import Elimination, Shape, eliminations
from onnxgc.solvers.paper.indexed_problem import IndexedProblem

_Ranked: TypeAlias = tuple[State, Shape]

_TRANSITION_EFFORT = 7
"""Effort of a new transition, in states."""
_MAX_COMPARED_WIDTH = 12
"""Up to this width of the frontier, states of different shapes are compared."""


@dataclass(frozen=True, slots=True)
class FrontierResult:
    """Result of one walk under a cap.

    `kept` (without forced vertices) is the cheapest set that was found. No set under
    the cap keeps less than `floor_bytes`; a floor above the limit on kept bytes means only that no set fits.
    `effort` counts visited states, and new transitions with a multiple.
    """

    kept: tuple[int, ...] | None
    floor_bytes: int
    effort: int


class FrontierSearch:
    """The cheapest sets under a cap, along one elimination order."""

    def __init__(self, problem: IndexedProblem, order: Sequence[int]) -> None:
        self._steps = eliminations(problem, order)
        self._words: list[dict[Shape, list[int]]] = [{} for _ in self._steps]

    def cheapest_under(
        self,
        cap_bytes: int,
        max_kept_bytes: int,
        max_states: int,
        *,
        price: float = 0.0,
        relax: bool = False,
        deadline: float = math.inf,
    ) -> FrontierResult:
        """The cheapest set in which no component is heavier than a cap.

        Args:
            cap_bytes: limit on each component.
            max_kept_bytes: limit on the bytes kept.
            max_states: limit on the states after each vertex. The least promising states above it are
                dropped or, with `relax`, replaced by states that are at least as good.
            price: expected cost of an open byte in kept bytes, for ranking states.
            relax: compute a lower bound instead of a set.
            deadline: end of the walk, which then returns no set, on the clock of `time.perf_counter`.
        """
        groups: Groups = {((), 0): [(0, (), None)]}
        # The least bytes of a dropped state, or more than any state within the limit keeps.
        lost = max_kept_bytes + 1
        effort = 0
        for step, words in zip(self._steps, self._words, strict=True):
            if time.perf_counter() >= deadline:
                return FrontierResult(None, min(_cheapest(groups), lost), effort)
            known = len(step.transitions)
            groups = _advance(groups, step, cap_bytes, max_kept_bytes)
            effort += sum(map(len, groups.values())) + _TRANSITION_EFFORT * (len(step.transitions) - known)
            groups = _pruned(groups, len(step.staying_slots), words)
            if sum(map(len, groups.values())) > max_states:
                ranked = _ranked(groups, price)
                if relax:
                    groups = _relaxed(ranked, max_states)
                else:
                    groups = _grouped(ranked[:max_states])
                    lost = min(lost, *(state[0] for state, _ in ranked[max_states:]))
            if not groups:
                break
        states = groups.get(((), 0), [])
        best = None if relax else min(states, key=itemgetter(0), default=None)
        return FrontierResult(
            kept=None if best is None else _members(best[2]),
            floor_bytes=min([lost, *(state[0] for state in states)]),
            effort=effort,
        )


def _pruned(groups: Groups, width: int, words: dict[Shape, list[int]]) -> Groups:
    """The states that no other state dominates; `words` caches `mask_words`."""
    groups = {shape: undominated(states) for shape, states in groups.items()}
    if sum(map(len, groups.values())) <= MAX_UNPRUNED_STATES:
        return groups
    if width > _MAX_COMPARED_WIDTH:
        return without_needless_paths(groups)
    for shape in groups:
        if shape not in words:
            words[shape] = mask_words(shape, width)
    return undominated_across(groups, words, width)


def _advance(groups: Groups, step: Elimination, cap: int, max_kept: int) -> Groups:
    advanced: Groups = {}
    size, vertex = step.size_bytes, step.vertex
    for shape, states in groups.items():
        transition = step.transition(shape, keep=True)
        if transition is not None:
            advanced_states = [
                (
                    kept + size,
                    weights if transition.unchanged else tuple([weights[s] for s in transition.sources]),
                    vertices if step.forced else (vertex, vertices),
                )
                for kept, weights, vertices in states
                if kept + size <= max_kept
            ]
            if advanced_states:
                advanced.setdefault(transition.shape, []).extend(advanced_states)
        if step.forced:
            continue
        transition = step.transition(shape, keep=False)
        if transition is None:
            continue
        advanced_states = []
        merged, sources = transition.merged, transition.sources
        for kept, weights, vertices in states:
            total = size
            for component in merged:
                total += weights[component]
            if total <= cap and kept <= max_kept:
                advanced_states.append((kept, tuple([weights[s] if s >= 0 else total for s in sources]), vertices))
        if advanced_states:
            advanced.setdefault(transition.shape, []).extend(advanced_states)
    return advanced


def _cheapest(groups: Groups) -> int:
    return min(state[0] for states in groups.values() for state in states)


def _ranked(groups: Groups, price: float) -> list[_Ranked]:
    """States by bytes kept plus the expected cost of open bytes, least first."""
    entries = [
        (state[0] + price * sum(state[1]), number, state, shape)
        for number, (shape, states) in enumerate(groups.items())
        for state in states
    ]
    entries.sort(key=itemgetter(0, 1))
    return [(state, shape) for _, _, state, shape in entries]


def _grouped(ranked: Iterable[_Ranked]) -> Groups:
    groups: Groups = {}
    for state, shape in ranked:
        groups.setdefault(shape, []).append(state)
    return groups


def _relaxed(ranked: list[_Ranked], max_states: int) -> Groups:
    """The most promising states, and for the others states that are at least as good."""
    groups = _grouped(ranked[: max_states // 2])
    rest = ranked[max_states // 2 :]
    # One state for each choice of labels: the least of each number, and the common paths.
    merged: dict[tuple[int, ...], tuple[int, tuple[int, ...], int]] = {}
    for (kept, weights, _), (labels, paths) in rest:
        known = merged.get(labels)
        if known is not None:
            kept, weights, paths = (min(kept, known[0]), tuple(map(min, weights, known[1])), paths & known[2])
        merged[labels] = (kept, weights, paths)
    by_cost = sorted(merged.items(), key=lambda item: (item[1][0], item[0]))
    limit = max_states // 2 - 1
    for labels, (kept, weights, paths) in by_cost[:limit]:
        groups.setdefault((labels, paths), []).append((kept, weights, None))
    if by_cost[limit:]:
        # A state that keeps the whole frontier: kept vertices add no bytes and join no component.
        labels, (kept, _, _) = by_cost[limit]
        groups.setdefault(((-1,) * len(labels), 0), []).append((kept, (), None))
    return {shape: undominated(states) for shape, states in groups.items()}


def _members(vertices: KeptList) -> tuple[int, ...]:
    members = []
    while vertices is not None:
        vertex, vertices = vertices
        members.append(vertex)
    return tuple(sorted(members))
