"""Barriers: data dependencies without cost that keep backward in the schedule's order.

A group of nodes (one backward chunk, or the recomputation of one segment) must not start before the previous
group has finished, whichever order the runtime prefers. So a node that could run earlier reads one of its
inputs through a Reshape. Its target is the input's own shape plus a zero: the length of an empty slice of the
previous group's last tensor, the token.

    empty   = Slice(token, zero, zero)     # zero is an input, so constant folding cannot remove it
    length  = Shape(empty)                 # [0]
    target  = Add(shape of x, length)
    delayed = Reshape(x, target)           # a view: no copy
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from onnxgc.emission.graph_tensors import GraphTensors
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.operators.registry import VIEW_OPERATORS


@dataclass(slots=True)
class _DelayedGroup:
    """A group under construction.

    `outputs` are the tensors that the group computes, `delayed` those that depend on the token. `views` maps
    a tensor to its view behind a barrier. `length` is the zero that depends on the token; `opening` computes
    it before all other nodes, since a later read would extend the token's lifetime. Readers of
    `always_delayed` tensors wait regardless of size, even for weights.
    """

    token: str
    outputs: frozenset[str]
    always_delayed: frozenset[str] = frozenset()
    delayed: set[str] = field(init=False)
    views: dict[str, str] = field(default_factory=dict)
    opening: list[Node] = field(default_factory=list)
    written: list[Node] = field(default_factory=list)
    length: str | None = None

    def __post_init__(self) -> None:
        self.delayed = {self.token}


@dataclass(slots=True)
class BarrierWriter:
    """Writes groups of nodes, each delayed until the previous one has finished.

    Nodes that read and write no tensor larger than `small_bytes` are not delayed. `token` is the tensor for
    which the next group waits.
    """

    tensors: GraphTensors
    small_bytes: int
    token: str
    _index: int = 0

    def opaque_view(self, tensor: str, *, on_cuda: bool) -> tuple[list[Node], str]:
        """A view of an input with a shape that the runtime does not know statically, and its nodes.

        So the runtime reserves no buffer for a later tensor of the same shape. On CUDA the zero is the length
        of an empty slice: the runtime would add the input `zero` on the device and copy the shape back.
        """
        length, nodes = self._empty_length(tensor) if on_cuda else (self.tensors.zero, [])
        shape = self.tensors.type_of(tensor).shape
        target, view = self.tensors.fresh_name(f"{tensor}/shape"), self.tensors.fresh_name(f"{tensor}/view")
        self.tensors.declare_vector(target, TensorType(onnx.TensorProto.INT64, (len(shape),)))
        self.tensors.types[view] = self.tensors.type_of(tensor)
        add = Node("Add", (self.tensors.integers(shape), length), (target,), name=target)
        return [*nodes, add, self._reshape(tensor, target, view)], view

    def delay_group(self, nodes: Sequence[Node], always_delayed: frozenset[str] = frozenset()) -> list[Node]:
        """The group's nodes with their barriers; `token` becomes the group's last delayed tensor.

        Readers of `always_delayed` tensors wait regardless of size, even for weights.
        """
        self._index += 1
        outputs = frozenset(name for node in nodes for name in node.outputs)
        group = _DelayedGroup(self.token, outputs, always_delayed)
        for node in nodes:
            node = node.with_changes(inputs=tuple(group.views.get(name, name) for name in node.inputs))
            if not any(name in group.delayed for name in node.inputs) and (
                any(name in always_delayed for name in node.inputs) or self._is_large(node)
            ):
                node = self._delay(node, group)
            if any(name in group.delayed for name in node.inputs):
                group.delayed.update(node.outputs)
            group.written.append(node)
        # The next token must be delayed itself: otherwise its readers could run early as well.
        delayed = (node.outputs[0] for node in reversed(nodes) if node.outputs[0] in group.delayed)
        self.token = next(delayed, self.token)
        return [*group.opening, *group.written]

    def _is_large(self, node: Node) -> bool:
        """Whether running the node early affects the peak; per-channel vectors do not."""
        tensors = (*(name for name in node.inputs if name and not self.tensors.is_fixed(name)), *node.outputs)
        return any(self.tensors.type_of(name).size_bytes > self.small_bytes for name in tensors)

    def _delay(self, node: Node, group: _DelayedGroup) -> Node:
        """The node with a barrier before one of its inputs or its target shape."""
        if node.op == "Expand":
            return node.with_changes(inputs=(node.inputs[0], self._target(node.inputs[1], group)))
        if node.op in VIEW_OPERATORS:
            # Delayed by its own target shape: the runtime would merge a view of a view and lose the barrier.
            target = self._target(self.tensors.integers(self.tensors.type_of(node.outputs[0]).shape), group)
            markers = {key: value for key, value in node.attributes.items() if key.startswith("__")}
            reshaped = self._reshape(node.inputs[0], target, node.outputs[0])
            return node.with_changes(
                op=reshaped.op, inputs=reshaped.inputs, attributes={**reshaped.attributes, **markers}
            )
        outside = [
            name
            for name in node.inputs
            if name and name not in group.outputs and (name in group.always_delayed or not self.tensors.is_fixed(name))
        ]
        if not outside:
            return node
        source = max(outside, key=lambda name: self.tensors.type_of(name).size_bytes)
        target = self._target(self.tensors.integers(self.tensors.type_of(source).shape), group)
        view = self.tensors.fresh_name(f"{source}/held{self._index}")
        self.tensors.types[view] = self.tensors.type_of(source)
        group.written.append(self._reshape(source, target, view))
        group.views[source] = view
        group.delayed.add(view)
        return node.with_changes(inputs=tuple(group.views.get(name, name) for name in node.inputs))

    def delay_until(self, node: Node, token: str) -> tuple[list[Node], list[Node], Node]:
        """Nodes to insert after the token's node, nodes to insert before `node`, and the delayed `node`."""
        self._index += 1
        length, opening = self._empty_length(token)
        source = max((name for name in node.inputs if name), key=lambda name: self.tensors.type_of(name).size_bytes)
        kind = self.tensors.type_of(source)
        target = self.tensors.fresh_name(f"barrier{self._index}/shape")
        view = self.tensors.fresh_name(f"{source}/held{self._index}")
        shape = self.tensors.integers(kind.shape)
        self.tensors.declare_vector(target, self.tensors.type_of(shape))
        self.tensors.types[view] = kind
        barrier = [Node("Add", (shape, length), (target,), name=target), self._reshape(source, target, view)]
        delayed = node.with_changes(inputs=tuple(view if name == source else name for name in node.inputs))
        return opening, barrier, delayed

    def _length(self, group: _DelayedGroup) -> str:
        """The int64 vector [0], available once the token is.

        Computed on demand: without a reader it would keep the token live.
        """
        if group.length is None:
            group.length, opening = self._empty_length(self.token)
            group.opening.extend(opening)
        return group.length

    def _empty_length(self, token: str) -> tuple[str, list[Node]]:
        """The length of an empty slice of a tensor, and the nodes that compute it."""
        shape = self.tensors.type_of(token).shape
        axes = self.tensors.integers([0])
        nodes: list[Node] = []
        if not shape:
            unsqueezed = self.tensors.fresh_name(f"barrier{self._index}/token")
            self.tensors.declare_vector(unsqueezed, TensorType(self.tensors.type_of(token).dtype, (1,)))
            nodes.append(Node("Unsqueeze", (token, axes), (unsqueezed,), name=unsqueezed))
            token = unsqueezed
        empty, length = (
            self.tensors.fresh_name(f"barrier{self._index}/empty"),
            self.tensors.fresh_name(f"barrier{self._index}/length"),
        )
        nodes.append(Node("Slice", (token, self.tensors.zero, self.tensors.zero, axes), (empty,), name=empty))
        nodes.append(Node("Shape", (empty,), (length,), {"start": 0, "end": 1}, length))
        # Not one of `vectors`: with a first dimension of 0 instead of a name, its Shape would be folded away.
        self.tensors.types[empty] = TensorType(self.tensors.type_of(token).dtype, (0, *shape[1:]))
        self.tensors.declare_vector(length, TensorType(onnx.TensorProto.INT64, (1,)))
        return length, nodes

    def _target(self, shape: str, group: _DelayedGroup) -> str:
        """`shape` plus the zero that depends on the token."""
        length = self._length(group)
        target = self.tensors.fresh_name(f"barrier{self._index}/shape")
        self.tensors.declare_vector(target, self.tensors.type_of(shape))
        group.written.append(Node("Add", (shape, length), (target,), name=target))
        group.delayed.add(target)
        return target

    def _reshape(self, source: str, target: str, view: str) -> Node:
        allow_zero = {"allowzero": 1} if 0 in self.tensors.type_of(source).shape else {}
        return Node("Reshape", (source, target), (view,), allow_zero, view)
