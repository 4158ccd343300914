"""Operands that are the same for each of a file's samples, made for other samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxgc.model.core.ir import Node
from onnxgc.model.rebatch.axis_change import AxisChange, grown_shape, reshaped
from onnxgc.model.rebatch.shape_pair import ShapePair, copied_to_all
from onnxgc.model.rebatch.slice_independence import POINTWISE, Place, is_independent

_RANDOM_OF_SHAPE = ("RandomNormal", "RandomUniform")
_RESHAPING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
# What may stand between a table that is copied for each sample and the use of the copies.
_BY_SAMPLES = ("Conv", "Gather", "Gemm", "LayerNormalization", "MatMul", "Slice", "Softmax")


class Copies:
    """Puts operands that fit beside those that have grown: zeros of a first state, a class token, a mask."""

    def __init__(self, walks: ShapePair) -> None:
        self._walks = walks

    def beside(self, node: Node, indices: Sequence[int], nearest: int = 1) -> Node:
        """The node with operands that are broadcast to each other, from the axis `nearest` to the last on."""
        ranks = {i: len(self._walks.shape(node.inputs[i])) for i in indices if self._walks.has(node, i)}
        grown = [(rank - g.axis, g) for i, rank in ranks.items() for g in self._walks.of(node.inputs[i])]
        for distance, growth in grown:
            for index, rank in ranks.items():
                if nearest <= distance <= rank:
                    node = self.fitted(node, index, rank - distance, growth)
        return node

    def fitted(
        self, node: Node, index: int, axis: int, growth: AxisChange, *, is_exact: bool = False
    ) -> Node:
        """The node with an operand that has grown as `growth`; without `is_exact` a size of 1 is broadcast.

        Raises:
            CannotRebatchError: the operand is not the same for each sample.
        """
        walks, name = self._walks, node.inputs[index]
        before = walks.shape_in_file(name)
        if walks.on(name, axis) is not None or before is None or not 0 <= axis < len(before):
            return node
        is_broadcast = before[axis] == 1 and not is_exact and name not in walks.drawn
        if before[axis] != growth.before or is_broadcast:
            return node
        if name in walks.dependent:
            raise walks.refused(node, f"'{name}' of {list(before)} does not follow")
        place = replace(growth, axis=axis, is_assumed=False)
        value = walks.here.value(name)
        copied = None if value is None else copied_to_all(value, place)
        if copied is not None:
            fresh = walks.here.add_fresh_constant(f"{name}_{node.name}", copied)
            walks.keep(fresh, place, before)
            return walks.with_input(node, index, fresh)
        made = self._made_again(name, place, before)
        if made is not None:
            walks.keep(made.outputs[0], place, before)
            walks.here.visit(made)
        if made is None or walks.shape(made.outputs[0]) != grown_shape(before, [place]):
            raise walks.refused(
                node, f"'{name}' of {list(before)} holds something else for each of {growth.old} samples"
            )
        return walks.with_input(node, index, made.outputs[0])

    def _made_again(self, name: str, place: AxisChange, before: tuple[int, ...]) -> Node | None:
        """A node that gives a tensor for the new samples, if its samples are copies, or drawn."""
        walks = self._walks
        source = next((other for other in walks.here.nodes if name in other.outputs), None)
        wanted = grown_shape(before, [place])
        if source is not None:
            again = source.with_changes(
                name=walks.names.fresh(f"{source.name}_grown"), outputs=(walks.names.fresh(f"{name}_grown"),)
            )
            if source.op in _RANDOM_OF_SHAPE:
                return again.with_changes(attributes={**source.attributes, "shape": list(wanted)})
            if source.op in POINTWISE and (name in walks.drawn or place.before > 1):
                for index, operand in enumerate(source.inputs):
                    axis = place.axis + len(walks.shape(operand)) - len(before)
                    again = self.fitted(again, index, axis, place, is_exact=name in walks.drawn)
                return again
            behind = self._behind(source, place, before) if place.before > 1 else None
            if behind is not None:
                if source.op == "Reshape":
                    again = walks.with_setting(again, "shape", 1, wanted)
                return self.fitted(again, 0, behind.axis, behind, is_exact=True)
            if source.op == "Gather" and place.before > 1:
                axis = place.axis - int(source.attribute("axis", 0)) % len(walks.shape(source.inputs[0]))
                return self.fitted(again, 1, axis, place, is_exact=True)
            repeats = walks.setting(source, "repeats", 1) if source.op == "Tile" else None
            if repeats and place.inner == walks.shape(source.inputs[0])[place.axis]:
                # All repeats are alike, and stand in front of what they repeat.
                repeats[place.axis] = repeats[place.axis] // place.old * place.new
                return walks.with_setting(again, "repeats", 1, repeats)
        single = self._single(name, source, place, before)
        if not single:
            return None
        target = walks.here.add_fresh_constant(f"{name}_grown_shape", np.asarray(wanted, np.int64))
        called = walks.names.fresh(f"{name}_Expand")
        output = walks.names.fresh(f"{name}_grown")
        return Node("Expand", (single, target), (output,), name=called, origin=called, rule="Expand")

    def _behind(self, source: Node, place: AxisChange, before: tuple[int, ...]) -> AxisChange | None:
        """Where the samples of a result are in the first operand, if the operator treats them alike."""
        walks = self._walks
        operand = walks.shape_in_file(source.inputs[0]) if source.inputs else None
        if operand is None or source.domain:
            return None
        if source.op == "Transpose":
            axes = source.attribute("perm") or range(len(before))[::-1]
            return replace(place, axis=axes[place.axis])
        if source.op in _RESHAPING:
            return next((found for (found,) in reshaped([place], before, operand)), None)
        axis = place.axis + len(operand) - len(before)
        if source.op == "Gather" and place.axis < int(source.attribute("axis", 0)) % len(operand):
            axis = place.axis
        if source.op not in _BY_SAMPLES or not 0 <= axis < len(operand) or operand[axis] != place.before:
            return None
        if source.op == "Slice":
            axes = walks.setting(source, "axes", 3)
            if axes is None or axis in {one % len(operand) for one in axes}:
                return None
        where = Place(source, 0, axis, len(operand), walks.opset, walks.here.value)
        return replace(place, axis=axis) if is_independent(where) else None

    def _single(self, name: str, source: Node | None, place: AxisChange, before: tuple[int, ...]) -> str:
        """What holds one sample of which the tensor is made by expanding; empty where nothing does."""
        if place.before == 1:
            return name
        if source is None or source.op not in ("Expand", "Tile") or place.before != place.old:
            return ""
        shape = (1,) * len(before) + self._walks.shape(source.inputs[0])
        pairs = zip(shape[-len(before) :], before, strict=True)
        is_expanded = all(size in (1, whole) for size, whole in pairs)
        return source.inputs[0] if is_expanded and shape[place.axis - len(before)] == 1 else ""
