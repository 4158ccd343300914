"""Operands that are equal for each sample in the file, recreated for another number of samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import has_input
from onnxgc.model.operators.registry import POINTWISE
from onnxgc.model.rebatch.axis_change import AxisChange, changed_shape, reshaped
from onnxgc.model.rebatch.shape_pair import RESHAPING, ShapePair, copied_per_sample

_RANDOM_OF_SHAPE = ("RandomNormal", "RandomUniform")
# Operators allowed between a table that is copied for each sample and the use of the copies.
_BY_SAMPLES = ("Conv", "Gather", "Gemm", "LayerNormalization", "MatMul", "Slice", "Softmax")


class OperandFitter:
    """Fits operands to changed ones: zeros of an initial state, a class token, a mask."""

    def __init__(self, walks: ShapePair) -> None:
        self._walks = walks

    def fit_broadcast(self, node: Node, indices: Sequence[int], nearest: int = 1) -> Node:
        """The node with operands that broadcast to each other, from the `nearest` axis to the last on.

        Axes count from the last, which is 1.
        """
        ranks = {i: len(self._walks.shape(node.inputs[i])) for i in indices if has_input(node, i)}
        changes = [(rank - g.axis, g) for i, rank in ranks.items() for g in self._walks.changes_of(node.inputs[i])]
        for distance, change in changes:
            for index, rank in ranks.items():
                if nearest <= distance <= rank:
                    node = self.fit(node, index, rank - distance, change)
        return node

    def fit(self, node: Node, index: int, axis: int, change: AxisChange, *, is_exact: bool = False) -> Node:
        """The node with operand `index` changed along `axis`; without `is_exact` a size of 1 is broadcast.

        Raises:
            CannotRebatchError: the operand differs between samples.
        """
        walks, name = self._walks, node.inputs[index]
        before = walks.shape_in_file(name)
        if walks.change_along(name, axis) is not None or before is None or not 0 <= axis < len(before):
            return node
        is_broadcast = before[axis] == 1 and not is_exact and name not in walks.random
        if before[axis] != change.before or is_broadcast:
            return node
        if name in walks.dependent:
            raise walks.refusal(node, f"'{name}' of {list(before)} does not change with the inputs")
        own_change = replace(change, axis=axis, is_assumed=False)
        value = walks.new.value(name)
        copied = None if value is None else copied_per_sample(value, own_change)
        if copied is not None:
            fresh = walks.new.add_fresh_constant(f"{name}_{node.name}", copied)
            walks.record_added(fresh, own_change, before)
            return walks.with_input(node, index, fresh)
        again = self._recreated(name, own_change, before)
        if again is not None:
            walks.record_added(again.outputs[0], own_change, before)
            walks.new.visit(again)
        if again is None or walks.shape(again.outputs[0]) != changed_shape(before, [own_change]):
            raise walks.refusal(
                node,
                f"'{name}' of {list(before)} depends on the batch dimension, "
                f"and the file contains its value for {change.old} samples only",
            )
        return walks.with_input(node, index, again.outputs[0])

    def _recreated(self, name: str, change: AxisChange, before: tuple[int, ...]) -> Node | None:
        """A node that computes a tensor for the new samples, if its samples are copies or random."""
        walks = self._walks
        source = next((other for other in walks.new.nodes if name in other.outputs), None)
        wanted = changed_shape(before, [change])
        if source is not None:
            again = source.with_changes(
                name=walks.names.fresh(f"{source.name}_grown"), outputs=(walks.names.fresh(f"{name}_grown"),)
            )
            if source.op in _RANDOM_OF_SHAPE:
                return again.with_changes(attributes={**source.attributes, "shape": list(wanted)})
            if source.op in POINTWISE and (name in walks.random or change.before > 1):
                for index, read in enumerate(source.inputs):
                    axis = change.axis + len(walks.shape(read)) - len(before)
                    again = self.fit(again, index, axis, change, is_exact=name in walks.random)
                return again
            operand = self._operand_change(source, change, before) if change.before > 1 else None
            if operand is not None:
                if source.op == "Reshape":
                    again = walks.with_setting(again, "shape", 1, wanted)
                return self.fit(again, 0, operand.axis, operand, is_exact=True)
            if source.op == "Gather" and change.before > 1:
                axis = change.axis - int(source.attribute("axis", 0)) % len(walks.shape(source.inputs[0]))
                return self.fit(again, 1, axis, change, is_exact=True)
            repeats = walks.setting(source, "repeats", 1) if source.op == "Tile" else None
            if repeats and change.inner == walks.shape(source.inputs[0])[change.axis]:
                # Equal repeats, outermost in the axis.
                repeats[change.axis] = repeats[change.axis] // change.old * change.new
                return walks.with_setting(again, "repeats", 1, repeats)
        single = self._single_sample(name, source, change, before)
        if not single:
            return None
        target = walks.new.add_fresh_constant(f"{name}_grown_shape", np.asarray(wanted, np.int64))
        called = walks.names.fresh(f"{name}_Expand")
        output = walks.names.fresh(f"{name}_grown")
        return Node("Expand", (single, target), (output,), name=called, origin=called, rule="Expand")

    def _operand_change(self, source: Node, change: AxisChange, before: tuple[int, ...]) -> AxisChange | None:
        """The operand change that determines the result's change, if samples are independent."""
        walks = self._walks
        operand = walks.shape_in_file(source.inputs[0]) if source.inputs else None
        if operand is None or source.domain:
            return None
        if source.op == "Transpose":
            axes = source.attribute("perm") or range(len(before))[::-1]
            return replace(change, axis=axes[change.axis])
        if source.op in RESHAPING:
            return next((position for (position,) in reshaped([change], before, operand)), None)
        axis = change.axis + len(operand) - len(before)
        if source.op == "Gather" and change.axis < int(source.attribute("axis", 0)) % len(operand):
            axis = change.axis
        if source.op not in _BY_SAMPLES or not 0 <= axis < len(operand) or operand[axis] != change.before:
            return None
        if source.op == "Slice":
            axes = walks.setting(source, "axes", 3)
            if axes is None or axis in {one % len(operand) for one in axes}:
                return None
        return replace(change, axis=axis) if walks.is_independent(source, 0, axis) else None

    def _single_sample(self, name: str, source: Node | None, change: AxisChange, before: tuple[int, ...]) -> str:
        """The tensor with one sample that an expansion copies; empty where there is none."""
        if change.before == 1:
            return name
        if source is None or source.op not in ("Expand", "Tile") or change.before != change.old:
            return ""
        shape = (1,) * len(before) + self._walks.shape(source.inputs[0])
        pairs = zip(shape[-len(before) :], before, strict=True)
        is_expanded = all(size in (1, whole) for size, whole in pairs)
        return source.inputs[0] if is_expanded and shape[change.axis - len(before)] == 1 else ""
