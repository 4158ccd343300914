"""Digests of the cones of values: their computation from the inputs, and their paths to the outputs.

Equal forward digests: the same function of the inputs, given weights of the same shapes. Equal backward
digests: the same paths to the outputs. A product with weights is one *layer* with the weights that are added
to or multiplied with its channels afterwards: a bias or fixed-statistics normalisation gives the same digest
whether separate, in the product, or folded into the weights. A normalisation by batch statistics counts
as one by fixed statistics; one by the statistics of each sample is an operator.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxgc.matching.graph_helpers import grouped, reachable
from onnxgc.matching.normal_form.affine import ADDED, MULTIPLIED
from onnxgc.matching.normal_form.channel_slices import overlapping
from onnxgc.matching.normal_form.entities import Entity
from onnxgc.matching.normal_form.terms import OfAxis, OfValue, leaves, rendered
from onnxgc.matching.normal_form.value_graph import Structure

LINEAR = frozenset({"linear", "Conv", "ConvTranspose"})

Edge = tuple[int, str]
"""A neighbouring value, and the position in a term at which one of the two reads the other."""


@dataclass(frozen=True, slots=True)
class ConeDigests:
    """Digests by value.

    `backward` has only *live* values, which reach an output. `anchors` maps each value inside a layer to the
    last value of the layer. `readers` and `operands` are the edges of whole layers; if a value contributed an
    axis to a product, readers of the axis count as readers of the value. `reads` are the edges of single
    values.
    """

    forward: dict[int, str]
    backward: dict[int, str]
    anchors: dict[int, int]
    readers: dict[int, list[Edge]]
    operands: dict[int, list[Edge]]
    reads: list[list[Edge]]

    def reversed(self) -> "ConeDigests":
        """The digests of the network read from its outputs to its inputs."""
        return replace(self, forward=self.backward, backward=self.forward, readers=self.operands, operands=self.readers)


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def cone_digests(structure: Structure, outputs: Sequence[int], *, include_biases: bool = True) -> ConeDigests:
    """The digests of a structure with these output values.

    Without `include_biases`, a product with weights has one digest with or without a bias or normalisation.
    """
    layers = _Layers(structure, outputs, include_biases)
    live, anchors, reads = layers.live, layers.anchors, layers.reads
    forward = layers.forward()
    for whole in sorted({whole for whole, _ in structure.parts.values()} - live):
        # A layer that is read in parts only differs from a layer of its size.
        forward[whole] = digest("packed", forward[whole])
    readers: dict[int, list[Edge]] = {value: [] for value in live}
    operands: dict[int, list[Edge]] = {value: [] for value in live}
    for value in sorted(live):
        anchor = anchors.get(value, value)
        for operand, path in reads[value]:
            if anchors.get(operand) != anchor:
                readers[operand].append((anchor, path))
                operands[anchor].append((operand, path))
    for value, anchor in anchors.items():
        readers[value].append((anchor, "inside"))
    return ConeDigests(forward, layers.backward(readers), anchors, readers, operands, reads)


def refine_digests(
    keys: dict[int, str], labels: dict[int, str], edges_of: Callable[[int], list[Edge]]
) -> dict[int, str]:
    """Digests that include the labels and digests of the neighbours."""
    return {
        value: digest(key, sorted((labels.get(n, ""), path, keys.get(n, "")) for n, path in edges_of(value)))
        for value, key in keys.items()
    }


# -- the graph of values --


def _values_in(entity: Entity) -> Iterable[int]:
    return (leaf.value for _, leaf in leaves(entity.term) if isinstance(leaf, OfValue))


def batch_normalizations(structure: Structure) -> frozenset[int]:
    """The normalisations by batch statistics: those that reduce the first dimension of an input."""
    batches: set[int] = set()
    normalizations: set[int] = set()
    for index, entity in enumerate(structure.entities):
        axes = {leaf.axis for _, leaf in leaves(entity.term) if isinstance(leaf, OfAxis)}
        if entity.op == "input" and not entity.is_axis:
            batches.update(atom.axis for dim in structure.views[entity.weights[0]].dims[:1] for atom in dim)
        elif batches.isdisjoint(axes):
            continue
        elif entity.op == "joined":
            batches.add(index)
        elif entity.op == "normalize":
            normalizations.add(index)
    return frozenset(normalizations)


def _reads(entities: Sequence[Entity]) -> list[list[Edge]]:
    """The operands of each value, and the values that brought the axes in its term."""
    reads: list[list[Edge]] = []
    owners: dict[int, frozenset[int]] = {}
    for index, entity in enumerate(entities):
        reads.append([])
        if entity.is_axis:
            owners[index] = _axis_owners(entity, owners)
            continue
        for path, leaf in leaves(entity.term):
            if isinstance(leaf, OfValue):
                reads[index].append((leaf.value, path))
            else:
                reads[index] += ((owner, f"{path}|axis") for owner in sorted(owners[leaf.axis]))
    return reads


def _axis_owners(axis: Entity, owners: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The values that brought an axis into a product, including an axis that was joined with others later."""
    if axis.op == "own":
        return frozenset(_values_in(axis))
    if axis.op != "joined":
        return frozenset()
    inner = (owners[leaf.axis] for _, leaf in leaves(axis.term) if isinstance(leaf, OfAxis))
    return frozenset[int]().union(*inner)


