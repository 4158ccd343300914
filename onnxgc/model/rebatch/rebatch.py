"""Literal shapes of a file that is read for another batch, or for other sizes of its inputs.

An exporter that is not told of dynamic dimensions writes sizes into the file: Reshape to [2, 512], Expand
to [2, 1, 64]. So the graph is walked twice, for the file's own inputs and for those that are wanted, and
where the two shapes of a tensor differ it has *grown*. A literal follows where the place of what has grown,
in the order of a tensor's elements, leaves one answer.

A place that was told from a literal is assumed: a 4 may be the batch or four heads. That does no harm as
long as every operator behind it treats samples independently, for then each sample's result is that of the
file's own batch, wherever the batch stood. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.model.core.draft import Draft, reads_of
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.rebatch.axis_change import AxisChange, differing, grown_shape
from onnxgc.model.rebatch.literal_rewrites import INDEXING, Literals
from onnxgc.model.rebatch.shape_pair import CURE, PairWalk, ShapePair
from onnxgc.model.rebatch.slice_independence import (
    LOSSES,
    REDUCTIONS,
    SUMS,
    Place,
    is_independent,
    reduced_axes,
)

_DIVIDED = "it sums over samples, and the file may divide by its own batch"


class Rebatching:
    """Goes along with a walk for other input shapes, beside one for the file's own.

    `batch` is the first dimension in the file and as it is wanted, where that differs.
    """

    def __init__(self, file: PairWalk, walk: PairWalk, draft: Draft, batch: tuple[int, int] | None) -> None:
        self._walks = ShapePair(file, walk, draft, batch)
        self._literals = Literals(self._walks)

    def adapted(self, node: Node) -> Node:
        """The node with its literals for the other shapes; what must stand before it has been visited.

        Raises:
            CannotRebatchError: no literal is right, or it is not known which.
        """
        return self._literals.adapted(node)

    def record(self, node: Node, kinds: Mapping[str, TensorType]) -> None:
        """Notes how the node's outputs have grown.

        Raises:
            CannotRebatchError: the node does not treat samples alike where it must.
        """
        walks, names = self._walks, reads_of(node)
        growths = [growth for name in names for growth in walks.of(name)]
        for name in names:
            if name not in node.inputs and any(growth.is_strict for growth in walks.of(name)):
                raise walks.refused(node, f"its body reads '{name}'")
        for index, name in enumerate(node.inputs):
            for growth in walks.of(name):
                self._check(node, index, growth)
        if not walks.dependent.isdisjoint(names):
            walks.dependent.update(filter(None, node.outputs))
        elif node.op in RANDOM or not walks.drawn.isdisjoint(names):
            walks.drawn.update(filter(None, node.outputs))
        for index, output in enumerate(node.outputs):
            if output in kinds and output not in walks.added:
                may_lose = node.op in REDUCTIONS | LOSSES or (node.op == "BatchNormalization" and index > 0)
                walks.growths[output] = self._grown(node, output, kinds[output].shape, growths, may_lose)

    def notes(self) -> tuple[str, ...]:
        """One line on the literals that were rewritten."""
        names = self._walks.rewritten
        if not names:
            return ()
        listed = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
        batch = self._walks.batch
        sizes = (
            f"batch of {batch[0]} and were rewritten for {batch[1]}" if batch else "sizes and were rewritten"
        )
        return (f"{len(names)} literal shapes held the file's {sizes} ({listed})",)

    def made_for(self) -> str:
        return self._walks.made_for()

    def unchanged_outputs(self, outputs: Sequence[str]) -> dict[str, str]:
        """What is wrong with outputs that keep the file's batch, or hold samples on another axis."""
        walks, found = self._walks, {}
        for name in outputs:
            before, after = walks.shape_in_file(name), walks.shape(name)
            if (
                walks.batch is None
                or name not in walks.dependent
                or not before
                or not after
                or set(after) == {1}
            ):
                continue
            is_sure = any(not growth.is_strict for growth in walks.of(name))
            if before[0] == after[0] == walks.batch[0] and not is_sure:
                found[name] = (
                    f"output '{name}' of {list(after)} keeps the file's batch of {before[0]} where "
                    f"{walks.batch[1]} is wanted; {CURE}"
                )
        return found

    def _grown(
        self, node: Node, output: str, after: tuple[int, ...], read: Sequence[AxisChange], may_lose: bool
    ) -> tuple[AxisChange, ...]:
        walks = self._walks
        before = walks.shape_in_file(output)
        if before is None or len(before) != len(after):
            raise walks.refused(node, f"'{output}' has another rank in the file, or is not there")
        placed = walks.placed.get(output)
        if placed is not None:
            if grown_shape(before, placed) != after:
                raise walks.refused(node, f"'{output}' becomes {list(after)} from {list(before)}")
            return placed
        found = tuple(walks.propagate_growth(node, growth, read) for growth in differing(before, after))
        is_strict = any(growth.is_strict for growth in read)
        if is_strict and not may_lose and not any(growth.is_strict for growth in found):
            raise walks.refused(node, f"'{output}' of {list(after)} does not follow")
        pairs = sum(map(walks.is_batch, found)) > 1 and len(found) > len(walks.of(node.inputs[0]))
        # Constants of one sample fit any number of pairs, such as an identity matrix.
        if pairs and walks.batch is not None and (is_strict or walks.batch[0] == 1):
            raise walks.refused(node, f"'{output}' of {list(after)} pairs samples with samples")
        return found

    def _check(self, node: Node, index: int, growth: AxisChange) -> None:
        """Raises where the node may do to what has grown what the file says of its own sizes alone."""
        walks = self._walks
        if node.op in INDEXING and node.outputs[0] in walks.placed:
            return
        name, rank = node.inputs[index], len(walks.shape(node.inputs[index]))
        place = Place(node, index, growth.axis, rank, walks.opset, walks.here.value)
        if growth.is_strict and not is_independent(place):
            told = "which a literal shape alone tells"
            raise walks.refused(node, f"it works along axis {growth.axis} of '{name}', {told}")
        if not walks.is_bound(growth):
            return
        if node.op in LOSSES and node.attribute("reduction", "mean") == "sum":
            raise walks.refused(node, _DIVIDED)
        if node.op in SUMS and growth.axis in reduced_axes(node, rank, walks.here.value):
            raise walks.refused(node, _DIVIDED)
        if index == 0 and self._takes_certain_slices(node, growth.axis, rank):
            raise walks.refused(node, f"it takes certain samples of '{name}'")
        if node.op == "MaxPool" and len(node.outputs) > 1:
            raise walks.refused(node, "its indices count across samples")
        if node.op == "Pad" and any(self._pads(node, growth.axis, rank)):
            raise walks.refused(node, f"it pads '{name}' along the batch")
        if node.op == "BatchNormalization" and growth.is_assumed and growth.old == 1:
            source = next((other for other in walks.here.nodes if name in other.outputs), node)
            if source.op == "Reshape" and walks.shape_in_file(source.inputs[0]) == walks.shape_in_file(name):
                # So is InstanceNormalization written for a known batch: [N, C, ...] as [1, N C, ...].
                raise walks.refused(node, f"Reshape '{source.name}' may make channels of samples for it")

    def _takes_certain_slices(self, node: Node, axis: int, rank: int) -> bool:
        """Whether constant indices choose along the axis; those that count from its end may stay."""
        if node.op == "Gather" and axis == int(node.attribute("axis", 0)) % rank:
            chosen = self._walks.here.value(node.inputs[1])
            return chosen is not None and bool(np.any(chosen >= 0))
        if node.op != "GatherND":
            return False
        first = int(node.attribute("batch_dims", 0))
        return first <= axis < first + self._walks.shape(node.inputs[1])[-1]

    def _pads(self, node: Node, axis: int, rank: int) -> list[int]:
        """What is put in front of an axis and behind it; 1 where that is not known."""
        pads = self._walks.setting(node, "pads", 1) or [1] * (2 * rank)
        axes = [one % rank for one in self._walks.setting(node, "axes", 3) or range(rank)]
        return [pads[axes.index(axis)], pads[axes.index(axis) + len(axes)]] if axis in axes else []
