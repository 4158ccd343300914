"""Constants that hold sizes of the file's own inputs, rewritten for others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from onnxgc.model.core.ir import Array, Node
from onnxgc.model.rebatch.axis_change import (
    AxisChange,
    differing,
    grown_shape,
    merged,
    reshaped,
    resolved_target,
)
from onnxgc.model.rebatch.per_sample_constants import Copies
from onnxgc.model.rebatch.shape_pair import PairWalk, ShapePair
from onnxgc.model.rebatch.slice_independence import POINTWISE, einsum_terms

INDEXING = ("Gather", "GatherND")
_RESHAPING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


class Literals:
    """Rewrites the constants of one node after the other, while a walk for other input shapes goes on."""

    def __init__(self, walks: ShapePair) -> None:
        self._walks = walks
        self._copies = Copies(walks)

    def adapted(self, node: Node) -> Node:
        """The node with its literals for the other shapes; what must stand before it has been visited.

        Raises:
            CannotRebatchError: no literal is right, or it is not known which.
        """
        self._walks.placed = {}
        adapt = _ADAPTING.get(node.op)
        return node if adapt is None or node.domain else adapt(self, node)

    # -- reshaping --------------------------------------------------------------------------------

    def _reshape(self, node: Node) -> Node:
        walks, source, output = self._walks, node.inputs[0], node.outputs[0]
        growths = walks.of(source)
        before, target = walks.shape_in_file(source), walks.shape_in_file(output)
        if not growths or before is None or target is None or 0 in (*before, *target):
            return node
        choices = tuple(reshaped(growths, before, target))
        entries = walks.literal(node, "shape", 1) if node.op == "Reshape" else None
        if entries is None:
            here = self._reshaped_here(node)
            fitting = next((chosen for chosen in choices if grown_shape(target, chosen) == here), None)
            if fitting is not None:
                walks.placed[output] = merged(fitting, target)
            return node
        told = f"the literal target {entries} for '{source}', in the file of {list(before)}"
        if not choices:
            raise walks.refused(node, f"{told}, does not tell which of its sizes follow")
        chosen = choices[0]
        wanted = grown_shape(target, chosen)
        keeps_zeros = bool(node.attribute("allowzero", 0))
        numbers = list(entries)
        for place in chosen:
            is_copy = entries[place.axis] == 0 and walks.shape(source)[place.axis] == wanted[place.axis]
            if entries[place.axis] != -1 and not is_copy:
                numbers[place.axis] = wanted[place.axis]
        if resolved_target(numbers, walks.shape(source), keeps_zeros) != wanted:
            raise walks.refused(node, f"{told}, has no form for {list(wanted)}")
        is_assumed = len(choices) > 1 or numbers != entries
        places = (replace(place, is_assumed=place.is_assumed or is_assumed) for place in chosen)
        walks.placed[output] = merged(places, target)
        return node if numbers == entries else walks.with_setting(node, "shape", 1, numbers)

    def _reshaped_here(self, node: Node) -> tuple[int, ...] | None:
        """The shape that a node without a literal target reshapes to."""
        shape = self._walks.shape(node.inputs[0])
        rank = len(shape)
        if node.op == "Reshape":
            entries = self._walks.setting(node, "shape", 1)
            keeps_zeros = bool(node.attribute("allowzero", 0))
            return None if entries is None else resolved_target(entries, shape, keeps_zeros)
        if node.op == "Flatten":
            axis = int(node.attribute("axis", 1))
            axis += rank if axis < 0 else 0
            return math.prod(shape[:axis]), math.prod(shape[axis:])
        axes = self._walks.setting(node, "axes", 1) or []
        if node.op == "Unsqueeze":
            added = {axis % (rank + len(axes)) for axis in axes}
            sizes = iter(shape)
            return tuple(1 if axis in added else next(sizes) for axis in range(rank + len(axes)))
        dropped = {axis % rank for axis in axes} or {axis for axis, size in enumerate(shape) if size == 1}
        return tuple(size for axis, size in enumerate(shape) if axis not in dropped)

    # -- sizes along single axes ------------------------------------------------------------------

    def _expand(self, node: Node) -> Node:
        walks, source = self._walks, node.inputs[0]
        here, there = walks.setting(node, "shape", 1), walks.setting(node, "shape", 1, walks.there)
        if here is None or there is None:
            return node
        shift = len(here) - len(walks.shape(source))
        if here != there:
            for growth in differing(there, here):
                node = self._copies.fitted(node, 0, growth.axis - shift, growth)
            return node
        sizes = list(here)
        for growth in walks.of(source):
            axis = growth.axis + shift
            if axis >= 0 and sizes[axis] != 1:
                if sizes[axis] != growth.before:
                    raise walks.refused(node, f"it expands axis {growth.axis} of '{source}' to {sizes[axis]}")
                sizes[axis] = growth.after
        return node if sizes == here else walks.with_setting(node, "shape", 1, sizes)

    def _resize(self, node: Node) -> Node:
        walks, rank = self._walks, len(self._walks.shape(node.inputs[0]))
        literal = walks.literal(node, "sizes", 3)
        if literal is None:
            return node
        axes = [int(axis) % rank for axis in node.attribute("axes") or range(rank)]
        sizes = dict(zip(axes, literal, strict=True))
        for growth in walks.of(node.inputs[0]):
            if growth.axis in sizes and walks.is_bound(growth):
                if sizes[growth.axis] != growth.before:
                    raise walks.refused(node, f"it resizes axis {growth.axis}, along the batch")
                sizes[growth.axis] = growth.after
        numbers = list(sizes.values())
        return node if numbers == literal else walks.with_setting(node, "sizes", 3, numbers)

    def _tile(self, node: Node) -> Node:
        """Repeats stand in front of what they repeat."""
        repeats, growths = self._walks.setting(node, "repeats", 1), self._walks.of(node.inputs[0])
        if repeats is not None and growths:
            self._walks.placed[node.outputs[0]] = tuple(
                replace(growth, outer=growth.outer * repeats[growth.axis]) for growth in growths
            )
        return node

    def _concat(self, node: Node) -> Node:
        walks = self._walks
        joined = int(node.attribute("axis", 1)) % max(len(walks.shape(node.inputs[0])), 1)
        beside = {g.axis: g for name in node.inputs for g in walks.of(name) if g.axis != joined}
        for axis, one in beside.items():
            for index in range(len(node.inputs)):
                node = self._copies.fitted(node, index, axis, one, is_exact=True)
        parts = [growth for name in node.inputs if (growth := walks.on(name, joined)) is not None]
        if len(parts) == len(node.inputs) and len({part.order[1:] for part in parts}) == 1:
            read = [growth for name in node.inputs for growth in walks.of(name)]
            rest = (
                walks.propagate_growth(node, AxisChange(a, g.before, g.after), read)
                for a, g in beside.items()
            )
            is_assumed = any(part.is_assumed for part in parts)
            whole = replace(parts[0], outer=sum(part.outer for part in parts), is_assumed=is_assumed)
            walks.placed[node.outputs[0]] = (*rest, whole)
        return node

    def _split(self, node: Node) -> Node:
        walks, source = self._walks, node.inputs[0]
        axis = int(node.attribute("axis", 0)) % max(len(walks.shape(source)), 1)
        growth = walks.on(source, axis)
        if growth is None or not walks.is_bound(growth):
            return node
        shapes = [walks.shape_in_file(output) for output in node.outputs]
        parts = [0 if shape is None else shape[axis] for shape in shapes]
        if 0 in parts or any(part % (growth.old * growth.inner) for part in parts):
            raise walks.refused(node, f"it cuts '{source}' into parts of {parts} along the batch")
        literal = walks.literal(node, "split", 1)
        is_assumed = growth.is_assumed or literal is not None
        for output, part in zip(node.outputs, parts, strict=True):
            whole = replace(growth, outer=part // (growth.old * growth.inner), is_assumed=is_assumed)
            walks.placed[output] = (*walks.others(source, growth), whole)
        sizes = [part // growth.old * growth.new for part in parts]
        return node if literal is None else walks.with_setting(node, "split", 1, sizes)

    # -- parts of an axis -------------------------------------------------------------------------

    def _slice(self, node: Node) -> Node:
        for growth in filter(self._walks.is_bound, self._walks.of(node.inputs[0])):
            node = self._sliced(node, growth)
        return node

    def _sliced(self, node: Node, growth: AxisChange) -> Node:
        """The node with bounds that take the same samples of each part, or all of them."""
        walks, source = self._walks, node.inputs[0]
        here, there = self._cut(node, growth.axis, walks.here), self._cut(node, growth.axis, walks.there)
        if here is None and there is None:
            return node
        refused = walks.refused(node, f"it takes certain samples of '{source}'")
        if here is None or there is None:
            raise refused
        first, last, step = there.indices(growth.before)
        block = growth.old * growth.inner
        if step != 1 or first >= last or first % block or last % block:
            # What counts from the ends alone may stay where samples are in their own order.
            if growth.is_strict or here != there or here.start > 0 or 0 <= here.stop <= growth.before:
                raise refused
            return node
        wanted = slice(first // growth.old * growth.new, last // growth.old * growth.new, 1)
        is_right = here.indices(growth.after) == wanted.indices(growth.after)
        if not is_right:
            if here != there or here.start < 0 or here.stop < 0:
                raise refused
            node = self._with_bound(node, "starts", 1, growth.axis, wanted.start)
            node = self._with_bound(node, "ends", 2, growth.axis, wanted.stop)
        outer = (last - first) // block
        is_assumed = growth.is_assumed or not is_right or outer != growth.outer
        whole = replace(growth, outer=outer, is_assumed=is_assumed)
        walks.placed[node.outputs[0]] = (*walks.others(source, growth), whole)
        return node

    def _cut(self, node: Node, axis: int, walk: PairWalk) -> slice | None:
        """What a Slice takes of an axis; None where that is all of it, or not known."""
        starts, ends = (self._walks.setting(node, *key, walk) for key in (("starts", 1), ("ends", 2)))
        steps, place = self._walks.setting(node, "steps", 4, walk), self._position(node, axis)
        if starts is None or ends is None or place is None:
            return None
        return slice(starts[place], ends[place], steps[place] if steps else 1)

    def _position(self, node: Node, axis: int) -> int | None:
        """Which of a Slice's settings are for an axis."""
        rank = len(self._walks.shape(node.inputs[0]))
        axes = self._walks.setting(node, "axes", 3) or range(
            len(self._walks.setting(node, "starts", 1) or ())
        )
        return next((place for place, one in enumerate(axes) if one % rank == axis), None)

    def _with_bound(self, node: Node, key: str, index: int, axis: int, bound: int) -> Node:
        place = self._position(node, axis)
        bounds = self._walks.setting(node, key, index) or []
        changed = [bound if number == place else old for number, old in enumerate(bounds)]
        return self._walks.with_setting(node, key, index, changed)

    def _gather(self, node: Node) -> Node:
        """Indices of what each sample has at the same place, as those of strides are."""
        walks, source = self._walks, node.inputs[0]
        here, there = walks.here.value(node.inputs[1]), walks.there.value(node.inputs[1])
        growth = walks.on(source, 0)
        is_first = not node.attribute("axis", 0) and not node.attribute("batch_dims", 0)
        if growth is None or not is_first or walks.others(source, growth) or here is None or there is None:
            return node
        is_vector = node.op == "GatherND"
        found = _sample_by_sample(there if is_vector else there[..., None], growth)
        if found is None:
            return node
        wanted = found[1] if is_vector else found[1][..., 0]
        if not np.array_equal(here, wanted):
            if not np.array_equal(here, there):
                return node
            fresh = walks.here.add_fresh_constant(f"{node.inputs[1]}_{node.name}", wanted)
            node = walks.with_input(node, 1, fresh)
        walks.placed[node.outputs[0]] = (AxisChange(found[0], growth.old, growth.new, is_assumed=True),)
        return node

    def _elements(self, node: Node) -> Node:
        """Indices, and what is scattered, for the samples of the data."""
        walks = self._walks
        own = int(node.attribute("axis", 0)) % max(len(walks.shape(node.inputs[0])), 1)
        for growth in walks.of(node.inputs[0]):
            for index in range(1, len(node.inputs)):
                if growth.axis != own:
                    node = self._copies.fitted(node, index, growth.axis, growth, is_exact=True)
        return node

    # -- operands that must fit ---------------------------------------------------------------------

    def _pointwise(self, node: Node) -> Node:
        return self._copies.beside(node, range(len(node.inputs)))

    def _matmul(self, node: Node) -> Node:
        return self._copies.beside(node, (0, 1), nearest=3)

    def _gemm(self, node: Node) -> Node:
        growth = self._walks.on(node.inputs[0], 1 if node.attribute("transA", 0) else 0)
        if growth is None or not self._walks.has(node, 2) or len(self._walks.shape(node.inputs[2])) < 2:
            return node
        return self._copies.fitted(node, 2, 0, growth)

    def _einsum(self, node: Node) -> Node:
        terms, _ = einsum_terms(node, [len(self._walks.shape(name)) for name in node.inputs])
        for name, term in zip(node.inputs, terms, strict=True):
            for growth in self._walks.of(name):
                letter = term[growth.axis]
                for index, other in enumerate(terms):
                    if letter in other:
                        node = self._copies.fitted(node, index, other.index(letter), growth, is_exact=True)
        return node

    def _recurrent(self, node: Node) -> Node:
        """States and lengths of sequences have the samples of the data."""
        samples = 0 if node.attribute("layout", 0) else 1
        growth = self._walks.on(node.inputs[0], samples)
        for index, axis in ((4, 0), (5, samples), (6, samples)):
            if growth is not None and self._walks.has(node, index):
                node = self._copies.fitted(node, index, axis, growth, is_exact=True)
        return node

    def _reverse_sequence(self, node: Node) -> Node:
        growth = self._walks.on(node.inputs[0], int(node.attribute("batch_axis", 1)))
        return node if growth is None else self._copies.fitted(node, 1, 0, growth, is_exact=True)


