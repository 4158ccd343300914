"""Parts of a layer's channels are layers too: those that have the weights of these channels alone.

Exporters pack the projections to queries, keys and values, or the two halves of a gate, into one product, and
cut its result apart in many ways. Which channels a part has only names its weights, as if they were
stored apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.dimensions import Atom, Dim, as_set, extent
from onnxgc.matching.normal_form.structure import Structure, View
from onnxgc.matching.normal_form.terms import Terms

Rows = tuple[int, ...]


def part_of_layer(terms: Terms, x: View, place: int, chosen: Sequence[int]) -> View | None:
    """Some places of a dimension along a layer's channels, as a layer; None for other dimensions."""
    if len(x.dims[place]) != 1:
        return None
    (cut,) = x.dims[place]
    channels = _channels(terms.structure, x.value)
    own = [atom for dim in x.dims for atom in dim if atom.axis == cut.axis]
    if not channels or channels[0].axis != cut.axis or extent(tuple(own)) != extent(channels):
        return None
    outer = extent(channels) // (cut.size * cut.stride)
    blocks = [number * cut.size + item for number in range(outer) for item in chosen]
    rows = tuple(block * cut.stride + row for block in blocks for row in range(cut.stride))
    value, new = _part(terms, x.value, rows)
    dims = tuple(
        tuple(moved for atom in dim for moved in _moved(atom, cut, len(chosen), new)) for dim in x.dims
    )
    return replace(x, value=value, dims=dims)


def _moved(atom: Atom, cut: Atom, count: int, new: Dim) -> Dim:
    """An atom where `count` places of the atom `cut` are left of its axis, which is `new` then."""
    if atom.axis != cut.axis:
        return (atom,)
    size = count if atom == cut else atom.size
    stride = atom.stride // cut.size * count if atom.stride > cut.stride else atom.stride
    return (Atom(new[0].axis, size, stride),) if size > 1 else ()


def _channels(structure: Structure, value: int) -> Dim:
    """The channels of a layer that a value is, with what follows it channel by channel; () for others."""
    known = structure.known_as.get(value, ("",))
    match known[0]:
        case "layer":
            new: Dim = known[1]
            return new
        case "plus":
            return _channels(structure, known[1])
        case "shifted" | "weighted":
            channels, covered = _channels(structure, known[1]), known[3]
        case "normalized":
            channels, covered = _channels(structure, known[1]), known[4]
            if any(atom.axis == channel.axis for atom in known[2] for channel in channels):
                return ()
        case _:
            return ()
    parted = {atom.axis for atom in covered} & {atom.axis for atom in channels}
    return channels if not parted or set(channels) <= set(covered) else ()


def _part(terms: Terms, value: int, rows: Rows) -> tuple[int, Dim]:
    """A layer, or what follows it channel by channel, with these channels alone."""
    if value in terms.structure.parts:
        value, held = terms.structure.parts[value]
        rows = tuple(held[row] for row in rows)
    kind, *known = terms.structure.known_as[value]
    if kind == "layer":
        _, op, (weight, *use), what = known
        found, new = terms.layer(op, (_named(weight, rows), *use), len(rows), *what)
    else:
        before = _channels(terms.structure, known[0])[0].axis
        inner, new = _part(terms, known[0], rows)
        match kind:
            case "plus":
                found = terms.plus_number(View(inner, ()), known[1]).value
            case "normalized":
                over, epsilon, rest = known[1:]
                found = terms.normalized_value(inner, over, epsilon, _covering(rest, before, new))
            case _:
                weight, cover, scale = known[1:]
                covered = _covering(cover, before, new)
                taken = weight if covered == cover else replace(weight, name=_named(weight.name, rows))
                found = terms.weighted_by(View(inner, (), scale), taken, covered, kind == "shifted").value
    terms.structure.parts[found] = (value, rows)
    return found, new


def _covering(cover: Dim, axis: int, new: Dim) -> Dim:
    """What is covered once an axis is another one."""
    return as_set(*((atom,) if atom.axis != axis else new for atom in cover))


def _named(weight: str, rows: Rows) -> str:
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    is_run = rows == tuple(range(rows[0], rows[0] + step * len(rows), step)) if step else False
    return f"{weight}[{rows[0]}::{step} {len(rows)}]" if is_run else f"{weight}{list(rows)}"


def overlapping(structure: Structure, live: Collection[int]) -> Mapping[int, Rows]:
    """The parts that have channels in common with others, or with a layer that is read as a whole too.

    They are not what layers apart would be: what tells them apart is which channels they have.
    """
    by_whole: dict[int, list[tuple[int, Rows]]] = {}
    for part, (whole, rows) in structure.parts.items():
        if part in live and structure.known_as[part][0] == "layer":
            by_whole.setdefault(whole, []).append((part, rows))
    found: dict[int, Rows] = {}
    for whole, parts in by_whole.items():
        times = Counter(row for _, rows in parts for row in rows)
        size = extent(structure.entities[whole].cover)
        for part, rows in parts:
            if whole in live or any(times[row] > 1 for row in rows):
                found[part] = (size, *rows)
    return found
