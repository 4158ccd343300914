"""Dimensions of tensors as runs of axes: the algebra of Transpose and Reshape.

A dimension is a tuple of atoms, outermost first. An atom is a run of an axis: `size` elements, `stride`
apart. An axis has a meaning (the channels of one convolution), not a position. A dimension of size 1 is
empty.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Atom(NamedTuple):
    """A run of elements of an axis."""

    axis: int
    size: int
    stride: int = 1

    def is_within(self, other: "Atom") -> bool:
        """Whether this run is inside the other one."""
        is_inner = other.stride <= self.stride and self.stride * self.size <= other.stride * other.size
        return self.axis == other.axis and is_inner

    def overlaps(self, other: "Atom") -> bool:
        """Whether both are runs of one axis whose ranges of strides intersect."""
        inner, outer = max(self.stride, other.stride), min(self.stride * self.size, other.stride * other.size)
        return self.axis == other.axis and inner < outer


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def whole(axis: int, size: int) -> Dim:
    """A dimension that is a whole axis."""
    return (Atom(axis, size),) if size > 1 else ()


def extent(dim: Dim) -> int:
    return math.prod(atom.size for atom in dim)


def merged(atoms: Iterable[Atom]) -> Dim:
    """The atoms, with adjacent parts of one run joined."""
    joined: list[Atom] = []
    for atom in atoms:
        last = joined[-1] if joined else None
        if last is not None and last.axis == atom.axis and last.stride == atom.size * atom.stride:
            joined[-1] = Atom(atom.axis, last.size * atom.size, atom.stride)
        else:
            joined.append(atom)
    return tuple(joined)


def as_set(*dims: Dim) -> Dim:
    """The atoms of several dimensions in a canonical order."""
    ordered = sorted((atom for dim in dims for atom in dim), key=lambda a: (a.axis, -a.stride))
    return merged(ordered)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dimensions after a Reshape; None if it splits an atom at a size that is no factor of it.

    >>> reshaped((whole(0, 6),), (2, 3))
    ((Atom(axis=0, size=2, stride=3),), (Atom(axis=0, size=3, stride=1),))
    """
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


def coinciding(*dims: Dim) -> list[tuple[Atom, ...]] | None:
    """The atoms of dimensions that coincide, split where any dimension is split; None if extents differ."""
    rows: list[tuple[Atom, ...]] = []
    rests = [list(reversed(dim)) for dim in dims]
    while rests and all(rests):
        atoms = [rest.pop() for rest in rests]
        size = min(atom.size for atom in atoms)
        if any(atom.size % size for atom in atoms):
            return None
        for atom, rest in zip(atoms, rests, strict=True):
            if atom.size > size:
                rest.append(Atom(atom.axis, atom.size // size, atom.stride))
        rows.append(tuple(Atom(a.axis, size, a.stride * (a.size // size)) for a in atoms))
    return None if any(rests) else rows


def atoms_of(dims: Dims) -> tuple[Atom, ...]:
    return tuple(atom for dim in dims for atom in dim)


def atoms_at(dims: Dims, axes: Iterable[int]) -> Dim:
    """The atoms of the dimensions at these positions, as a set."""
    return as_set(*(dims[axis] for axis in axes))
