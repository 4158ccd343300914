"""Constants that contain sizes of the file's inputs, rewritten for new sizes, operator by operator."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from onnxgc.model.core.ir import Array, Node
from onnxgc.model.operators.einsum_equation import equation_labels
from onnxgc.model.operators.facts import has_input
from onnxgc.model.operators.registry import POINTWISE
from onnxgc.model.rebatch.axis_change import AxisChange, changed_shape, differing, merged, reshaped, resolved_target
from onnxgc.model.rebatch.per_sample_constants import OperandFitter
from onnxgc.model.rebatch.shape_pair import RESHAPING, ShapePair, ShapeWalk

INDEXING = ("Gather", "GatherND")


class LiteralRewriter:
    """Rewrites the constants of each node during the walk for the new input shapes."""

    def __init__(self, walks: ShapePair) -> None:
        self._walks = walks
        self._operands = OperandFitter(walks)

    def adapted(self, node: Node) -> Node:
        """The node with literals for the new shapes; nodes added before it have been visited.

        Raises:
            CannotRebatchError: no literal fits, or the choice is ambiguous.
        """
        self._walks.placed = {}
        rewrite = _REWRITES.get(node.op)
        return node if rewrite is None or node.domain else rewrite(self, node)

    # -- reshaping --

    def _reshape(self, node: Node) -> Node:
        walks, source, output = self._walks, node.inputs[0], node.outputs[0]
        changes = walks.changes_of(source)
        before, target = walks.shape_in_file(source), walks.shape_in_file(output)
        if not changes or before is None or target is None or 0 in (*before, *target):
            return node
        choices = tuple(reshaped(changes, before, target))
        entries = walks.literal(node, "shape", 1) if node.op == "Reshape" else None
        if entries is None:
            new = walks.new.output_shape(node)
            fitting = next((chosen for chosen in choices if changed_shape(target, chosen) == new), None)
            if fitting is not None:
                walks.placed[output] = merged(fitting, target)
            return node
        literal = f"the literal target {entries} for '{source}', {list(before)} in the file,"
        if not choices:
            raise walks.refusal(node, f"{literal} does not show which of its sizes change")
        chosen = choices[0]
        wanted = changed_shape(target, chosen)
        keeps_zeros = bool(node.attribute("allowzero", 0))
        numbers = list(entries)
        for axis in (change.axis for change in chosen):
            is_copy = entries[axis] == 0 and walks.shape(source)[axis] == wanted[axis]
            if entries[axis] != -1 and not is_copy:
                numbers[axis] = wanted[axis]
        if resolved_target(numbers, walks.shape(source), keeps_zeros) != wanted:
            raise walks.refusal(node, f"{literal} cannot become {list(wanted)}")
        is_assumed = len(choices) > 1 or numbers != entries
        assumed = (replace(change, is_assumed=change.is_assumed or is_assumed) for change in chosen)
        walks.placed[output] = merged(assumed, target)
        return node if numbers == entries else walks.with_setting(node, "shape", 1, numbers)

    # -- sizes along single axes --

    def _expand(self, node: Node) -> Node:
        walks, source = self._walks, node.inputs[0]
        new, in_file = walks.setting(node, "shape", 1), walks.setting(node, "shape", 1, walks.in_file)
        if new is None or in_file is None:
            return node
        shift = len(new) - len(walks.shape(source))
        if new != in_file:
            for change in differing(in_file, new):
                node = self._operands.fit(node, 0, change.axis - shift, change)
            return node
        sizes = list(new)
        for change in walks.changes_of(source):
            axis = change.axis + shift
            if axis >= 0 and sizes[axis] != 1:
                if sizes[axis] != change.before:
                    raise walks.refusal(node, f"it expands axis {change.axis} of '{source}' to {sizes[axis]}")
                sizes[axis] = change.after
        return node if sizes == new else walks.with_setting(node, "shape", 1, sizes)

    def _resize(self, node: Node) -> Node:
        walks, rank = self._walks, len(self._walks.shape(node.inputs[0]))
        literal = walks.literal(node, "sizes", 3)
        if literal is None:
            return node
        axes = [int(axis) % rank for axis in node.attribute("axes") or range(rank)]
        sizes = dict(zip(axes, literal, strict=True))
        for change in walks.changes_of(node.inputs[0]):
            if change.axis in sizes and walks.must_check_constants(change):
                if sizes[change.axis] != change.before:
                    raise walks.refusal(node, f"it resizes axis {change.axis}, along the batch")
                sizes[change.axis] = change.after
        numbers = list(sizes.values())
        return node if numbers == literal else walks.with_setting(node, "sizes", 3, numbers)

    def _tile(self, node: Node) -> Node:
        """Repeats are outermost in their axis."""
        repeats, changes = self._walks.setting(node, "repeats", 1), self._walks.changes_of(node.inputs[0])
        if repeats is not None and changes:
            self._walks.placed[node.outputs[0]] = tuple(
                replace(change, outer=change.outer * repeats[change.axis]) for change in changes
            )
        return node

    def _concat(self, node: Node) -> Node:
        walks = self._walks
        joined = walks.own_axis(node, 1)
        other = {g.axis: g for name in node.inputs for g in walks.changes_of(name) if g.axis != joined}
        for axis, change in other.items():
            for index in range(len(node.inputs)):
                node = self._operands.fit(node, index, axis, change, is_exact=True)
        parts = [p for name in node.inputs if (p := walks.change_along(name, joined)) is not None]
        if len(parts) == len(node.inputs) and len({part.layout[1:] for part in parts}) == 1:
            read = [change for name in node.inputs for change in walks.changes_of(name)]
            rest = (walks.propagated_change(node, AxisChange(a, g.before, g.after), read) for a, g in other.items())
            is_assumed = any(part.is_assumed for part in parts)
            whole = replace(parts[0], outer=sum(part.outer for part in parts), is_assumed=is_assumed)
            walks.placed[node.outputs[0]] = (*rest, whole)
        return node

    def _split(self, node: Node) -> Node:
        walks, source = self._walks, node.inputs[0]
        axis = walks.own_axis(node, 0)
        change = walks.change_along(source, axis)
        if change is None or not walks.must_check_constants(change):
            return node
        shapes = [walks.shape_in_file(output) for output in node.outputs]
        parts = [0 if shape is None else shape[axis] for shape in shapes]
        if 0 in parts or any(part % (change.old * change.inner) for part in parts):
            raise walks.refusal(node, f"it splits '{source}' into parts of {parts} along the batch")
        literal = walks.literal(node, "split", 1)
        is_assumed = change.is_assumed or literal is not None
        for output, part in zip(node.outputs, parts, strict=True):
            whole = replace(change, outer=part // (change.old * change.inner), is_assumed=is_assumed)
            walks.placed[output] = (*walks.other_changes(source, change), whole)
        sizes = [part // change.old * change.new for part in parts]
        return node if literal is None else walks.with_setting(node, "split", 1, sizes)

    # -- parts of an axis --

    def _slice(self, node: Node) -> Node:
        for change in filter(self._walks.must_check_constants, self._walks.changes_of(node.inputs[0])):
            node = self._sliced(node, change)
        return node

    def _sliced(self, node: Node, change: AxisChange) -> Node:
        """The node with bounds that select the same samples, or whole batches."""
        walks, source = self._walks, node.inputs[0]
        new = self._bounds(node, change.axis, walks.new)
        in_file = self._bounds(node, change.axis, walks.in_file)
        if new is None and in_file is None:
            return node
        refusal = walks.refusal(node, f"it selects particular samples of '{source}'")
        if new is None or in_file is None:
            raise refusal
        first, last, step = in_file.indices(change.before)
        block = change.old * change.inner
        if step != 1 or first >= last or first % block or last % block:
            # Bounds that count from either end may stay if samples are in their order.
            if change.is_strict or new != in_file or new.start > 0 or 0 <= new.stop <= change.before:
                raise refusal
            return node
        wanted = slice(first // change.old * change.new, last // change.old * change.new, 1)
        is_right = new.indices(change.after) == wanted.indices(change.after)
        if not is_right:
            if new != in_file or new.start < 0 or new.stop < 0:
                raise refusal
            node = self._with_bound(node, "starts", 1, change.axis, wanted.start)
            node = self._with_bound(node, "ends", 2, change.axis, wanted.stop)
        outer = (last - first) // block
        is_assumed = change.is_assumed or not is_right or outer != change.outer
        whole = replace(change, outer=outer, is_assumed=is_assumed)
        walks.placed[node.outputs[0]] = (*walks.other_changes(source, change), whole)
        return node

    def _bounds(self, node: Node, axis: int, walk: ShapeWalk) -> slice | None:
        """The bounds of a Slice along an axis; None where it takes the whole axis, or is computed."""
        starts, ends = (self._walks.setting(node, *key, walk) for key in (("starts", 1), ("ends", 2)))
        steps, index = self._walks.setting(node, "steps", 4, walk), self._position(node, axis)
        if starts is None or ends is None or index is None:
            return None
        return slice(starts[index], ends[index], steps[index] if steps else 1)

    def _position(self, node: Node, axis: int) -> int | None:
        """The index of an axis in a Slice's settings."""
        rank = len(self._walks.shape(node.inputs[0]))
        starts = self._walks.setting(node, "starts", 1) or ()
        axes = self._walks.setting(node, "axes", 3) or range(len(starts))
        return next((index for index, one in enumerate(axes) if one % rank == axis), None)

    def _with_bound(self, node: Node, key: str, index: int, axis: int, bound: int) -> Node:
        position = self._position(node, axis)
        bounds = self._walks.setting(node, key, index) or []
        changed = [bound if number == position else old for number, old in enumerate(bounds)]
        return self._walks.with_setting(node, key, index, changed)

    def _gather(self, node: Node) -> Node:
        """Indices with the same pattern for each sample, as exporters write them for strided views."""
        walks, source = self._walks, node.inputs[0]
        new, in_file = walks.new.value(node.inputs[1]), walks.in_file.value(node.inputs[1])
        change = walks.change_along(source, 0)
        is_first = not node.attribute("axis", 0) and not node.attribute("batch_dims", 0)
        if not is_first or change is None or new is None or in_file is None:
            return node
        is_vector = node.op == "GatherND"
        match = _indices_per_sample(in_file if is_vector else in_file[..., None], change)
        if match is None or walks.other_changes(source, change):
            return node
        axis, vectors = match
        wanted = vectors if is_vector else vectors[..., 0]
        if not np.array_equal(new, wanted):
            if not np.array_equal(new, in_file):
                return node
            fresh = walks.new.add_fresh_constant(f"{node.inputs[1]}_{node.name}", wanted)
            node = walks.with_input(node, 1, fresh)
        walks.placed[node.outputs[0]] = (AxisChange(axis, change.old, change.new, is_assumed=True),)
        return node

    def _elements(self, node: Node) -> Node:
        """Indices and updates for the samples of the data."""
        walks = self._walks
        own_axis = walks.own_axis(node, 0)
        for change in walks.changes_of(node.inputs[0]):
            for index in range(1, len(node.inputs)):
                if change.axis != own_axis:
                    node = self._operands.fit(node, index, change.axis, change, is_exact=True)
        return node

    # -- operands that must fit --

    def _pointwise(self, node: Node) -> Node:
        return self._operands.fit_broadcast(node, range(len(node.inputs)))

    def _matmul(self, node: Node) -> Node:
        return self._operands.fit_broadcast(node, (0, 1), nearest=3)

    def _gemm(self, node: Node) -> Node:
        change = self._walks.change_along(node.inputs[0], 1 if node.attribute("transA", 0) else 0)
        if change is None or not has_input(node, 2) or len(self._walks.shape(node.inputs[2])) < 2:
            return node
        return self._operands.fit(node, 2, 0, change)

    def _einsum(self, node: Node) -> Node:
        terms, _ = equation_labels(
            str(node.attribute("equation")), [len(self._walks.shape(name)) for name in node.inputs]
        )
        for name, term in zip(node.inputs, terms, strict=True):
            for change in self._walks.changes_of(name):
                letter = term[change.axis]
                for index, other in enumerate(terms):
                    if letter in other:
                        node = self._operands.fit(node, index, other.index(letter), change, is_exact=True)
        return node

    def _recurrent(self, node: Node) -> Node:
        """Initial states and lengths of sequences follow the samples of the data."""
        samples = 0 if node.attribute("layout", 0) else 1
        change = self._walks.change_along(node.inputs[0], samples)
        for index, axis in ((4, 0), (5, samples), (6, samples)):
            if change is not None and has_input(node, index):
                node = self._operands.fit(node, index, axis, change, is_exact=True)
        return node

    def _reverse_sequence(self, node: Node) -> Node:
        change = self._walks.change_along(node.inputs[0], int(node.attribute("batch_axis", 1)))
        return node if change is None else self._operands.fit(node, 1, 0, change, is_exact=True)


