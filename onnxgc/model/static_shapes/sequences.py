"""Replaces sequences of tensors by the tensors in them.

Exporters write torch's `chunk` and `split` as SplitToSequence with SequenceAt, and a list that grows in
a loop as SequenceInsert. With static shapes and constant positions the tensors of a sequence are known,
and the sequence itself is never needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from onnxgc.errors import ShapeError
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.node_rewrites import unused

TypeOf = Callable[[str], TensorType | None]
ValueOf = Callable[[str], Array | None]
AddConstant = Callable[[str, Array], str]
# From here on Split, Squeeze and Unsqueeze take their settings as inputs.
_SETTINGS_ARE_INPUTS = 13


class Sequences:
    """Knows the tensors in each sequence that was met, and lowers the operators on them."""

    def __init__(self, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant, opset: int) -> None:
        self._type_of = type_of
        self._value_of = value_of
        self._add_constant = add_constant
        self._opset = opset
        self._members: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def lower(self, node: Node, taken: Container[str]) -> tuple[Node, ...] | None:
        """What stands for a node on sequences; None where it is kept as it is."""
        if node.domain:
            return None
        if node.op == "SequenceConstruct":
            return self._becomes(node, node.inputs)
        if node.op == "SequenceEmpty":
            return self._becomes(node, ())
        if node.op == "SplitToSequence":
            return self._split(node, taken)
        members = self._members.get(node.inputs[0]) if node.inputs else None
        if members is None:
            return None
        if node.op == "Identity":
            return self._becomes(node, members)
        if node.op == "SequenceInsert":
            place = self._position(node, 2, len(members), len(members) + 1)
            return place and self._becomes(node, (*members[: place[0]], node.inputs[1], *members[place[0] :]))
        if node.op == "SequenceErase":
            place = self._position(node, 1, len(members) - 1, len(members))
            return place and self._becomes(node, (*members[: place[0]], *members[place[0] + 1 :]))
        if node.op == "SequenceLength":
            count = self._add_constant(f"{node.outputs[0]}_count", np.asarray(len(members), np.int64))
            return (_plain(node, "Identity", (count,), node.outputs),)
        if node.op == "SequenceAt":
            place = self._position(node, 1, 0, len(members))
            return place and (_plain(node, "Identity", (members[place[0]],), node.outputs),)
        if node.op == "ConcatFromSequence" and members:
            return self._joined(node, members, taken)
        return None

    def _becomes(self, node: Node, members: tuple[str, ...]) -> tuple[Node, ...]:
        self._members[node.outputs[0]] = members
        return ()

    def _position(self, node: Node, index: int, default: int, count: int) -> tuple[int] | None:
        """The place that input `index` names, from 0; None where it is not known or out of range."""
        if index >= len(node.inputs) or not node.inputs[index]:
            return (default,)
        value = self._value_of(node.inputs[index])
        # To insert, the end counts as -0 would: -1 is the place before the last tensor.
        size = count - 1 if node.op == "SequenceInsert" else count
        if value is None or not -size <= int(value) < count:
            return None
        position = int(value)
        return (position + size if position < 0 else position,)

    def _joined(self, node: Node, members: tuple[str, ...], taken: Container[str]) -> tuple[Node, ...]:
        axis = int(node.attribute("axis"))
        if not node.attribute("new_axis", 0):
            return (_plain(node, "Concat", members, node.outputs, {"axis": axis}),)
        kind = self._type_of(members[0])
        if axis < 0 and kind is not None:
            axis += len(kind.shape) + 1
        output = node.outputs[0]
        wide = tuple(unused(f"{output}_{index}", taken) for index in range(len(members)))
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
        """An operator whose setting is an input or an attribute, as the opset wants it."""
        given = dict(attributes or {})
        if self._opset < _SETTINGS_ARE_INPUTS:
            return _plain(node, op, (source,), outputs, {**given, setting: values}, name)
        constant = self._add_constant(f"{outputs[0]}_{setting}", np.asarray(values, dtype=np.int64))
        return _plain(node, op, (source, constant), outputs, given, name)

    def _sizes(self, node: Node, length: int) -> list[int] | None:
        """Lengths of the parts; a single number is the length of each but the last."""
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
                f"{node.place} splits into parts of {step} elements; "
                "export the model with parts of one or more"
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
