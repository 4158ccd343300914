"""Two shape walks over one graph: for the file's own input shapes, and for new ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import onnx

from onnxgc.model.core.draft import Draft, NameSource, operator_name
from onnxgc.model.core.ir import Array, Node, TensorType, Weight
from onnxgc.model.operators.facts import Place, has_input
from onnxgc.model.operators.registry import is_independent
from onnxgc.model.rebatch.axis_change import AxisChange, differing

REMEDY = "export the model with dynamic dimensions, or for these input shapes"
RESHAPING = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


class CannotRebatchError(Exception):
    """The new input shapes may change the meaning of a node; the text states the reason."""


class ShapeWalk(Protocol):
    """The interface of a walk that infers static shapes, node by node in topological order."""

    nodes: list[Node]
    weights: dict[str, Weight]
    types: dict[str, TensorType]
    protos: dict[str, onnx.TypeProto]
    problems: dict[str, str]

    def value(self, name: str) -> Array | None: ...

    def type_of(self, name: str) -> TensorType | None: ...

    def output_shape(self, node: Node) -> tuple[int, ...] | None: ...

    def add_fresh_constant(self, wanted: str, value: Array) -> str: ...

    def visit(self, node: Node) -> None: ...


class ShapePair:
    """The walks for the file's shapes (`in_file`) and the `new` ones, and the changes of each tensor.

    `batch` is the first dimension in both, where it differs. `dependent` are the tensors computed from
    changed inputs, `random` those computed from random numbers but no input. `placed`: output changes known
    from the node's settings rather than from shapes. `added`: file shapes of tensors created only in the new
    walk.
    """

    def __init__(self, in_file: ShapeWalk, new: ShapeWalk, draft: Draft, batch: tuple[int, int] | None) -> None:
        self.in_file = in_file
        self.new = new
        self.batch = batch
        self.opset = draft.opset
        self.names = NameSource((*draft.tensor_names(), *(node.name for node in draft.nodes)))
        self.changes: dict[str, tuple[AxisChange, ...]] = {}
        self.placed: dict[str, tuple[AxisChange, ...]] = {}
        self.added: dict[str, tuple[int, ...]] = {}
        self.random: set[str] = set()
        self.dependent = {name for name in draft.inputs if self.changes_of(name)}
        self.rewritten: list[str] = []
        sizes = f"a batch of {batch[0]}" if batch else "other input shapes"
        self.made_for = f"the file was made for {sizes}"

    def refusal(self, node: Node, reason: str) -> CannotRebatchError:
        return CannotRebatchError(
            f"node {node.label} ({operator_name(node)}) cannot be read for these input "
            f"shapes: {reason} ({self.made_for}); {REMEDY}"
        )

    def changes_of(self, name: str) -> tuple[AxisChange, ...]:
        """The changes of a tensor's axes; those of inputs and constants follow from their shapes."""
        if name not in self.changes:
            before, after = self.shape_in_file(name), self.shape(name)
            is_known = before is not None and len(before) == len(after)
            changes = differing(before, after) if before is not None and is_known else ()
            self.changes[name] = tuple(self._with_factors(name, change) for change in changes)
        return self.changes[name]

    def _with_factors(self, name: str, change: AxisChange) -> AxisChange:
        """The change of a constant, with factors if it contains one copy for each sample."""
        new, in_file = self.new.value(name), self.in_file.value(name)
        if self.batch is None or self.is_batch(change) or new is None or in_file is None:
            return change
        old_batch, new_batch = self.batch
        finer = AxisChange(change.axis, old_batch, new_batch, inner=change.old // old_batch)
        if (finer.before, finer.after) != (change.old, change.new):
            return change
        copied = copied_per_sample(in_file, finer)
        return finer if copied is not None and np.array_equal(copied, new) else change

    def change_along(self, name: str, axis: int) -> AxisChange | None:
        return next((change for change in self.changes_of(name) if change.axis == axis), None)

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self.new.type_of(name) if name else None
        return () if kind is None else kind.shape

    def shape_in_file(self, name: str) -> tuple[int, ...] | None:
        kind = self.in_file.type_of(name) if name else None
        return self.added.get(name, None if kind is None else kind.shape)

    def own_axis(self, node: Node, default: int) -> int:
        return int(node.attribute("axis", default)) % max(len(self.shape(node.inputs[0])), 1)

    def is_independent(self, node: Node, index: int, axis: int) -> bool:
        """Whether the node computes slices along an axis of input `index` independently."""
        rank = len(self.shape(node.inputs[index]))
        return is_independent(Place(node, index, axis, rank, self.opset, self.new.value))

    def is_batch(self, change: AxisChange) -> bool:
        return (change.old, change.new) == self.batch

    def must_check_constants(self, change: AxisChange) -> bool:
        """Whether constants that act on individual slices along the axis must be checked."""
        return change.is_strict or self.is_batch(change)

    def propagated_change(self, node: Node, changed: AxisChange, read: Sequence[AxisChange]) -> AxisChange:
        """The change of a result's axis, derived from input changes of the same sizes."""
        equal = [change for change in read if (change.before, change.after) == (changed.old, changed.new)]
        if not equal and any(change.is_strict for change in read):
            raise self.refusal(node, f"an axis of {changed.old} changes to {changed.new}")
        if len({change.layout for change in equal}) > 1:
            raise self.refusal(node, "it joins samples in different orders")
        is_assumed = any(change.is_assumed for change in equal)
        return replace(equal[0], axis=changed.axis, is_assumed=is_assumed) if equal else changed

    def other_changes(self, name: str, change: AxisChange) -> tuple[AxisChange, ...]:
        return tuple(other for other in self.changes_of(name) if other.axis != change.axis)

    def record_added(self, name: str, change: AxisChange, before: tuple[int, ...]) -> None:
        """Records a tensor that only the new walk has, with its shape in the file."""
        self.added[name] = before
        self.changes[name] = (change,)

    # -- settings, as attributes or inputs --

    def setting(self, node: Node, key: str, index: int, walk: ShapeWalk | None = None) -> list[int] | None:
        """The numbers of an attribute or a constant input; None where absent or computed."""
        if key in node.attributes:
            return [int(number) for number in node.attributes[key]]
        value = (walk or self.new).value(node.inputs[index]) if has_input(node, index) else None
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def literal(self, node: Node, key: str, index: int) -> list[int] | None:
        """A setting with equal values in both walks, hence not computed from shapes."""
        new = self.setting(node, key, index)
        return new if new == self.setting(node, key, index, self.in_file) else None

    def with_setting(self, node: Node, key: str, index: int, numbers: Sequence[int]) -> Node:
        if key in node.attributes:
            self._note(node)
            return node.with_changes(attributes={**node.attributes, key: list(numbers)})
        wanted = f"{node.inputs[index]}_{node.name}"
        name = self.new.add_fresh_constant(wanted, np.asarray(numbers, np.int64))
        return self.with_input(node, index, name)

    def with_input(self, node: Node, index: int, name: str) -> Node:
        """The node with input `index` replaced; the rewrite is recorded for the notes."""
        self._note(node)
        return node.with_changes(inputs=(*node.inputs[:index], name, *node.inputs[index + 1 :]))

    def _note(self, node: Node) -> None:
        # An added node counts as the node of the file for which it was added.
        name = node.origin or node.name
        if name not in self.rewritten:
            self.rewritten.append(name)


def copied_per_sample(value: Array, change: AxisChange) -> Array | None:
    """A value with one copy for each new sample; None where samples differ in the file."""
    axis = change.axis
    apart = value.reshape(*value.shape[:axis], change.outer, change.old, change.inner, *value.shape[axis + 1 :])
    copied = np.take(apart, [0] * change.new, axis=axis + 1)
    if not np.array_equal(np.take(apart, [0] * change.old, axis=axis + 1), apart):
        return None
    return copied.reshape(*value.shape[:axis], change.after, *value.shape[axis + 1 :])
