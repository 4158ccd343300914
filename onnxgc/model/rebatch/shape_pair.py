"""What two walks over a graph know together: one for the file's own input shapes, one for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from onnxgc.model.core.draft import Draft, NameSource, operator_name
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.rebatch.axis_change import AxisChange, differing

CURE = "export the model with dynamic dimensions, or for these input shapes"


class CannotRebatchError(Exception):
    """A node that cannot be shown to mean the same for the other input shapes; the text says why."""


class PairWalk(Protocol):
    """What is asked of a walk that finds static shapes."""

    nodes: list[Node]

    def value(self, name: str) -> Array | None: ...

    def type_of(self, name: str) -> TensorType | None: ...

    def add_fresh_constant(self, wanted: str, value: Array) -> str: ...

    def visit(self, node: Node) -> None: ...


class ShapePair:
    """Tensors in the file (`there`) and for the shapes that are wanted (`here`), and how they have grown.

    `batch` is the first dimension there and here, where it differs. `dependent` are the tensors that are
    computed from inputs that have grown; `placed` says how outputs of the node at hand have grown, where its
    settings tell more than their shapes.
    """

    def __init__(self, there: PairWalk, here: PairWalk, draft: Draft, batch: tuple[int, int] | None) -> None:
        self.there = there
        self.here = here
        self.batch = batch
        self.opset = draft.opset
        self.names = NameSource((*draft.tensor_names(), *(node.name for node in draft.nodes)))
        self.growths: dict[str, tuple[AxisChange, ...]] = {}
        self.placed: dict[str, tuple[AxisChange, ...]] = {}
        # The shapes in the file of tensors that only the walk for other shapes has.
        self.added: dict[str, tuple[int, ...]] = {}
        # Those that random numbers are in, but nothing of the inputs.
        self.drawn: set[str] = set()
        self.dependent = {name for name in draft.inputs if self.of(name)}
        self.rewritten: list[str] = []

    def made_for(self) -> str:
        made_for = f"a batch of {self.batch[0]}" if self.batch else "other input shapes"
        return f"the file was made for {made_for}"

    def refused(self, node: Node, reason: str) -> CannotRebatchError:
        return CannotRebatchError(
            f"node {node.named} ({operator_name(node)}) cannot be read for these input "
            f"shapes: {reason} "
            f"({self.made_for()}); {CURE}"
        )

    def of(self, name: str) -> tuple[AxisChange, ...]:
        """How a tensor has grown; inputs and constants show it by their shapes."""
        if name not in self.growths:
            before, after = self.shape_in_file(name), self.shape(name)
            is_known = before is not None and len(before) == len(after)
            found = differing(before, after) if before is not None and is_known else ()
            self.growths[name] = tuple(self._of_copies(name, growth) for growth in found)
        return self.growths[name]

    def _of_copies(self, name: str, growth: AxisChange) -> AxisChange:
        """The growth of a constant, told more exactly where it holds copies, one for each sample."""
        here, there = self.here.value(name), self.there.value(name)
        if self.batch is None or self.is_batch(growth) or here is None or there is None:
            return growth
        old, new = self.batch
        finer = AxisChange(growth.axis, old, new, inner=growth.old // old)
        if (finer.before, finer.after) != (growth.old, growth.new):
            return growth
        copied = copied_to_all(there, finer)
        return finer if copied is not None and np.array_equal(copied, here) else growth

    def on(self, name: str, axis: int) -> AxisChange | None:
        return next((growth for growth in self.of(name) if growth.axis == axis), None)

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self.here.type_of(name) if name else None
        return () if kind is None else kind.shape

    def shape_in_file(self, name: str) -> tuple[int, ...] | None:
        kind = self.there.type_of(name) if name else None
        return self.added.get(name, None if kind is None else kind.shape)

    def is_batch(self, growth: AxisChange) -> bool:
        return (growth.old, growth.new) == self.batch

    def is_bound(self, growth: AxisChange) -> bool:
        """Whether constants must be looked at that say what becomes of each slice along the axis."""
        return growth.is_strict or self.is_batch(growth)

    def propagate_growth(self, node: Node, changed: AxisChange, read: Sequence[AxisChange]) -> AxisChange:
        """How an axis of a result has grown: as those have that the node reads, where they are alike."""
        alike = [growth for growth in read if (growth.before, growth.after) == (changed.old, changed.new)]
        if not alike and any(growth.is_strict for growth in read):
            raise self.refused(node, f"an axis of {changed.old} becomes one of {changed.new}")
        if len({growth.order for growth in alike}) > 1:
            raise self.refused(node, "it joins samples in different orders")
        is_assumed = any(growth.is_assumed for growth in alike)
        return replace(alike[0], axis=changed.axis, is_assumed=is_assumed) if alike else changed

    def others(self, name: str, growth: AxisChange) -> tuple[AxisChange, ...]:
        """How a tensor's other axes have grown."""
        return tuple(other for other in self.of(name) if other.axis != growth.axis)

    def keep(self, name: str, growth: AxisChange, before: tuple[int, ...]) -> None:
        """Notes a tensor that this walk alone has, and its shape in the file."""
        self.added[name] = before
        self.growths[name] = (growth,)

    # -- settings, as attributes or inputs --------------------------------------------------------

    def setting(self, node: Node, key: str, index: int, walk: PairWalk | None = None) -> list[int] | None:
        """The numbers of an attribute or a constant input; None where there is none, or it is computed."""
        if key in node.attributes:
            return [int(number) for number in node.attributes[key]]
        value = (walk or self.here).value(node.inputs[index]) if self.has(node, index) else None
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def literal(self, node: Node, key: str, index: int) -> list[int] | None:
        """A setting that the file's own walk finds alike, and so is not computed from shapes."""
        here = self.setting(node, key, index)
        return here if here == self.setting(node, key, index, self.there) else None

    def with_setting(self, node: Node, key: str, index: int, numbers: Sequence[int]) -> Node:
        if key in node.attributes:
            self._note(node)
            return node.with_changes(attributes={**node.attributes, key: list(numbers)})
        wanted = f"{node.inputs[index]}_{node.name}"
        name = self.here.add_fresh_constant(wanted, np.asarray(numbers, np.int64))
        return self.with_input(node, index, name)

    def with_input(self, node: Node, index: int, name: str) -> Node:
        """The node with another tensor as input `index`, which is told."""
        self._note(node)
        return node.with_changes(inputs=(*node.inputs[:index], name, *node.inputs[index + 1 :]))

    def _note(self, node: Node) -> None:
        """What was added for a node of the file counts as that node."""
        name = node.origin or node.name
        if name not in self.rewritten:
            self.rewritten.append(name)

    def has(self, node: Node, index: int) -> bool:
        return index < len(node.inputs) and bool(node.inputs[index])


def copied_to_all(value: Array, growth: AxisChange) -> Array | None:
    """A value with a copy for each of the new samples; None where it is not the same for each in the file."""
    axis = growth.axis
    apart = value.reshape(
        *value.shape[:axis], growth.outer, growth.old, growth.inner, *value.shape[axis + 1 :]
    )
    copied = np.take(apart, [0] * growth.new, axis=axis + 1)
    if not np.array_equal(np.take(apart, [0] * growth.old, axis=axis + 1), apart):
        return None
    return copied.reshape(*value.shape[:axis], growth.after, *value.shape[axis + 1 :])
