"""Terms: nested tuples of plain data that refer to values and axes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onnxgc.matching.normal_form.dimensions import Dim, as_set

_MIN_INFINITE = 1e30


class OfValue(NamedTuple):
    """A reference to a value."""

    value: int


class OfAxis(NamedTuple):
    """A reference to an axis."""

    axis: int


class Unordered(NamedTuple):
    """Parts of a term whose order has no meaning."""

    items: tuple[Any, ...]


def unordered(*items: Any) -> Unordered:
    return Unordered(tuple(sorted(items, key=repr)))


def in_terms(dim: Dim) -> tuple[Any, ...]:
    """A dimension as part of a term."""
    return tuple((OfAxis(atom.axis), atom.size, atom.stride) for atom in dim)


def set_in_terms(*dims: Dim) -> Unordered:
    """The atoms of several dimensions, in no order, as part of a term."""
    return unordered(*in_terms(as_set(*dims)))


def rendered(term: Any, digests: Sequence[str] | Mapping[int, str] | None = None) -> Any:
    """A term as plain data. Digests replace its references; placeholders do without digests."""
    match term:
        case OfValue(value):
            return digests[value] if digests is not None else "value"
        case OfAxis(axis):
            return digests[axis] if digests is not None else "axis"
        case Unordered(items):
            return sorted((rendered(item, digests) for item in items), key=repr)
        case tuple():
            return tuple(rendered(item, digests) for item in term)
        case float():
            # Exporters compute one constant in different precisions, and mask with any huge number.
            return f"{term:.5g}" if abs(term) < _MIN_INFINITE else f"{math.copysign(math.inf, term)}"
    return term


def leaves(term: Any, path: str = "") -> Iterator[tuple[str, OfValue | OfAxis]]:
    """The references in a term, each with its position there."""
    match term:
        case OfValue() | OfAxis():
            yield path, term
        case Unordered(items):
            for item in items:
                # The rest of an item distinguishes it; its index does not.
                yield from leaves(item, f"{path}*{rendered(item)}")
        case tuple():
            for index, item in enumerate(term):
                yield from leaves(item, f"{path}.{index}")
