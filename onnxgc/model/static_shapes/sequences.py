"""Replaces sequences of tensors by their members.

Exporters write torch's `chunk` and `split` as SplitToSequence with SequenceAt, and a list that grows in
a loop as SequenceInsert. With static shapes and constant positions the members of a sequence are known,
so no sequence remains in the graph.
"""

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from onnxgc.errors import ShapeError
from onnxgc.model.core.draft import unused_name
from onnxgc.model.core.ir import Node
from onnxgc.model.rebatch.shape_pair import ShapeWalk
from onnxgc.model.static_shapes.opset_changes import SETTINGS_AS_INPUTS


class Sequences:
    """Tracks the members of each sequence, and lowers the operators on sequences."""

    def __init__(self, walk: ShapeWalk, opset: int) -> None:
        self._walk = walk
        self._opset = opset
        self._members: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def lower(self, node: Node, taken: Container[str]) -> list[Node] | None:
        """The nodes that replace an operator on sequences; None where it cannot be lowered."""
        if node.domain:
            return None
        if node.op in ("SequenceConstruct", "SequenceEmpty"):
            return self._record(node, node.inputs)
        if node.op == "SplitToSequence":
            return self._split(node, taken)
        members = self._members.get(node.inputs[0]) if node.inputs else None
        if members is None:
            return None
        if node.op == "Identity":
            return self._record(node, members)
        if node.op in ("SequenceAt", "SequenceErase", "SequenceInsert"):
            return self._lower_at_position(node, members)
        if node.op == "SequenceLength":
            count = self._walk.add_fresh_constant(f"{node.outputs[0]}_count", np.asarray(len(members), np.int64))
            return [node.as_operator("Identity", (count,))]
        if node.op == "ConcatFromSequence" and members:
            return self._concatenate(node, members, taken)
        return None

    def _record(self, node: Node, members: tuple[str, ...]) -> list[Node]:
        self._members[node.outputs[0]] = members
        return []

    def _lower_at_position(self, node: Node, members: tuple[str, ...]) -> list[Node] | None:
        count = len(members)
        index, default, end = {
            "SequenceAt": (1, 0, count),
            "SequenceErase": (1, count - 1, count),
            "SequenceInsert": (2, count, count + 1),
        }[node.op]
        position = self._position(node, index, default, end)
        if position is None:
            return None
        if node.op == "SequenceAt":
            return [node.as_operator("Identity", (members[position],))]
        before, after = members[:position], members[position:]
        if node.op == "SequenceErase":
            return self._record(node, (*before, *after[1:]))
        return self._record(node, (*before, node.inputs[1], *after))

    def _position(self, node: Node, index: int, default: int, count: int) -> int | None:
        """The value of input `index`, counted from 0; None where it is unknown or out of range."""
        if index >= len(node.inputs) or not node.inputs[index]:
            return default
        value = self._walk.value(node.inputs[index])
        # SequenceInsert with -1 inserts before the last tensor.
        size = count - 1 if node.op == "SequenceInsert" else count
        if value is None or not -size <= int(value) < count:
            return None
        position = int(value)
        return position + size if position < 0 else position

    def _concatenate(self, node: Node, members: tuple[str, ...], taken: Container[str]) -> list[Node]:
        axis = int(node.attribute("axis"))
        if not node.attribute("new_axis", 0):
            return [node.as_operator("Concat", members, axis=axis)]
        kind = self._walk.type_of(members[0])
        if axis < 0 and kind is not None:
            axis += len(kind.shape) + 1
        wide = tuple(unused_name(f"{node.outputs[0]}_{index}", taken) for index in range(len(members)))
        unsqueezed = self._on_each(node, "Unsqueeze", members, wide, axis)
        return [*unsqueezed, node.as_operator("Concat", wide, axis=axis)]

    def _split(self, node: Node, taken: Container[str]) -> list[Node] | None:
        kind = self._walk.type_of(node.inputs[0])
        if kind is None:
            return None
        axis = int(node.attribute("axis", 0)) % max(len(kind.shape), 1)
        sizes = self._sizes(node, kind.shape[axis])
        if sizes is None:
            return None
        names = tuple(f"{node.outputs[0]}_{index}" for index in range(len(sizes)))
        if any(name in taken for name in names):
            return None
        self._members[node.outputs[0]] = names
        if len(node.inputs) > 1 or node.attribute("keepdims", 1):
            return [self._with_setting(node, "Split", names, "split", sizes, axis=axis)]
        parts = tuple(f"{name}_kept" for name in names)
        split = self._with_setting(node, "Split", parts, "split", sizes, axis=axis)
        return [split, *self._on_each(node, "Squeeze", parts, names, axis)]

    def _on_each(self, node: Node, op: str, sources: Sequence[str], outputs: Sequence[str], axis: int) -> list[Node]:
        """Squeeze or Unsqueeze, applied to each tensor."""
        return [
            self._with_setting(
                node.with_changes(inputs=(source,), name=f"{node.name}_{index}"), op, (output,), "axes", [axis]
            )
            for index, (source, output) in enumerate(zip(sources, outputs, strict=True))
        ]

    def _with_setting(
        self, node: Node, op: str, outputs: tuple[str, ...], setting: str, values: list[int], **attributes: Any
    ) -> Node:
        """An operator on the node's first input; its setting is an input or an attribute, by the opset."""
        source = node.inputs[0]
        if self._opset < SETTINGS_AS_INPUTS:
            return node.as_operator(op, (source,), outputs, **(attributes | {setting: values}))
        constant = self._walk.add_fresh_constant(f"{outputs[0]}_{setting}", np.asarray(values, np.int64))
        return node.as_operator(op, (source, constant), outputs, **attributes)

    def _sizes(self, node: Node, length: int) -> list[int] | None:
        """Lengths of the parts; a scalar gives the length of all parts but the last."""
        if len(node.inputs) < 2 or not node.inputs[1]:
            return [1] * length
        split = self._walk.value(node.inputs[1])
        if split is None:
            return None
        if split.ndim:
            return [int(size) for size in split]
        step = int(split)
        if step < 1:
            raise ShapeError(
                f"{node.location} splits into parts of {step} elements; "
                "export the model with parts of one element or more"
            )
        return [min(step, length - start) for start in range(0, length, step)]
