"""Replaces sequences of tensors by their members.

Exporters write torch's `chunk` and `split` as SplitToSequence with SequenceAt, and a list that grows in
a loop as SequenceInsert. With static shapes and constant positions the members of a sequence are known,
so no sequence remains in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from onnxgc.errors import ShapeError
from onnxgc.model.core.draft import unused_name
from onnxgc.model.core.ir import Array, Node
from onnxgc.model.core.node_rewrites import TypeOf, ValueOf
from onnxgc.model.static_shapes.opset_changes import SETTINGS_AS_INPUTS

AddConstant = Callable[[str, Array], str]


class Sequences:
    """Tracks the members of each sequence, and lowers the operators on sequences."""

    def __init__(self, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant, opset: int) -> None:
        self._type_of = type_of
        self._value_of = value_of
        self._add_constant = add_constant
        self._opset = opset
        self._members: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def lower(self, node: Node, taken: Container[str]) -> tuple[Node, ...] | None:
        """The nodes that replace an operator on sequences; None where it cannot be lowered."""
        if node.domain:
            return None
        if node.op == "SequenceConstruct":
            return self._record(node, node.inputs)
        if node.op == "SequenceEmpty":
            return self._record(node, ())
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
            count = self._add_constant(f"{node.outputs[0]}_count", np.asarray(len(members), np.int64))
            return (_plain(node, "Identity", (count,), node.outputs),)
        if node.op == "ConcatFromSequence" and members:
            return self._concatenate(node, members, taken)
        return None

    def _record(self, node: Node, members: tuple[str, ...]) -> tuple[Node, ...]:
        self._members[node.outputs[0]] = members
        return ()

    def _lower_at_position(self, node: Node, members: tuple[str, ...]) -> tuple[Node, ...] | None:
        count = len(members)
        if node.op == "SequenceAt":
            position = self._position(node, 1, 0, count)
            if position is None:
                return None
            return (_plain(node, "Identity", (members[position],), node.outputs),)
        if node.op == "SequenceErase":
            position = self._position(node, 1, count - 1, count)
            if position is None:
                return None
            return self._record(node, (*members[:position], *members[position + 1 :]))
        position = self._position(node, 2, count, count + 1)
        if position is None:
            return None
        return self._record(node, (*members[:position], node.inputs[1], *members[position:]))

    def _position(self, node: Node, index: int, default: int, count: int) -> int | None:
        """The value of input `index`, counted from 0; None where it is unknown or out of range."""
        if index >= len(node.inputs) or not node.inputs[index]:
            return default
        value = self._value_of(node.inputs[index])
        # SequenceInsert with -1 inserts before the last tensor.
        size = count - 1 if node.op == "SequenceInsert" else count
        if value is None or not -size <= int(value) < count:
            return None
        position = int(value)
        return position + size if position < 0 else position

    def _concatenate(self, node: Node, members: tuple[str, ...], taken: Container[str]) -> tuple[Node, ...]:
        axis = int(node.attribute("axis"))
        if not node.attribute("new_axis", 0):
            return (_plain(node, "Concat", members, node.outputs, {"axis": axis}),)
        kind = self._type_of(members[0])
        if axis < 0 and kind is not None:
            axis += len(kind.shape) + 1
        output = node.outputs[0]
        wide = tuple(unused_name(f"{output}_{index}", taken) for index in range(len(members)))
        unsqueezed = (
            self._with_setting(
                node, "Unsqueeze", member, (name,), "axes", [axis], name=f"{node.name}_{index}"
            )
            for index, (member, name) in enumerate(zip(members, wide, strict=True))
        )
        return (*unsqueezed, _plain(node, "Concat", wide, node.outputs, {"axis": axis}))

    def _split(self, node: Node, taken: Container[str]) -> tuple[Node, ...] | None:
        kind = self._type_of(node.inputs[0])
        if kind is None:
            return None
        axis = int(node.attribute("axis", 0)) % max(len(kind.shape), 1)
        sizes = self._sizes(node, kind.shape[axis])
        output = node.outputs[0]
        names = tuple(f"{output}_{index}" for index in range(len(sizes or ())))
        if sizes is None or any(name in taken for name in names):
            return None
        self._members[output] = names
        parts = names
        if len(node.inputs) < 2 and not node.attribute("keepdims", 1):
            parts = tuple(f"{name}_kept" for name in names)
        lowered = [self._with_setting(node, "Split", node.inputs[0], parts, "split", sizes, {"axis": axis})]
        if parts != names:
            lowered += [
                self._with_setting(
                    node, "Squeeze", part, (name,), "axes", [axis], name=f"{node.name}_{index}"
                )
                for index, (part, name) in enumerate(zip(parts, names, strict=True))
            ]
        return tuple(lowered)

    def _with_setting(
        self,
        node: Node,
        op: str,
        source: str,
        outputs: tuple[str, ...],
        setting: str,
        values: list[int],
        attributes: dict[str, Any] | None = None,
        name: str = "",
    ) -> Node:
        """An operator whose setting is an input or an attribute, depending on the opset."""
        given = dict(attributes or {})
        if self._opset < SETTINGS_AS_INPUTS:
            return _plain(node, op, (source,), outputs, {**given, setting: values}, name)
        constant = self._add_constant(f"{outputs[0]}_{setting}", np.asarray(values, dtype=np.int64))
        return _plain(node, op, (source, constant), outputs, given, name)

    def _sizes(self, node: Node, length: int) -> list[int] | None:
        """Lengths of the parts; a scalar gives the length of all parts but the last."""
        if len(node.inputs) < 2 or not node.inputs[1]:
            return [1] * length
        split = self._value_of(node.inputs[1])
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


def _plain(
    node: Node,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    attributes: dict[str, Any] | None = None,
    name: str = "",
) -> Node:
    return node.with_changes(
        op=op,
        inputs=inputs,
        outputs=outputs,
        attributes=attributes or {},
        name=name or node.name,
        rule=op,
    )
