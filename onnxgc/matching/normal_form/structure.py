"""A network as values and axes: what is computed, without how it lies in memory or how it is spelled.

A *value* is what several tensors may hold, transposed, reshaped, cast or multiplied by a number. An *axis*
is what a value extends along, known by where it comes from. Both are terms over earlier ones. Equal
terms are one: a value that a graph computes twice is there once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onnxgc.matching.normal_form.constant_tables import Table
from onnxgc.matching.normal_form.dimensions import Atom, Dim, Dims, as_set, extent, paired, whole

_HUGE = 1e30


class OfValue(NamedTuple):
    """A value inside of a term."""

    value: int


class OfAxis(NamedTuple):
    """An axis inside of a term."""

    axis: int


class Unordered(NamedTuple):
    """Parts of a term whose order says nothing."""

    items: tuple[Any, ...]


def unordered(*items: Any) -> Unordered:
    return Unordered(tuple(sorted(items, key=repr)))


def in_terms(dim: Dim) -> tuple[Any, ...]:
    """A dimension as part of a term."""
    return tuple((OfAxis(atom.axis), atom.size, atom.stride) for atom in dim)


def set_in_terms(*dims: Dim) -> Unordered:
    """What dimensions hold together, as part of a term."""
    return unordered(*in_terms(as_set(*dims)))


def rendered(term: Any, known: Sequence[str] | Mapping[int, str] | None = None) -> Any:
    """A term as plain data: what it refers to by digests, or by nothing where none are known."""
    match term:
        case OfValue(value):
            return known[value] if known is not None else "value"
        case OfAxis(axis):
            return known[axis] if known is not None else "axis"
        case Unordered(items):
            return sorted((rendered(item, known) for item in items), key=repr)
        case tuple():
            return tuple(rendered(item, known) for item in term)
        case float():
            # Exporters compute the same number in different precision, and mask with any huge one.
            return f"{term:.5g}" if abs(term) < _HUGE else f"{math.copysign(math.inf, term)}"
    return term


def leaves(term: Any, path: str = "") -> Iterator[tuple[str, OfValue | OfAxis]]:
    """The values and axes of a term, and where in it they stand."""
    match term:
        case OfValue() | OfAxis():
            yield path, term
        case Unordered(items):
            for item in items:
                # An item's place says nothing; what else is in it does.
                yield from leaves(item, f"{path}*{rendered(item)}")
        case tuple():
            for index, item in enumerate(term):
                yield from leaves(item, f"{path}.{index}")


@dataclass(frozen=True, slots=True)
class Entity:
    """A value or an axis: an operator and what it is of.

    `weights` tell terms apart that are alike but for the weights that they read. `cover` is what a
    weight that is added or multiplied extends along, in a value made by such a weight.
    """

    op: str
    term: Any
    weights: tuple[Any, ...] = ()
    is_axis: bool = False
    size: int = 0
    cover: Dim = ()


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor holds a value: `scale` times it, laid out as `dims`, behind so many dropouts."""

    value: int
    dims: Dims
    scale: float = 1.0
    dropouts: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor that depends on weights alone; `number` is its one value, where it is a constant of one.

    `table` has the contents of a constant that is known by these. A matrix that is read transposed
    `is_turned`.
    """

    name: str
    shape: tuple[int, ...]
    number: float | None = None
    table: Table | None = None
    is_turned: bool = False


@dataclass(slots=True)
class Structure:
    """The values and axes of one network, and the tensors that hold them.

    Entities only refer to earlier ones. `known_as` says what a value is known to be beside its term:
    the mean of another one, or that one less its mean. `parts` are layers with some of another one's
    channels: of which, and of which of its channels.
    """

    entities: list[Entity] = field(default_factory=list)
    views: dict[str, View] = field(default_factory=dict)
    known_as: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    parts: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _index: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def value(
        self, op: str, *term: Any, weights: tuple[Any, ...] = (), cover: Dim = (), known: Any = ()
    ) -> int:
        found = self._entity(Entity(op, term, weights, cover=cover))
        if known:
            self.known_as.setdefault(found, known)
        return found

    def axis(self, op: str, size: int, *term: Any, weights: tuple[Any, ...] = ()) -> Dim:
        """A dimension that is all of an axis of that origin."""
        if size == 1:
            return ()
        return whole(self._entity(Entity(op, term, weights, is_axis=True, size=size)), size)

    def holders(self) -> Mapping[int, list[str]]:
        """The tensors of each value, in the order of the graph."""
        found: dict[int, list[str]] = {}
        for name, view in self.views.items():
            found.setdefault(view.value, []).append(name)
        return found

    def broadcast(self, first: Dims, second: Dims) -> tuple[Dims, Unordered] | None:
        """The dimensions of an elementwise result, and which different axes lie on each other in it."""
        rank = max(len(first), len(second))
        dims: list[Dim] = []
        met: list[Any] = []
        for one, other in zip(padded(first, rank), padded(second, rank), strict=True):
            if not one or not other or one == other:
                dims.append(one or other)
                continue
            pairs = paired(one, other) if extent(one) == extent(other) else None
            if pairs is None:
                return None
            dims.append(tuple(atom for pair in pairs for atom in self._joined(*pair)))
            met += [unordered(in_terms((p,)), in_terms((q,))) for p, q in pairs if p != q]
        return tuple(dims), unordered(*met)

    def broadcast_all(self, several: Sequence[Dims]) -> tuple[Dims, Unordered] | None:
        """The same of several operands, in whatever order they come."""
        rank = max(len(dims) for dims in several)
        columns = list(zip(*(padded(dims, rank) for dims in several), strict=True))
        result: list[Dim] = []
        met: list[Any] = []
        for column in columns:
            there = list(dict.fromkeys(dim for dim in column if dim))
            if len(there) > 1 and len({tuple(atom.size for atom in dim) for dim in there}) > 1:
                return self._broadcast_in_order(several)
            result.append(tuple(a for parts in zip(*there, strict=True) for a in self._joined(*parts)))
            for parts in zip(*there, strict=True):
                if len(set(parts)) > 1:
                    met.append(unordered(*(in_terms((atom,)) for atom in dict.fromkeys(parts))))
        return tuple(result), unordered(*met)

    def apart(self, operands: Sequence[tuple[Any, Dims]]) -> tuple[list[Dims], tuple[Any, ...]]:
        """Operands, each with a key, in which an axis that lies across itself is one of its own in each.

        So it is known which operand brings which dimension of a result that would hold an axis twice. What
        is returned beside them is a part of its term.
        """
        rank = max(len(dims) for _, dims in operands)
        laid = [padded(dims, rank) for _, dims in operands]
        ways = dict.fromkeys(laid)
        crossing = {atom.axis for one in ways for other in ways for atom in self._crossing(one, other)}
        if not crossing:
            return [dims for _, dims in operands], ()
        # Of operands that are alike, the one that lies further left is the first.
        order = sorted(range(len(laid)), key=lambda place: [not dim for dim in laid[place]])
        result, notes, seen = list(laid), list[Any](), list[Any]()
        for place in order:
            key = operands[place][0]
            number = seen.count(key)
            seen.append(key)
            result[place] = tuple(
                tuple(
                    self.axis("own", atom.size, key, in_terms((atom,)), number)[0]
                    if atom.axis in crossing
                    else atom
                    for atom in dim
                )
                for dim in laid[place]
            )
            lying = zip(result[place], laid[place], strict=True)
            notes += [in_terms(own) for own, dim in lying if own != dim]
        return result, (unordered(*notes),)

    def _crossing(self, one: Dims, other: Dims) -> Iterator[Atom]:
        """Atoms of the first operand that lie elsewhere in the other one."""
        elsewhere = [atom for dim in other for atom in dim]
        for here, there in zip(one, other, strict=True):
            pairs = paired(here, there) if here and there and here != there else None
            lying = [(atom, None) for atom in here] if pairs is None and here != there else pairs or []
            for atom, on in lying:
                is_broadcast = self.entities[atom.axis].op == "broadcast"
                if atom != on and not is_broadcast and any(atom.overlaps(a) for a in elsewhere):
                    yield atom

    def _broadcast_in_order(self, several: Sequence[Dims]) -> tuple[Dims, Unordered] | None:
        dims = several[0]
        met: list[Any] = []
        for other in several[1:]:
            found = self.broadcast(dims, other)
            if found is None:
                return None
            dims = found[0]
            met += found[1].items
        return dims, unordered(*met)

    def _joined(self, *atoms: Atom) -> Dim:
        own = [a for a in dict.fromkeys(atoms) if self.entities[a.axis].op != "broadcast"]
        if len(own) < 2:
            return (own[0] if own else atoms[0],)
        return self.axis("joined", own[0].size, unordered(*(in_terms((atom,)) for atom in own)))

    def _entity(self, entity: Entity) -> int:
        key = (entity.is_axis, entity.op, entity.term, entity.weights, entity.size)
        if key not in self._index:
            self._index[key] = len(self.entities)
            self.entities.append(entity)
        return self._index[key]


def padded(dims: Dims, rank: int) -> Dims:
    return ((),) * (rank - len(dims)) + dims
