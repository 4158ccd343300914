"""Connected components, and contraction of groups of vertices to one vertex each."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TypeVar

V = TypeVar("V", bound=Hashable)


def connected_components(vertices: Collection[V], neighbours: Callable[[V], Iterable[V]]) -> list[list[V]]:
    """The weakly connected components of some vertices, by first vertex; each begins with its first."""
    left = set(vertices)
    components: list[list[V]] = []
    for start in vertices:
        if start not in left:
            continue
        left.remove(start)
        component = [start]
        for vertex in component:  # Grows during the loop.
            for neighbour in neighbours(vertex):
                if neighbour in left:
                    left.remove(neighbour)
                    component.append(neighbour)
        components.append(component)
    return components


def contracts_without_cycle(group_of: Mapping[V, Hashable], edges: Iterable[tuple[V, V]]) -> bool:
    """Whether an acyclic graph stays acyclic when each group of vertices becomes one vertex.

    Kahn's algorithm: O(vertices + edges).

    Args:
        group_of: the group of each vertex.
        edges: `(tail, head)` between these vertices; edges may repeat.
    """
    heads: dict[Hashable, list[Hashable]] = {group: [] for group in group_of.values()}
    waiting = dict.fromkeys(heads, 0)
    for tail, head in edges:
        if group_of[tail] != group_of[head]:
            heads[group_of[tail]].append(group_of[head])
            waiting[group_of[head]] += 1
    ready = [group for group, count in waiting.items() if count == 0]
    for group in ready:  # Grows during the loop.
        for head_group in heads[group]:
            waiting[head_group] -= 1
            if waiting[head_group] == 0:
                ready.append(head_group)
    return len(ready) == len(heads)
