"""What each value is a function of, and how it reaches the outputs, as one digest each.

Equal forward digests: the same function of the inputs, given weights of the same shapes. Equal backward
digests: the same way to the outputs. A product with weights is one *layer* with what is added to and
multiplied with its channels behind it, so that it does not matter whether a bias or a normalisation by
fixed statistics stands apart, in the product, or in its weights. A normalisation by the statistics of the
batch counts as one by fixed ones; one by those of each sample is an operator of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxgc.matching.normal_form.channel_slices import Rows, overlapping
from onnxgc.matching.normal_form.structure import Entity, OfAxis, OfValue, Structure, leaves, rendered

LINEAR = frozenset({"linear", "Conv", "ConvTranspose"})

Role = tuple[int, str]


@dataclass(frozen=True, slots=True)
class ConeDigests:
    """Digests by value. `anchors` says which value is the whole layer that one is inside of.

    `backward` has only values that reach an output. `readers` and `operands` are those of layers as a
    whole, each with its role; a reader of an axis that a value brought into a product reads that value.
    `reads` are the same of each value.
    """

    forward: dict[int, str]
    backward: dict[int, str]
    anchors: dict[int, int]
    readers: dict[int, list[Role]]
    operands: dict[int, list[Role]]
    reads: list[list[Role]]

    def reversed(self) -> ConeDigests:
        """Those of the network read from its outputs to its inputs."""
        return replace(
            self,
            forward=self.backward,
            backward=self.forward,
            readers=self.operands,
            operands=self.readers,
        )


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def cones_of(structure: Structure, outputs: Sequence[int], *, are_biases_seen: bool = True) -> ConeDigests:
    """The digests of a structure whose graph ends in `outputs`.

    Unless `are_biases_seen`, a product with weights is the same with a bias or a normalisation as without.
    """
    entities = structure.entities
    reads = _reads(entities)
    live = _reaching(reads, outputs)
    affine = frozenset(
        index for index, entity in enumerate(entities) if entity.op in ("weighted", "shifted")
    ) | by_batch(structure)
    anchors = _absorbed(entities, reads, affine, live, frozenset(outputs))
    overlaps = overlapping(structure, live)
    forward = _forward(entities, affine, anchors, overlaps, are_biases_seen)
    for whole in sorted({whole for whole, _ in structure.parts.values()} - live):
        # What is only read in parts is no layer of its own, and none of the same size is the same.
        forward[whole] = digest("packed", forward[whole])
    readers: dict[int, list[Role]] = {value: [] for value in live}
    operands: dict[int, list[Role]] = {value: [] for value in live}
    for value in sorted(live):
        anchor = anchors.get(value, value)
        for operand, path in reads[value]:
            if anchors.get(operand) != anchor:
                readers[operand].append((anchor, path))
                operands[anchor].append((operand, path))
    for value, anchor in anchors.items():
        readers[value].append((anchor, "inside"))
    backward = _backward(entities, affine, live, anchors, readers, outputs, overlaps, are_biases_seen)
    return ConeDigests(forward, backward, anchors, readers, operands, reads)


def _values_in(entity: Entity) -> Iterable[int]:
    return (leaf.value for _, leaf in leaves(entity.term) if isinstance(leaf, OfValue))


def by_batch(structure: Structure) -> frozenset[int]:
    """The normalisations by the statistics of the batch: over the first dimension of an input too."""
    batches: set[int] = set()
    found: set[int] = set()
    for index, entity in enumerate(structure.entities):
        axes = {leaf.axis for _, leaf in leaves(entity.term) if isinstance(leaf, OfAxis)}
        if entity.op == "input" and not entity.is_axis:
            batches.update(atom.axis for dim in structure.views[entity.weights[0]].dims[:1] for atom in dim)
        elif batches.isdisjoint(axes):
            continue
        elif entity.op == "joined":
            batches.add(index)
        elif entity.op == "normalize":
            found.add(index)
    return frozenset(found)


def _reads(entities: Sequence[Entity]) -> list[list[Role]]:
    """The values that each value is made of, and those that brought the axes that it says something of."""
    found: list[list[Role]] = []
    owners: dict[int, frozenset[int]] = {}
    for index, entity in enumerate(entities):
        found.append([])
        if entity.is_axis:
            owners[index] = _owners(entity, owners)
            continue
        for path, leaf in leaves(entity.term):
            if isinstance(leaf, OfValue):
                found[index].append((leaf.value, path))
            else:
                found[index] += ((owner, f"{path}|axis") for owner in sorted(owners[leaf.axis]))
    return found


def _owners(axis: Entity, owners: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The values that brought an axis into a product, even if others have come to lie on it since."""
    if axis.op == "own":
        return frozenset(_values_in(axis))
    if axis.op != "joined":
        return frozenset()
    inner = {owners[leaf.axis] for _, leaf in leaves(axis.term) if isinstance(leaf, OfAxis)}
    return next(iter(inner)) if len(inner) == 1 else frozenset().union(*inner)


def grounds(cones: ConeDigests, value: int) -> set[int]:
    """What reaches the outputs of the values that one is made of which does not: the nearest on each way."""
    found: set[int] = set()
    pending, seen = [value], {value}
    while pending:
        for operand, _ in cones.reads[pending.pop()]:
            if operand in cones.backward:
                found.add(operand)
            elif operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return found


def _reaching(reads: Sequence[Sequence[Role]], outputs: Sequence[int]) -> set[int]:
    live, pending = set(outputs), list(outputs)
    while pending:
        for operand, _ in reads[pending.pop()]:
            if operand not in live:
                live.add(operand)
                pending.append(operand)
    return live


