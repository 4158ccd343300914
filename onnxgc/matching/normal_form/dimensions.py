"""What the dimensions of a tensor hold, whatever their order: the algebra behind Transpose and Reshape.

A dimension is a tuple of atoms, outermost first, and an atom is a run of an axis: every `stride`-th
element, `size` of them. An axis has a meaning (channels of this convolution), not a place. A dimension of
size 1 holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Atom(NamedTuple):
    """A run of an axis."""

    axis: int
    size: int
    stride: int = 1

    def is_within(self, other: Atom) -> bool:
        """Whether this is a run inside of the other atom."""
        is_inner = other.stride <= self.stride and self.stride * self.size <= other.stride * other.size
        return self.axis == other.axis and is_inner

    def overlaps(self, other: Atom) -> bool:
        """Whether both are runs of one axis, and what is apart in one is apart in the other too, in part."""
        inner, outer = max(self.stride, other.stride), min(self.stride * self.size, other.stride * other.size)
        return self.axis == other.axis and inner < outer


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def whole(axis: int, size: int) -> Dim:
    """A dimension that is all of an axis."""
    return (Atom(axis, size),) if size > 1 else ()


def extent(dim: Dim) -> int:
    return math.prod(atom.size for atom in dim)


def merged(atoms: Iterable[Atom]) -> Dim:
    """The same atoms with neighbours that are parts of one run put together."""
    joined: list[Atom] = []
    for atom in atoms:
        last = joined[-1] if joined else None
        if last is not None and last.axis == atom.axis and last.stride == atom.size * atom.stride:
            joined[-1] = Atom(atom.axis, last.size * atom.size, atom.stride)
        else:
            joined.append(atom)
    return tuple(joined)


def as_set(*dims: Dim) -> Dim:
    """What several dimensions hold, without an order."""
    ordered = sorted((atom for dim in dims for atom in dim), key=lambda a: (a.axis, -a.stride))
    return merged(ordered)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dimensions after a Reshape; None where it cuts through an atom at no factor of it."""
    rest = [atom for dim in reversed(dims) for atom in reversed(dim)]
    result: list[Dim] = []
    for size in shape:
        taken: list[Atom] = []
        while size > 1:
            if not rest:
                return None
            atom = rest.pop()
            if size % atom.size == 0:
                size //= atom.size
            elif atom.size % size == 0:
                inner = atom.size // size
                rest.append(Atom(atom.axis, inner, atom.stride))
                atom, size = Atom(atom.axis, size, atom.stride * inner), 1
            else:
                return None
            taken.append(atom)
        result.append(merged(taken))
    return tuple(result) if not rest else None


def paired(first: Dim, second: Dim) -> list[tuple[Atom, Atom]] | None:
    """Which atoms of two dimensions of one extent lie on each other, cut where either is."""
    pairs: list[tuple[Atom, Atom]] = []
    left, right = list(reversed(first)), list(reversed(second))
    while left and right:
        one, other = left.pop(), right.pop()
        size = min(one.size, other.size)
        if one.size % size or other.size % size:
            return None
        ends: list[Atom] = []
        for atom, rest in ((one, left), (other, right)):
            inner = atom.size // size
            if inner > 1:
                rest.append(Atom(atom.axis, inner, atom.stride))
            ends.append(Atom(atom.axis, size, atom.stride * inner))
        pairs.append((ends[0], ends[1]))
    return pairs if not left and not right else None
