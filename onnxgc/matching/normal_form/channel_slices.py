"""Some channels of a layer as a layer with the weights of these channels alone.

Exporters pack the projections to queries, keys and values, or the two halves of a gate, into one product, and
split its result in many ways. The chosen channels become part of the weights' names, as if those were stored
separately.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnxgc.matching.graph_helpers import grouped
from onnxgc.matching.normal_form.affine import layer, plus_number, weighted_along
from onnxgc.matching.normal_form.dimensions import Atom, Dim, as_set, atoms_of, extent
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.functions import normalized_value
from onnxgc.matching.normal_form.recognized_forms import Affine, Layer, Normalized, Plus, Shifted
from onnxgc.matching.normal_form.value_graph import Structure

Rows = tuple[int, ...]


def part_of_layer(structure: Structure, x: View, axis: int, chosen: Sequence[int]) -> View | None:
    """The chosen positions along a layer's channels, as a layer; None along other dimensions."""
    if len(x.dims[axis]) != 1:
        return None
    (cut,) = x.dims[axis]
    channels = _channels(structure, x.value)
    own = tuple(atom for atom in atoms_of(x.dims) if atom.axis == cut.axis)
    if not channels or channels[0].axis != cut.axis or extent(own) != extent(channels):
        return None
    outer = extent(channels) // (cut.size * cut.stride)
    blocks = [number * cut.size + item for number in range(outer) for item in chosen]
    rows = tuple(block * cut.stride + row for block in blocks for row in range(cut.stride))
    value, new = _part(structure, x.value, rows)
    dims = tuple(tuple(after for atom in dim for after in _after_cut(atom, cut, len(chosen), new)) for dim in x.dims)
    return replace(x, value=value, dims=dims)


def _after_cut(atom: Atom, cut: Atom, count: int, new: Dim) -> Dim:
    """An atom after `count` positions of the atom `cut` remain and its axis is replaced by `new`."""
    if atom.axis != cut.axis:
        return (atom,)
    size = count if atom == cut else atom.size
    stride = atom.stride // cut.size * count if atom.stride > cut.stride else atom.stride
    return (Atom(new[0].axis, size, stride),) if size > 1 else ()


def _channels(structure: Structure, value: int) -> Dim:
    """The channels of a layer, or of a layer with channelwise operators after it; () for other values."""
    match structure.facts.get(value):
        case Layer(channels):
            return channels
        case Plus(inner):
            return _channels(structure, inner)
        case Affine(inner, cover=cover):
            channels, covered = _channels(structure, inner), cover
        case Normalized(inner, over=over, rest=rest):
            channels, covered = _channels(structure, inner), rest
            if any(atom.axis == channel.axis for atom in over for channel in channels):
                return ()
        case _:
            return ()
    is_separate = {atom.axis for atom in covered}.isdisjoint(atom.axis for atom in channels)
    return channels if is_separate or set(channels) <= set(covered) else ()


def _part(structure: Structure, value: int, rows: Rows) -> tuple[int, Dim]:
    """A layer, or a channelwise operator after one, with these channels alone; and the dimension of these."""
    if value in structure.parts:
        value, whole_rows = structure.parts[value]
        rows = tuple(whole_rows[row] for row in rows)
    match structure.facts[value]:
        case Layer(op=op, weights=(weight, *use), operands=operands):
            part, new = layer(structure, op, (_named(weight, rows), *use), len(rows), *operands)
        case Plus(whole, offset):
            inner, new = _part(structure, whole, rows)
            part = plus_number(structure, View(inner, ()), offset).value
        case Normalized(whole, over, epsilon, rest):
            inner, new = _part(structure, whole, rows)
            rest = _with_axis_replaced(rest, _channels(structure, whole), new)
            part = normalized_value(structure, Normalized(inner, over, epsilon, rest))
        case Affine(whole, weight, cover, scale) as affine:
            inner, new = _part(structure, whole, rows)
            covered = _with_axis_replaced(cover, _channels(structure, whole), new)
            taken = weight if covered == cover else replace(weight, name=_named(weight.name, rows))
            x, is_added = View(inner, (), scale), isinstance(affine, Shifted)
            part = weighted_along(structure, x, taken, covered, is_added=is_added).value
        case fact:
            raise TypeError(f"no channels: {fact}")
    structure.parts[part] = (value, rows)
    return part, new


def _with_axis_replaced(cover: Dim, channels: Dim, new: Dim) -> Dim:
    """A cover in which `new` replaces the axis of the channels."""
    return as_set(*((atom,) if atom.axis != channels[0].axis else new for atom in cover))


def _named(weight: str, rows: Rows) -> str:
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    is_run = rows == tuple(range(rows[0], rows[0] + step * len(rows), step)) if step else False
    return f"{weight}[{rows[0]}::{step} {len(rows)}]" if is_run else f"{weight}{list(rows)}"


def overlapping(structure: Structure, live: Collection[int]) -> Mapping[int, Rows]:
    """The parts that share channels with other parts, or with a layer that is also read as a whole.

    Separate layers would not share channels. The channels distinguish such parts from separate layers.
    """
    by_whole = grouped(
        (whole, (part, rows))
        for part, (whole, rows) in structure.parts.items()
        if part in live and isinstance(structure.facts[part], Layer)
    )
    overlaps: dict[int, Rows] = {}
    for whole, parts in by_whole.items():
        times = Counter(row for _, rows in parts for row in rows)
        size = extent(structure.entities[whole].cover)
        for part, rows in parts:
            if whole in live or any(times[row] > 1 for row in rows):
                overlaps[part] = (size, *rows)
    return overlaps
