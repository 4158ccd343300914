"""A network as values and axes, independent of memory layout and spelling.

A *value* is common to all tensors that hold it transposed, reshaped, cast or multiplied by a number. An
*axis* is a direction along which values extend, identified by its origin. Both are terms over earlier
entities. Equal terms are one entity: a value that a graph computes twice exists once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxgc.matching.normal_form.dimensions import Atom, Dim, Dims, extent, paired, whole
from onnxgc.matching.normal_form.entities import Entity, View
from onnxgc.matching.normal_form.recognized_forms import Fact, PartialSum
from onnxgc.matching.normal_form.terms import Unordered, in_terms, unordered


@dataclass(slots=True)
class Structure:
    """The values and axes of one network, and its tensors as views of them.

    Entities refer to earlier ones only. `facts` relate values to others. `parts` are layers that consist of
    some channels of another layer: which layer, and which channels.
    """

    entities: list[Entity] = field(default_factory=list)
    views: dict[str, View] = field(default_factory=dict)
    facts: dict[int, Fact] = field(default_factory=dict)
    partial_sums: dict[int, PartialSum] = field(default_factory=dict)
    parts: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _index: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def value(
        self,
        op: str,
        *term: Any,
        weights: tuple[Any, ...] = (),
        cover: Dim = (),
        fact: Fact | None = None,
    ) -> int:
        """The value of a term; the first fact about it remains."""
        found = self._entity(Entity(op, term, weights, cover=cover))
        if fact is not None:
            self.facts.setdefault(found, fact)
        return found

    def axis(self, op: str, size: int, *term: Any, weights: tuple[Any, ...] = ()) -> Dim:
        """A dimension that is a whole axis."""
        if size == 1:
            return ()
        return whole(self._entity(Entity(op, term, weights, is_axis=True, size=size)), size)

    def holders(self) -> Mapping[int, list[str]]:
        """The tensors of each value, in the order of the graph."""
        found: dict[int, list[str]] = {}
        for name, view in self.views.items():
            found.setdefault(view.value, []).append(name)
        return found

    def is_broadcast(self, atom: Atom) -> bool:
        """Whether an atom is a dimension along which elements repeat, or along which a weight extends."""
        return self.entities[atom.axis].op == "broadcast"

    def broadcast(self, first: Dims, second: Dims) -> tuple[Dims, Unordered] | None:
        """The dimensions of an elementwise result, and the pairs of different axes that coincide there."""
        rank = max(len(first), len(second))
        dims: list[Dim] = []
        joined: list[Any] = []
        for one, other in zip(padded(first, rank), padded(second, rank), strict=True):
            if not one or not other or one == other:
                dims.append(one or other)
                continue
            pairs = paired(one, other) if extent(one) == extent(other) else None
            if pairs is None:
                return None
            dims.append(tuple(atom for pair in pairs for atom in self._joined(*pair)))
            joined += [unordered(in_terms((p,)), in_terms((q,))) for p, q in pairs if p != q]
        return tuple(dims), unordered(*joined)

    def broadcast_all(self, operands: Sequence[Dims]) -> tuple[Dims, Unordered] | None:
        """As `broadcast`, of any number of operands in any order."""
        rank = max(len(dims) for dims in operands)
        columns = list(zip(*(padded(dims, rank) for dims in operands), strict=True))
        result: list[Dim] = []
        joined: list[Any] = []
        for column in columns:
            distinct = list(dict.fromkeys(dim for dim in column if dim))
            if len(distinct) > 1 and len({tuple(atom.size for atom in dim) for dim in distinct}) > 1:
                return self._broadcast_in_order(operands)
            rows = list(zip(*distinct, strict=True))
            result.append(tuple(atom for row in rows for atom in self._joined(*row)))
            for row in rows:
                if len(set(row)) > 1:
                    joined.append(unordered(*(in_terms((atom,)) for atom in dict.fromkeys(row))))
        return tuple(result), unordered(*joined)

    def separated(self, operands: Sequence[tuple[Any, Dims]]) -> tuple[list[Dims], tuple[Any, ...]]:
        """The dimensions of keyed operands, with a separate axis for each operand where one axis crosses.

        An axis crosses if two operands have it at different positions, such as x and its transpose. The
        result then records which operand each of its dimensions is from. Also returns a note that must become
        part of the result's term.
        """
        rank = max(len(dims) for _, dims in operands)
        aligned = [padded(dims, rank) for _, dims in operands]
        distinct = dict.fromkeys(aligned)
        crossing = {
            atom.axis for one in distinct for other in distinct for atom in self._crossing(one, other)
        }
        if not crossing:
            return [dims for _, dims in operands], ()
        # Of operands with equal keys, the leftmost is the first.
        order = sorted(range(len(aligned)), key=lambda index: [not dim for dim in aligned[index]])
        result, notes, seen = list(aligned), list[Any](), list[Any]()
        for index in order:
            key = operands[index][0]
            number = seen.count(key)
            seen.append(key)
            result[index] = tuple(
                tuple(
                    self.axis("own", atom.size, key, in_terms((atom,)), number)[0]
                    if atom.axis in crossing
                    else atom
                    for atom in dim
                )
                for dim in aligned[index]
            )
            both = zip(result[index], aligned[index], strict=True)
            notes += [in_terms(own) for own, dim in both if own != dim]
        return result, (unordered(*notes),)

    def _crossing(self, one: Dims, other: Dims) -> Iterator[Atom]:
        """Atoms of the first operand that are in another position in the second."""
        elsewhere = [atom for dim in other for atom in dim]
        for here, there in zip(one, other, strict=True):
            pairs = paired(here, there) if here and there and here != there else None
            aligned = [(atom, None) for atom in here] if pairs is None and here != there else pairs or []
            for atom, opposite in aligned:
                is_moved = atom != opposite and any(atom.overlaps(a) for a in elsewhere)
                if is_moved and not self.is_broadcast(atom):
                    yield atom

    def _broadcast_in_order(self, operands: Sequence[Dims]) -> tuple[Dims, Unordered] | None:
        dims = operands[0]
        joined: list[Any] = []
        for other in operands[1:]:
            found = self.broadcast(dims, other)
            if found is None:
                return None
            dims = found[0]
            joined += found[1].items
        return dims, unordered(*joined)

    def _joined(self, *atoms: Atom) -> Dim:
        own = [atom for atom in dict.fromkeys(atoms) if not self.is_broadcast(atom)]
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
    """Dimensions with empty ones in front, up to a rank."""
    return ((),) * (rank - len(dims)) + dims
