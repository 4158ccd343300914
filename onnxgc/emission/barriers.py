"""Barriers: data dependencies that cost nothing and that hold backward in the schedule's order.

A group of nodes (one backward chunk, or one segment's recomputation) may not start before the
group in front of it has finished, whatever order the runtime prefers. So a node of the group
that could run earlier reads one of its inputs through a Reshape to that input's own shape, plus
a zero that is the length of an empty slice of the last tensor of the group in front:

    empty  = Slice(token, zero, zero)      # zero is an input, so that nothing can be folded
    length = Shape(empty)                  # [0]
    target = Add(shape of x, length)
    held   = Reshape(x, target)            # a view: no copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.tracing.runtime_costs import VIEW_OPERATORS

ZERO = "barrier_zero"


@dataclass(slots=True)
class _Group:
    """A group while it is written.

    `held` are the tensors that cannot come early, `views` the barriers by the tensor that they show,
    `length` the zero that waits for the token. `opening` computes it: in front of all else, since
    later it would keep the token alive. What is `always_held` is so whatever its size, and weights too.
    """

    token: str
    made: frozenset[str]
    always_held: frozenset[str] = frozenset()
    held: set[str] = field(init=False)
    views: dict[str, str] = field(default_factory=dict)
    opening: list[Node] = field(default_factory=list)
    written: list[Node] = field(default_factory=list)
    length: str | None = None

    def __post_init__(self) -> None:
        self.held = {self.token}


@dataclass(slots=True)
class BarrierWriter:
    """Writes groups of nodes, each held back until the one before it is done.

    `types` are those of the tensors that it adds, `vectors` those of them that are shapes or settings.
    """

    type_of: Callable[[str], TensorType]
    constant: Callable[[Array], str]
    is_fixed: Callable[[str], bool]
    zero: str
    small_bytes: int
    name: Callable[[str], str]
    token: str
    types: dict[str, TensorType] = field(default_factory=dict)
    vectors: set[str] = field(default_factory=set)
    _index: int = 0

    def opaque_view(self, tensor: str) -> tuple[Node, Node, str]:
        """A view of an input whose static shape the runtime cannot see.

        So no buffer is kept waiting for a later tensor of the same shape.
        """
        shape = self.type_of(tensor).shape
        target, view = self.name(f"{tensor}/shape"), self.name(f"{tensor}/view")
        self.declare(target, TensorType(onnx.TensorProto.INT64, (len(shape),)))
        self.types[view] = self.type_of(tensor)
        add = Node("Add", (self._shape(shape), self.zero), (target,), name=target)
        return add, self._reshape(tensor, target, view), view

    def group(self, nodes: Sequence[Node], always_held: frozenset[str] = frozenset()) -> list[Node]:
        """The group's nodes with the barriers that hold them; `token` becomes its last tensor.

        Nodes that read what is `always_held` wait whatever its size, and whether it is a weight or not.
        """
        self._index += 1
        group = _Group(self.token, frozenset(name for node in nodes for name in node.outputs), always_held)
        for node in nodes:
            held = node.with_changes(inputs=tuple(group.views.get(name, name) for name in node.inputs))
            if not any(name in group.held for name in held.inputs) and (
                any(name in always_held for name in held.inputs) or self._is_worth_holding(held)
            ):
                held = self._hold(held, group)
            if any(name in group.held for name in held.inputs):
                group.held.update(held.outputs)
            group.written.append(held)
        # A token must itself come late, or whatever waits for it waits for nothing.
        late = (node.outputs[0] for node in reversed(nodes) if node.outputs[0] in group.held)
        self.token = next(late, self.token)
        return [*group.opening, *group.written]

    def _is_worth_holding(self, node: Node) -> bool:
        """Whether running early would make a difference: per-channel vectors do not."""
        touched = (*(name for name in node.inputs if name and not self.is_fixed(name)), *node.outputs)
        return any(self.type_of(name).size_bytes > self.small_bytes for name in touched)

    def _hold(self, node: Node, group: _Group) -> Node:
        """The node, reading one of its inputs (or its target shape) through a barrier."""
        if node.op == "Expand":
            return node.with_changes(inputs=(node.inputs[0], self._target(node.inputs[1], group)))
        if node.op in VIEW_OPERATORS:
            # Held by its own shape: the runtime would merge a view of a view, and the order with it.
            target = self._target(self._shape(self.type_of(node.outputs[0]).shape), group)
            again = {key: value for key, value in node.attributes.items() if key.startswith("__")}
            reshaped = self._reshape(node.inputs[0], target, node.outputs[0])
            return node.with_changes(
                op=reshaped.op, inputs=reshaped.inputs, attributes={**reshaped.attributes, **again}
            )
        outside = [
            name
            for name in node.inputs
            if name and name not in group.made and (name in group.always_held or not self.is_fixed(name))
        ]
        if not outside:
            return node
        source = max(outside, key=lambda name: self.type_of(name).size_bytes)
        target = self._target(self._shape(self.type_of(source).shape), group)
        view = self.name(f"{source}/held{self._index}")
        self.types[view] = self.type_of(source)
        group.written.append(self._reshape(source, target, view))
        group.views[source] = view
        group.held.add(view)
        return node.with_changes(inputs=tuple(group.views.get(name, name) for name in node.inputs))

    def wait(self, node: Node, token: str) -> tuple[list[Node], list[Node], Node]:
        """Nodes behind a token's, nodes in front of a node, and that node, which now waits for the token."""
        self._index += 1
        length, opening = self._empty_length(token)
        source = max((name for name in node.inputs if name), key=lambda name: self.type_of(name).size_bytes)
        kind = self.type_of(source)
        target = self.name(f"barrier{self._index}/shape")
        view = self.name(f"{source}/held{self._index}")
        shape = self._shape(kind.shape)
        self.declare(target, self.type_of(shape))
        self.types[view] = kind
        held = [
            Node("Add", (shape, length), (target,), name=target),
            self._reshape(source, target, view),
        ]
        return (
            opening,
            held,
            node.with_changes(inputs=tuple(view if name == source else name for name in node.inputs)),
        )

    def _length(self, group: _Group) -> str:
        """The int64 vector [0], known only when the token is.

        Computed only if the group needs it: one that nobody reads would keep the token alive.
        """
        if group.length is None:
            group.length, opening = self._empty_length(self.token)
            group.opening.extend(opening)
        return group.length

    def _empty_length(self, token: str) -> tuple[str, list[Node]]:
        """The length of an empty slice of a tensor, and the nodes that compute it."""
        shape = self.type_of(token).shape
        axes = self.constant(np.asarray([0], np.int64))
        nodes: list[Node] = []
        if not shape:
            unsqueezed = self.name(f"barrier{self._index}/token")
            self.declare(unsqueezed, TensorType(self.type_of(token).dtype, (1,)))
            nodes.append(Node("Unsqueeze", (token, axes), (unsqueezed,), name=unsqueezed))
            token = unsqueezed
        empty, length = self.name(f"barrier{self._index}/empty"), self.name(f"barrier{self._index}/length")
        nodes.append(Node("Slice", (token, self.zero, self.zero, axes), (empty,), name=empty))
        nodes.append(Node("Shape", (empty,), (length,), {"start": 0, "end": 1}, length))
        # Not one of `vectors`: with a 0 in place of a named first dimension its Shape would be folded away.
        self.types[empty] = TensorType(self.type_of(token).dtype, (0, *shape[1:]))
        self.declare(length, TensorType(onnx.TensorProto.INT64, (1,)))
        return length, nodes

    def _target(self, shape: str, group: _Group) -> str:
        """`shape` plus the zero that waits for the token."""
        length = self._length(group)
        target = self.name(f"barrier{self._index}/shape")
        self.declare(target, self.type_of(shape))
        group.written.append(Node("Add", (shape, length), (target,), name=target))
        group.held.add(target)
        return target

    def _shape(self, shape: tuple[int, ...]) -> str:
        return self.constant(np.asarray(shape, np.int64))

    def _reshape(self, source: str, target: str, view: str) -> Node:
        allow_zero = {"allowzero": 1} if 0 in self.type_of(source).shape else {}
        return Node("Reshape", (source, target), (view,), allow_zero, view)

    def declare(self, vector: str, kind: TensorType) -> None:
        self.types[vector] = kind
        self.vectors.add(vector)
