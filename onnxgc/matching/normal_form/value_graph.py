"""A network as values and axes, independent of memory layout and spelling.

A *value* is common to all tensors that hold it transposed, reshaped, cast or multiplied by a number. An
*axis* is a direction along which values extend, identified by its origin. Both are terms over earlier
entities. Equal terms are one entity: a value that a graph computes twice exists once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxgc.matching.normal_form.dimensions import Atom, Dim, Dims, coinciding, whole
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
        self, op: str, *term: Any, weights: tuple[Any, ...] = (), cover: Dim = (), fact: Fact | None = None
    ) -> int:
        """The value of a term; the first fact about it remains."""
        value = self._entity(Entity(op, term, weights, cover=cover))
        if fact is not None:
            self.facts.setdefault(value, fact)
        return value

    def axis(self, op: str, size: int, *term: Any, weights: tuple[Any, ...] = ()) -> Dim:
        """A dimension that is a whole axis."""
        if size == 1:
            return ()
        return whole(self._entity(Entity(op, term, weights, is_axis=True, size=size)), size)

    def is_broadcast(self, atom: Atom) -> bool:
        """Whether an atom is a dimension along which elements repeat, or along which a weight extends."""
        return self.entities[atom.axis].op == "broadcast"

    def broadcast(self, *operands: Dims) -> tuple[Dims, Unordered] | None:
        """The dimensions of an elementwise result, and the sets of different axes that coincide there."""
        rank = max(map(len, operands))
        dims: list[Dim] = []
        joined: list[Unordered] = []
        for column in zip(*(padded(operand, rank) for operand in operands), strict=True):
            rows = coinciding(*dict.fromkeys(filter(None, column)))
            if rows is None:
                return None
            dims.append(tuple(atom for row in rows for atom in self._joined(*row)))
            sets = (dict.fromkeys(row) for row in rows)
            joined += [unordered(*(in_terms((a,)) for a in atoms)) for atoms in sets if len(atoms) > 1]
        return tuple(dims), unordered(*joined)

    def separated(self, operands: Sequence[tuple[Any, Dims]]) -> tuple[list[Dims], tuple[Any, ...]]:
        """The dimensions of keyed operands, with a separate axis for each operand where one axis crosses.

        An axis crosses if two operands have it at different positions, such as x and its transpose. The
        result then records which operand each of its dimensions is from. Also returns a note that must become
        part of the result's term.
        """
        rank = max(len(dims) for _, dims in operands)
        aligned = [padded(dims, rank) for _, dims in operands]
        distinct = dict.fromkeys(aligned)
        crossing = {atom.axis for one in distinct for other in distinct for atom in self._crossing(one, other)}
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
                    self.axis("own", atom.size, key, in_terms((atom,)), number)[0] if atom.axis in crossing else atom
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
            pairs = coinciding(here, there) if here and there else None
            aligned = [(atom, None) for atom in here] if pairs is None else pairs
            for atom, opposite in aligned if here != there else ():
                is_moved = atom != opposite and any(atom.overlaps(a) for a in elsewhere)
                if is_moved and not self.is_broadcast(atom):
                    yield atom

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