def nearest_live_operands(cones: ConeDigests, value: int) -> set[int]:
    """The nearest live values on each path from a value that is not live to the inputs."""

    def dead_operands(dead: int) -> Iterable[int]:
        return (operand for operand, _ in cones.reads[dead] if operand not in cones.backward)

    edges = (edge for dead in reachable([value], dead_operands) for edge in cones.reads[dead])
    return {operand for operand, _ in edges if operand in cones.backward}


# -- layers --


@dataclass(frozen=True, slots=True)
class _LayerPrefix:
    """A layer up to one of its values: the digest of its start, and the affine operators after that."""

    start: str
    is_product: bool
    operators: tuple[str, ...] = ()

    def form(self, include_biases: bool) -> tuple[bool, ...]:
        """Whether the result is scaled and shifted. The weights of a product absorb a scale."""
        if self.is_product and not include_biases:
            return ()
        is_scaled = any(op in (MULTIPLIED, "normalize") for op in self.operators)
        is_shifted = any(op in (ADDED, "normalize") for op in self.operators)
        return (is_scaled or is_shifted,) if self.is_product else (is_scaled, is_shifted)


class _Layers:
    """The values of a structure, and the layers that they form.

    `affine` values are products and sums with weights, and normalisations by batch statistics. `anchors` maps
    each value inside a layer to the last value of the layer.
    """

    def __init__(self, structure: Structure, outputs: Sequence[int], include_biases: bool) -> None:
        self._entities = structure.entities
        self._outputs = outputs
        self._include_biases = include_biases
        self.reads = _reads(structure.entities)
        self.live = reachable(outputs, lambda value: (operand for operand, _ in self.reads[value]))
        self._affine = batch_normalizations(structure).union(
            index for index, entity in enumerate(structure.entities) if entity.op in (MULTIPLIED, ADDED)
        )
        self.anchors = self._layer_anchors()
        self._overlaps = overlapping(structure, self.live)

    def _source(self, affine: int) -> int:
        return next(iter(_values_in(self._entities[affine])))

    def _layer_anchors(self) -> dict[int, int]:
        """The last value of the layer for each value inside one.

        A layer is shifted, scaled, and shifted again at most: two normalisations are two layers.
        """
        readers: dict[int, set[int]] = defaultdict(set)
        for value in self.live:
            for operand, _ in self.reads[value]:
                readers[operand].add(value)
        following: dict[int, int] = {}
        # 0 before the layer is scaled, 1 afterwards, 2 once it is shifted after that.
        stages: dict[int, int] = {}
        for value in sorted(self.live & self._affine):
            entity, source = self._entities[value], self._source(value)
            before, stage = self._entities[source], stages.get(source, 0)
            is_only_reader = readers[source] == {value} and source not in self._outputs
            is_in_layer = before.op in LINEAR or source in self._affine
            is_along_channels = is_in_layer and set(before.cover) == set(entity.cover)
            is_shift = entity.op == ADDED
            if is_only_reader and is_along_channels and (is_shift or stage < 2):
                following[source] = value
            else:
                stage = 0
            stages[value] = (2 if stage else 0) if is_shift else 1
        anchors: dict[int, int] = {}
        for source, value in sorted(following.items(), reverse=True):
            anchors[source] = anchors.get(value, value)
        return anchors

    def forward(self) -> dict[int, str]:
        known: list[str] = []
        prefixes: dict[int, _LayerPrefix] = {}
        for index, entity in enumerate(self._entities):
            kind = ("axis", entity.size) if entity.is_axis else ()
            raw = digest(*kind, entity.op, rendered(entity.term, known), *self._overlaps.get(index, ()))
            prefix = self._layer_up_to(index, raw, known, prefixes)
            if prefix is None:
                known.append(raw)
                continue
            prefixes[index] = prefix
            is_inside = index in self.anchors
            form = prefix.operators if is_inside else prefix.form(self._include_biases)
            known.append(digest("layer", prefix.start, form, is_inside))
        return {index: known[index] for index, entity in enumerate(self._entities) if not entity.is_axis}

    def _layer_up_to(
        self, value: int, raw: str, known: Sequence[str], prefixes: Mapping[int, _LayerPrefix]
    ) -> _LayerPrefix | None:
        """The layer up to a value; None for values outside layers."""
        entity = self._entities[value]
        if entity.op in LINEAR and not entity.is_axis:
            return _LayerPrefix(raw, is_product=True)
        if value not in self._affine:
            return None
        source = self._source(value)
        if source in self.anchors and self.anchors[source] == self.anchors.get(value, value):
            before = prefixes[source]
        elif entity.op == "normalize" and value not in self.anchors:
            # No weight along the same axes follows.
            return None
        else:
            cover = sorted(rendered((OfAxis(atom.axis), atom.size, atom.stride), known) for atom in entity.cover)
            before = _LayerPrefix(digest("affine", known[source], cover), is_product=False)
        return replace(before, operators=(*before.operators, entity.op))

    def backward(self, readers: Mapping[int, list[Edge]]) -> dict[int, str]:
        known: dict[int, str] = {}
        members = grouped((self.anchors.get(value, value), value) for value in sorted(self.live))
        for value in sorted(self.live, reverse=True):
            if value in self.anchors:
                known[value] = digest("inside", known[self.anchors[value]], self._entities[value].op)
                continue
            uses = sorted((known[reader], path) for reader, path in readers[value])
            positions = [position for position, output in enumerate(self._outputs) if output == value]
            local = self._local_digest(members[value])
            known[value] = digest(local, uses, positions, *self._overlaps.get(members[value][0], ()))
        return known

    def _local_digest(self, members: Sequence[int]) -> str:
        """The operators of a layer, or of a value outside layers, without their operands."""
        first = self._entities[members[0]]
        is_product = first.op in LINEAR
        operators = tuple(self._entities[value].op for value in members if value in self._affine)
        is_lone_normalization = len(members) == 1 and first.op == "normalize"
        if is_lone_normalization or not (is_product or operators):
            return digest(first.op, rendered(first.term, None))
        start = digest(first.op, rendered(first.term, None)) if is_product else ""
        form = _LayerPrefix(start, is_product, operators).form(self._include_biases)
        return digest(start, form, sorted(atom.size for atom in first.cover))
