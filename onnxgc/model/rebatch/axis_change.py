"""Axes that hold more, or fewer, elements than in the file, and where reshaping puts them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AxisChange:
    """An axis of `outer` x `old` x `inner` elements in the file, in this order, with `new` for `old` here.

    Its place is assumed where a literal alone told it.
    """

    axis: int
    old: int
    new: int
    outer: int = 1
    inner: int = 1
    is_assumed: bool = False

    @property
    def before(self) -> int:
        return self.outer * self.old * self.inner

    @property
    def after(self) -> int:
        return self.outer * self.new * self.inner

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Of what the axis is made, and in which order."""
        return self.outer, self.old, self.new, self.inner

    @property
    def is_strict(self) -> bool:
        """Whether operators must treat all slices along the axis alike, as they may be in any order."""
        return self.is_assumed or self.before != self.old


def differing(before: Sequence[int], after: Sequence[int]) -> tuple[AxisChange, ...]:
    """How each axis of a tensor has grown, by its two shapes alone."""
    pairs = enumerate(zip(before, after, strict=True))
    return tuple(AxisChange(axis, old, new) for axis, (old, new) in pairs if old != new)


def reshaped(
    growths: Sequence[AxisChange], before: Sequence[int], target: Sequence[int]
) -> Iterator[tuple[AxisChange, ...]]:
    """Where the axes that have grown may be once a tensor of the shape `before` has the shape `target`.

    The likeliest places come first. There are several where the file's size is 1 alone.
    """
    choices = [
        sorted(_places(growth, before, target), key=lambda place: _rank(place, target)) for growth in growths
    ]
    yield from itertools.product(*choices)


def grown_shape(shape: Sequence[int], growths: Iterable[AxisChange]) -> tuple[int, ...]:
    """The file's shape with what has grown."""
    sizes = list(shape)
    for growth in growths:
        sizes[growth.axis] = sizes[growth.axis] // growth.old * growth.new
    return tuple(sizes)


def merged(growths: Iterable[AxisChange], target: Sequence[int]) -> tuple[AxisChange, ...]:
    """One growth for each axis; of what an axis with several is made is no longer known."""
    found: dict[int, list[AxisChange]] = {}
    for growth in growths:
        found.setdefault(growth.axis, []).append(growth)
    return tuple(
        together[0]
        if len(together) == 1
        else AxisChange(
            axis,
            target[axis],
            grown_shape(target, together)[axis],
            is_assumed=any(growth.is_assumed for growth in together),
        )
        for axis, together in sorted(found.items())
    )


def resolved_target(
    entries: Sequence[int], shape: Sequence[int], keeps_zeros: bool = False
) -> tuple[int, ...] | None:
    """What Reshape makes of its target, with the size for -1 and copies for 0; None where nothing fits."""
    if not keeps_zeros and 0 in entries[len(shape) :]:
        return None
    sizes = [shape[axis] if entry == 0 and not keeps_zeros else entry for axis, entry in enumerate(entries)]
    count = math.prod(shape)
    if -1 in sizes:
        others = -math.prod(sizes)
        if others <= 0 or count % others:
            return None
        sizes[sizes.index(-1)] = count // others
    return tuple(sizes) if math.prod(sizes) == count else None


def _places(growth: AxisChange, before: Sequence[int], target: Sequence[int]) -> Iterator[AxisChange]:
    """The axes that can hold the same elements in the same order; those in front and behind fill the rest."""
    outer = math.prod(before[: growth.axis]) * growth.outer
    inner = growth.inner * math.prod(before[growth.axis + 1 :])
    for axis, size in enumerate(target):
        front, behind = math.prod(target[:axis]), math.prod(target[axis + 1 :])
        if outer % front or inner % behind:
            continue
        place = replace(growth, axis=axis, outer=outer // front, inner=inner // behind)
        if place.before == size:
            yield place


def _rank(place: AxisChange, target: Sequence[int]) -> tuple[bool, bool, bool, int]:
    """Less for likelier places: alone, else in front of what it is merged with, and not on the last axis."""
    is_merged = place.before != place.old
    return is_merged, is_merged and place.axis == len(target) - 1, place.outer != 1, place.axis
