"""Axes whose size differs from the file's, and their positions after a reshape."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AxisChange:
    """An axis of `outer` x `old` x `inner` elements in the file, of which `old` becomes `new`.

    `is_assumed`: the position is inferred from a literal only.
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
    def layout(self) -> tuple[int, int, int, int]:
        """The factors of the axis, outermost first."""
        return self.outer, self.old, self.new, self.inner

    @property
    def is_strict(self) -> bool:
        """Whether the order of slices is uncertain, so that operators must treat every slice equally."""
        return self.is_assumed or self.before != self.old


def differing(before: Sequence[int], after: Sequence[int]) -> tuple[AxisChange, ...]:
    pairs = enumerate(zip(before, after, strict=True))
    return tuple(AxisChange(axis, old, new) for axis, (old, new) in pairs if old != new)


def reshaped(
    changes: Sequence[AxisChange], before: Sequence[int], target: Sequence[int]
) -> Iterator[tuple[AxisChange, ...]]:
    """The possible positions of changed axes after a reshape from `before` to `target`, likeliest first.

    There are several only where the file's size is 1.
    """
    return itertools.product(*(_positions(change, before, target) for change in changes))


def changed_shape(shape: Sequence[int], changes: Iterable[AxisChange]) -> tuple[int, ...]:
    """The file's shape after these changes."""
    sizes = list(shape)
    for change in changes:
        sizes[change.axis] = sizes[change.axis] // change.old * change.new
    return tuple(sizes)


def merged(changes: Iterable[AxisChange], target: Sequence[int]) -> tuple[AxisChange, ...]:
    """One change for each axis; if several affect one axis, only the total size is kept."""
    by_axis = defaultdict[int, list[AxisChange]](list)
    for change in changes:
        by_axis[change.axis].append(change)
    return tuple(
        together[0]
        if len(together) == 1
        else AxisChange(
            axis,
            target[axis],
            changed_shape(target, together)[axis],
            is_assumed=any(change.is_assumed for change in together),
        )
        for axis, together in sorted(by_axis.items())
    )


def resolved_target(entries: Sequence[int], shape: Sequence[int], keeps_zeros: bool = False) -> tuple[int, ...] | None:
    """The shape that Reshape infers from its target, which may contain -1 and 0; None where none fits.

    >>> resolved_target([0, -1], (2, 3, 4))
    (2, 12)
    """
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


def _positions(change: AxisChange, before: Sequence[int], target: Sequence[int]) -> list[AxisChange]:
    """The axes of `target` that can contain the same elements in the same order, likeliest first."""
    outer = math.prod(before[: change.axis]) * change.outer
    inner = change.inner * math.prod(before[change.axis + 1 :])
    positions: list[AxisChange] = []
    for axis, size in enumerate(target):
        front, behind = math.prod(target[:axis]), math.prod(target[axis + 1 :])
        if outer % front == inner % behind == 0:
            position = replace(change, axis=axis, outer=outer // front, inner=inner // behind)
            positions += [position] if position.before == size else []

    def rank(position: AxisChange) -> tuple[bool, bool, bool, int]:
        """Unmerged axes, then merged but not last, then the outermost position."""
        is_merged = position.before != position.old
        is_last = position.axis == len(target) - 1
        return is_merged, is_merged and is_last, position.outer != 1, position.axis

    return sorted(positions, key=rank)