def _absorbed(
    entities: Sequence[Entity],
    reads: Sequence[Sequence[Role]],
    affine: frozenset[int],
    live: set[int],
    outputs: frozenset[int],
) -> dict[int, int]:
    """Values that end in the next weight of the same layer, with the last value of that layer.

    A layer is shifted, scaled, and shifted again at most: two normalisations are two layers.
    """
    readers: dict[int, set[int]] = {}
    for value in live:
        for operand, _ in reads[value]:
            readers.setdefault(operand, set()).add(value)
    following: dict[int, int] = {}
    # How far a layer is: 0 before it is scaled, 1 once it is, 2 when it is shifted behind that.
    stages: dict[int, int] = {}
    for value in sorted(live):
        entity = entities[value]
        if value not in affine:
            continue
        source = next(iter(_values_in(entity)))
        before, stage = entities[source], stages.get(source, 0)
        is_alone = readers[source] == {value} and source not in outputs
        is_alike = (before.op in LINEAR or source in affine) and set(before.cover) == set(entity.cover)
        is_shift = entity.op == "shifted"
        if is_alone and is_alike and (is_shift or stage < 2):
            following[source] = value
        else:
            stage = 0
        stages[value] = (2 if stage else 0) if is_shift else 1
    anchors: dict[int, int] = {}
    for source, value in sorted(following.items(), reverse=True):
        anchors[source] = anchors.get(value, value)
    return anchors


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer begins with, and the operators behind it up to a value of the layer."""

    start: str
    is_product: bool
    since: tuple[str, ...] = ()

    def form(self, are_biases_seen: bool) -> tuple[bool, ...]:
        """Whether the result is scaled and shifted. Behind a product, weights can take in the former."""
        if self.is_product and not are_biases_seen:
            return ()
        scales = any(op in ("weighted", "normalize") for op in self.since)
        shifts = any(op in ("shifted", "normalize") for op in self.since)
        return (scales or shifts,) if self.is_product else (scales, shifts)


def _forward(
    entities: Sequence[Entity],
    affine: frozenset[int],
    anchors: dict[int, int],
    overlaps: Mapping[int, Rows],
    are_biases_seen: bool,
) -> dict[int, str]:
    known: list[str] = []
    layers: dict[int, _Layer] = {}
    for index, entity in enumerate(entities):
        kind = ("axis", entity.size) if entity.is_axis else ()
        raw = digest(*kind, entity.op, rendered(entity.term, known), *overlaps.get(index, ()))
        layer = _layer_of(entities, affine, index, raw, known, anchors, layers)
        if layer is None:
            known.append(raw)
            continue
        layers[index] = layer
        is_inside = index in anchors
        known.append(
            digest("layer", layer.start, layer.since if is_inside else layer.form(are_biases_seen), is_inside)
        )
    return {index: known[index] for index, entity in enumerate(entities) if not entity.is_axis}


def _layer_of(
    entities: Sequence[Entity],
    affine: frozenset[int],
    value: int,
    raw: str,
    known: Sequence[str],
    anchors: dict[int, int],
    layers: dict[int, _Layer],
) -> _Layer | None:
    """The layer up to a value; None for what is no part of one."""
    entity = entities[value]
    if entity.op in LINEAR and not entity.is_axis:
        return _Layer(raw, is_product=True)
    if value not in affine:
        return None
    source = next(iter(_values_in(entity)))
    if source in anchors and anchors[source] == anchors.get(value, value):
        before = layers[source]
    elif entity.op == "normalize" and value not in anchors:
        # What follows extends along other axes, or is no weight.
        return None
    else:
        cover = sorted(rendered((OfAxis(atom.axis), atom.size, atom.stride), known) for atom in entity.cover)
        before = _Layer(digest("affine", known[source], cover), is_product=False)
    return replace(before, since=(*before.since, entity.op))


def _backward(
    entities: Sequence[Entity],
    affine: frozenset[int],
    live: set[int],
    anchors: dict[int, int],
    readers: dict[int, list[Role]],
    outputs: Sequence[int],
    overlaps: Mapping[int, Rows],
    are_biases_seen: bool,
) -> dict[int, str]:
    known: dict[int, str] = {}
    members: dict[int, list[int]] = {}
    for value in sorted(live):
        members.setdefault(anchors.get(value, value), []).append(value)
    for value in sorted(live, reverse=True):
        if value in anchors:
            known[value] = digest("inside", known[anchors[value]], entities[value].op)
            continue
        ways = sorted((known[reader], path) for reader, path in readers[value])
        ends = [place for place, output in enumerate(outputs) if output == value]
        local = _local(entities, affine, members[value], are_biases_seen)
        known[value] = digest(local, ways, ends, *overlaps.get(members[value][0], ()))
    return known


def _local(
    entities: Sequence[Entity], affine: frozenset[int], members: Sequence[int], are_biases_seen: bool
) -> str:
    """What a layer, or a value that is none, does, whatever it does that to."""
    first = entities[members[0]]
    is_product = first.op in LINEAR
    since = tuple(entities[value].op for value in members if value in affine)
    is_alone = len(members) == 1 and first.op == "normalize"
    if is_alone or not (is_product or since):
        return digest(first.op, rendered(first.term, None))
    start = digest(first.op, rendered(first.term, None)) if is_product else ""
    return digest(
        start,
        _Layer(start, is_product, since).form(are_biases_seen),
        sorted(atom.size for atom in first.cover),
    )


def refine_digests(
    keys: dict[int, str], labels: dict[int, str], around: Callable[[int], list[Role]]
) -> dict[int, str]:
    """Keys that say of the neighbours too what they are."""
    return {
        value: digest(key, sorted((labels.get(n, ""), path, keys.get(n, "")) for n, path in around(value)))
        for value, key in keys.items()
    }