def _indices_per_sample(indices: Array, change: AxisChange) -> tuple[int, Array] | None:
    """The axis of samples among vectors of indices, and the indices for the new samples.

    Samples lie along the indexed tensor's first axis, each of `change.inner` elements.
    """
    step = np.zeros(indices.shape[-1], indices.dtype)
    step[0] = change.inner
    for axis, size in enumerate(indices.shape[:-1]):
        if size != change.old or change.outer != 1:
            continue
        first = np.moveaxis(indices, axis, -2)[..., :1, :]
        if np.any(first[..., 0] < 0) or np.any(first[..., 0] >= change.inner):
            continue
        of_file, wanted = (first + np.arange(count)[:, None] * step for count in (change.old, change.new))
        if np.array_equal(of_file, np.moveaxis(indices, axis, -2)):
            return axis, np.moveaxis(wanted, -2, axis).astype(indices.dtype)
    return None


_REWRITES: Mapping[str, Callable[[LiteralRewriter, Node], Node]] = {
    **dict.fromkeys(POINTWISE, LiteralRewriter._pointwise),
    **dict.fromkeys(RESHAPING, LiteralRewriter._reshape),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), LiteralRewriter._recurrent),
    **dict.fromkeys(INDEXING, LiteralRewriter._gather),
    **dict.fromkeys(("GatherElements", "ScatterElements"), LiteralRewriter._elements),
    "Concat": LiteralRewriter._concat,
    "Einsum": LiteralRewriter._einsum,
    "Expand": LiteralRewriter._expand,
    "Gemm": LiteralRewriter._gemm,
    "MatMul": LiteralRewriter._matmul,
    "Resize": LiteralRewriter._resize,
    "ReverseSequence": LiteralRewriter._reverse_sequence,
    "Slice": LiteralRewriter._slice,
    "Split": LiteralRewriter._split,
    "Tile": LiteralRewriter._tile,
}