def _sample_by_sample(indices: Array, growth: AxisChange) -> tuple[int, Array] | None:
    """The axis along which vectors of indices go from sample to sample, and the indices for the new samples.

    The samples are on the first axis of what is indexed, each of `growth.inner` elements.
    """
    step = np.zeros(indices.shape[-1], indices.dtype)
    step[0] = growth.inner
    for axis, size in enumerate(indices.shape[:-1]):
        if size != growth.old or growth.outer != 1:
            continue
        first = np.moveaxis(indices, axis, -2)[..., :1, :]
        if np.any(first[..., 0] < 0) or np.any(first[..., 0] >= growth.inner):
            continue
        of_file, wanted = (first + np.arange(count)[:, None] * step for count in (growth.old, growth.new))
        if np.array_equal(of_file, np.moveaxis(indices, axis, -2)):
            return axis, np.moveaxis(wanted, -2, axis).astype(indices.dtype)
    return None


_ADAPTING: Mapping[str, Callable[[Literals, Node], Node]] = {
    **dict.fromkeys(POINTWISE, Literals._pointwise),
    **dict.fromkeys(_RESHAPING, Literals._reshape),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), Literals._recurrent),
    **dict.fromkeys(INDEXING, Literals._gather),
    **dict.fromkeys(("GatherElements", "ScatterElements"), Literals._elements),
    "Concat": Literals._concat,
    "Einsum": Literals._einsum,
    "Expand": Literals._expand,
    "Gemm": Literals._gemm,
    "MatMul": Literals._matmul,
    "Resize": Literals._resize,
    "ReverseSequence": Literals._reverse_sequence,
    "Slice": Literals._slice,
    "Split": Literals._split,
    "Tile": Literals._tile,
}
