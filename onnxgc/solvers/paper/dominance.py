"""Dominance: drop a state if another is at least as good in every number.

A state is one set of kept vertices at a frontier (`onnxgc.solvers.paper.frontier_search`).
"""

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from onnxgc.solvers.paper.frontier_states import Shape, unpack

KeptList: TypeAlias = "tuple[int, KeptList] | None"
"""Kept vertices as a linked list, the last one first."""

State: TypeAlias = tuple[int, tuple[int, ...], KeptList]
"""Bytes kept, bytes of each open component, and the vertices kept."""

Groups: TypeAlias = dict[Shape, list[State]]
"""States by shape."""

MAX_UNPRUNED_STATES = 24
"""Comparing fewer states than this costs more than it saves."""
_MAX_COMPARED = 500
"""Number of the cheapest states that are compared with all others."""


def undominated(states: list[State]) -> list[State]:
    """The states of one shape that no other state matches in every number."""
    if len(states) < 2:
        return states
    states.sort(key=itemgetter(0, 1))
    width = len(states[0][1])
    if width == 0:
        return states[:1]
    if width == 1:
        least = states[0][1][0] + 1
        front = []
        for state in states:
            weight = state[1][0]
            if weight < least:
                least = weight
                front.append(state)
        return front
    if width == 2:
        return _undominated_pairs(states)
    if len(states) > MAX_UNPRUNED_STATES:
        return _undominated_tuples(states)
    front = []
    for state in states:
        for other in front:
            if all(map(int.__le__, other[1], state[1])):
                break
        else:
            front.append(state)
    return front


def _undominated_pairs(states: list[State]) -> list[State]:
    """`undominated` for two components and sorted states: the result is a falling staircase."""
    front = []
    firsts: list[int] = []
    seconds: list[int] = []
    for state in states:
        first, second = state[1]
        index = bisect_right(firsts, first)
        if index and seconds[index - 1] <= second:
            continue
        front.append(state)
        start = bisect_left(firsts, first)
        stop = start
        while stop < len(seconds) and seconds[stop] >= second:
            stop += 1
        firsts[start:stop] = [first]
        seconds[start:stop] = [second]
    return front


def _undominated_tuples(states: list[State]) -> list[State]:
    """`undominated` for any number of components and sorted states; some dominated states may remain."""
    distinct: dict[tuple[int, ...], State] = {}
    for state in states:
        distinct.setdefault(state[1], state)
    states = list(distinct.values())
    weights = np.array([state[1] for state in states])
    compared = min(len(states), _MAX_COMPARED)
    # States are sorted by bytes kept: only an earlier state can match a later one.
    matched = np.triu(np.ones((compared, len(states)), dtype=bool), 1)
    for column in weights.T:
        matched &= column[:compared, None] <= column[None, :]
    dropped = np.logical_or.reduce(matched)
    return [state for state, drop in zip(states, dropped, strict=True) if not drop]


def without_needless_paths(groups: Groups) -> Groups:
    """Drop states that a state with the same labels and fewer paths matches in every number."""
    by_labels: dict[tuple[int, ...], list[int]] = {}
    for labels, paths in groups:
        by_labels.setdefault(labels, []).append(paths)
    front: Groups = {}
    for labels, several in by_labels.items():
        several.sort(key=lambda paths: (paths.bit_count(), paths))
        for index, paths in enumerate(several):
            states = groups[labels, paths]
            for fewer in several[:index]:
                if fewer & ~paths == 0 and states:
                    better = front.get((labels, fewer), ())
                    states = [
                        (kept, weights, vertices)
                        for kept, weights, vertices in states
                        if not any(k <= kept and all(map(int.__le__, w, weights)) for k, w, _ in better)
                    ]
            if states:
                front[labels, paths] = states
    return front


def mask_words(shape: Shape, width: int) -> list[int]:
    """Components that frontier vertices share, and paths between them, in words of 63 bits."""
    labels, _ = shape
    items, reach = unpack(shape)
    bits = index = 0
    for a in range(width):
        for b in range(width):
            if labels[a] >= 0 and labels[a] == labels[b]:
                bits |= 1 << index
            if reach[items[a]] >> items[b] & 1:
                bits |= 1 << index + 1
            index += 2
    words = []
    for _ in range(max(1, -(-2 * width * width // 63))):
        words.append(bits & (1 << 63) - 1)
        bits >>= 63
    return words


def undominated_across(groups: Groups, words_of: dict[Shape, list[int]], width: int) -> Groups:
    """Drop states that another state, of any shape, matches in every number.

    Set A is at least as good as set B for all later decisions if A keeps no more bytes than B and, of
    the frontier vertices, no more are open, no more share a component, none lies in a heavier
    component, and none reaches more of the others. Every choice that B admits is then valid for A: its
    components are parts of B's components. A cycle through them would be a cycle through B's
    components, or lie inside one of them; but no path connects two parts of a component.
    """
    entries = [(state, shape) for shape, states in groups.items() for state in states]
    entries.sort(key=lambda entry: entry[0][0])
    kept = np.array([state[0] for state, _ in entries])
    words = np.array([words_of[shape] for _, shape in entries])
    weights = np.array(
        [[state[1][label] if label >= 0 else 0 for label in shape[0]] for state, shape in entries]
    ).reshape(len(entries), width)
    compared = min(len(entries), _MAX_COMPARED)
    matched = kept[:compared, None] <= kept[None, :]
    for word in range(words.shape[1]):
        column = words[:, word]
        matched &= (column[:compared, None] & ~column[None, :]) == 0
    for slot in range(width):
        column = weights[:, slot]
        matched &= column[:compared, None] <= column[None, :]
    np.fill_diagonal(matched, False)
    dropped = np.logical_or.reduce(matched)
    front: Groups = {}
    for (state, shape), drop in zip(entries, dropped, strict=True):
        if not drop:
            front.setdefault(shape, []).append(state)
    return front
