"""Replaces sequences of tensors by the tensors in them.

Exporters write torch's `chunk` and `split` as SplitToSequence with SequenceAt. With static shapes
and constant positions these are Split, and the sequence itself is never needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from onnxgc.model.ir import Array, Node, TensorType

TypeOf = Callable[[str], TensorType | None]
ValueOf = Callable[[str], Array | None]
AddConstant = Callable[[str, Array], str]


class Sequences:
    """Knows the tensors in each sequence that was met, and lowers the operators on them."""

    def __init__(self, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant) -> None:
        self._type_of = type_of
        self._value_of = value_of
        self._add_constant = add_constant
        self._members: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def lower(self, node: Node, taken: Container[str]) -> tuple[Node, ...] | None:
        """What stands for a node on sequences; None where it is kept as it is."""
        if node.domain:
            return None
        if node.op == "SequenceConstruct":
            self._members[node.outputs[0]] = node.inputs
            return ()
        if node.op == "SplitToSequence":
            return self._split(node, taken)
        members = self._members.get(node.inputs[0]) if node.inputs else None
        if members is None:
            return None
        if node.op == "SequenceAt":
            position = self._value_of(node.inputs[1])
            if position is None or not -len(members) <= int(position) < len(members):
                return None
            return (_plain(node, "Identity", (members[int(position)],), node.outputs, {}),)
        if node.op == "ConcatFromSequence" and not node.attribute("new_axis", 0):
            return (_plain(node, "Concat", members, node.outputs, {"axis": node.attribute("axis")}),)
        return None

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
        lengths = self._add_constant(f"{output}_lengths", np.asarray(sizes, dtype=np.int64))
        lowered = [_plain(node, "Split", (node.inputs[0], lengths), parts, {"axis": axis})]
        if parts != names:
            axes = self._add_constant(f"{output}_axes", np.asarray([axis], dtype=np.int64))
            lowered += [
                _plain(node, "Squeeze", (part, axes), (name,), {}, f"{node.name}_{index}")
                for index, (part, name) in enumerate(zip(parts, names, strict=True))
            ]
        return tuple(lowered)

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
        return [min(step, length - start) for start in range(0, length, step)]


def _plain(
    node: Node,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    attributes: dict[str, int],
    name: str = "",
) -> Node:
    return node.with_changes(
        op=op, inputs=inputs, outputs=outputs, attributes=attributes, name=name or node.name, rule=op
    )
