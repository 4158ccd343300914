"""Reachability and grouping."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key")


def reachable(starts: Iterable[T], neighbours: Callable[[T], Iterable[T]]) -> set[T]:
    """The starts, their neighbours, the neighbours of these, and so on."""
    reached = set(starts)
    pending = list(reached)
    while pending:
        new = set(neighbours(pending.pop())) - reached
        reached |= new
        pending += new
    return reached


def grouped(items: Iterable[tuple[Key, T]]) -> dict[Key, list[T]]:
    """The items with equal keys, in their order."""
    groups: dict[Key, list[T]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups
