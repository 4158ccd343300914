"""Reading of a file for a batch, or for input sizes, other than those of its literal shapes.

Without dynamic dimensions an exporter writes sizes as literals: Reshape to [2, 512], Expand to [2, 1, 64].
Two walks infer shapes for the file's own inputs and for the new ones; an axis whose size differs has
*changed*. A literal is rewritten where the positions of changed axes, in the order of a tensor's elements,
determine its new value.

A position inferred from a literal is assumed: a 4 may be the batch or four heads. The assumption is safe if
every later operator treats samples independently: each sample's result then equals the result in the file's
own batch, at any position. All other graphs are refused.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.model.core.draft import Draft, reads_of
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.operators.reductions import LOSSES, REDUCTIONS, SUMS, reduced_axes
from onnxgc.model.rebatch.axis_change import AxisChange, changed_shape, differing
from onnxgc.model.rebatch.literal_rewrites import INDEXING, LiteralRewriter
from onnxgc.model.rebatch.shape_pair import REMEDY, ShapePair, ShapeWalk

_DIVIDED = "it sums over samples, and the file may divide by its own batch"


class Rebatcher:
    """Rewrites literals during a walk for new input shapes, given the walk for the file's own.

    `batch` is the first dimension in the file and the new one, where they differ.
    """

    def __init__(self, file: ShapeWalk, walk: ShapeWalk, draft: Draft, batch: tuple[int, int] | None) -> None:
        self._walks = ShapePair(file, walk, draft, batch)
        self.adapted = LiteralRewriter(self._walks).adapted
        self.made_for = self._walks.made_for

    def record(self, node: Node, kinds: Mapping[str, TensorType]) -> None:
        """Records the changes of the node's outputs.

        Raises:
            CannotRebatchError: the node treats samples differently, or mixes them.
        """
        walks, names = self._walks, reads_of(node)
        input_changes = [change for name in names for change in walks.changes_of(name)]
        for name in names:
            if name not in node.inputs and any(change.is_strict for change in walks.changes_of(name)):
                raise walks.refusal(node, f"its body reads '{name}'")
        for index, name in enumerate(node.inputs):
            for change in walks.changes_of(name):
                self._check(node, index, change)
        if not walks.dependent.isdisjoint(names):
            walks.dependent.update(filter(None, node.outputs))
        elif node.op in RANDOM or not walks.random.isdisjoint(names):
            walks.random.update(filter(None, node.outputs))
        for index, output in enumerate(node.outputs):
            if output in kinds and output not in walks.added:
                may_lose = node.op in REDUCTIONS | LOSSES or (node.op == "BatchNormalization" and index > 0)
                walks.changes[output] = self._output_changes(node, output, kinds[output].shape, input_changes, may_lose)

    def notes(self) -> tuple[str, ...]:
        names = self._walks.rewritten
        if not names:
            return ()
        listed = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
        batch = self._walks.batch
        sizes = f"batch of {batch[0]} and were rewritten for {batch[1]}" if batch else "sizes and were rewritten"
        return (f"{len(names)} literal shapes contained the file's {sizes} ({listed})",)

    def outputs_with_file_batch(self, outputs: Sequence[str]) -> dict[str, str]:
        """The outputs that keep the file's batch, each with an error message."""
        walks, messages = self._walks, {}
        old, new = walks.batch or (0, 0)
        for name in (output for output in outputs if walks.batch and output in walks.dependent):
            before, after = walks.shape_in_file(name) or (), walks.shape(name)
            is_sure = set(after) == {1} or not all(change.is_strict for change in walks.changes_of(name))
            if before[:1] == after[:1] == (old,) and not is_sure:
                messages[name] = (
                    f"output '{name}' of {list(after)} keeps the file's batch of {old} where {new} is wanted; {REMEDY}"
                )
        return messages

    def _output_changes(
        self, node: Node, output: str, after: tuple[int, ...], input_changes: Sequence[AxisChange], may_lose: bool
    ) -> tuple[AxisChange, ...]:
        walks = self._walks
        before = walks.shape_in_file(output)
        if before is None or len(before) != len(after):
            raise walks.refusal(node, f"'{output}' has another rank in the file, or is missing there")
        placed = walks.placed.get(output)
        if placed is not None:
            if changed_shape(before, placed) != after:
                raise walks.refusal(node, f"'{output}' changes from {list(before)} to {list(after)}")
            return placed
        changes = tuple(walks.propagated_change(node, change, input_changes) for change in differing(before, after))
        is_strict = any(change.is_strict for change in input_changes)
        if is_strict and not may_lose and not any(change.is_strict for change in changes):
            raise walks.refusal(node, f"'{output}' of {list(after)} does not change with the inputs")
        pairs = sum(map(walks.is_batch, changes)) > 1 and len(changes) > len(walks.changes_of(node.inputs[0]))
        # A constant for one sample, such as an identity matrix, broadcasts to any number of pairs.
        if pairs and walks.batch is not None and (is_strict or walks.batch[0] == 1):
            raise walks.refusal(node, f"'{output}' of {list(after)} pairs samples with samples")
        return changes

    def _check(self, node: Node, index: int, change: AxisChange) -> None:
        """Raises where the node may mix samples, or treat them by the file's own sizes."""
        walks = self._walks
        if node.op in INDEXING and node.outputs[0] in walks.placed:
            return
        name, rank = node.inputs[index], len(walks.shape(node.inputs[index]))
        if change.is_strict and not walks.is_independent(node, index, change.axis):
            raise walks.refusal(
                node,
                f"it works along axis {change.axis} of '{name}', whose position is inferred from a literal shape only",
            )
        if not walks.must_check_constants(change):
            return
        if node.op in LOSSES and node.attribute("reduction", "mean") == "sum":
            raise walks.refusal(node, _DIVIDED)
        if node.op in SUMS and change.axis in reduced_axes(node, rank, walks.new.value):
            raise walks.refusal(node, _DIVIDED)
        if index == 0 and self._selects_slices(node, change.axis, rank):
            raise walks.refusal(node, f"it selects particular samples of '{name}'")
        if node.op == "MaxPool" and len(node.outputs) > 1:
            raise walks.refusal(node, "its indices count across samples")
        if node.op == "Pad" and any(self._pads_along(node, change.axis, rank)):
            raise walks.refusal(node, f"it pads '{name}' along the batch")
        if node.op == "BatchNormalization" and change.is_assumed and change.old == 1:
            source = next((other for other in walks.new.nodes if name in other.outputs), node)
            if source.op == "Reshape" and walks.shape_in_file(source.inputs[0]) == walks.shape_in_file(name):
                # Exporters write InstanceNormalization for a literal batch like this: [1, N C, ...].
                raise walks.refusal(node, f"Reshape '{source.name}' may fold samples into its channels")

    def _selects_slices(self, node: Node, axis: int, rank: int) -> bool:
        """Whether constant indices select along the axis; those that count from its end may stay."""
        if node.op == "Gather" and axis == int(node.attribute("axis", 0)) % rank:
            chosen = self._walks.new.value(node.inputs[1])
            return chosen is not None and bool(np.any(chosen >= 0))
        if node.op != "GatherND":
            return False
        first = int(node.attribute("batch_dims", 0))
        return first <= axis < first + self._walks.shape(node.inputs[1])[-1]

    def _pads_along(self, node: Node, axis: int, rank: int) -> list[int]:
        """The padding before and after an axis; 1 where unknown."""
        pads = self._walks.setting(node, "pads", 1) or [1] * (2 * rank)
        axes = [one % rank for one in self._walks.setting(node, "axes", 3) or range(rank)]
        return [pads[axes.index(axis)], pads[axes.index(axis) + len(axes)]] if axis in axes else []
