"""Names for the first dimensions of inner tensors, by which ONNX Runtime reuses buffers.

With default settings the runtime lets a dead buffer wait, allocated, for a later tensor of equal declared
dimensions. Two tensors whose dimensions have the same name share one buffer, with the gap between them; a
tensor with a name of its own gets a buffer that is freed when it dies. But the planner goes through all
buffers that wait for each new tensor: were all names different, loading would take time by the square of the
file's length. So a tensor takes the name of one that died before it wherever the gap has room below the
step's peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.tracing.runtime_costs import IN_PLACE_OPERATORS, VIEW_OPERATORS, workspace_bytes


def dimension_names(
    nodes: Sequence[Node],
    types: Mapping[str, TensorType],
    *,
    outputs: Collection[str],
    numbered: Collection[str],
    peak_bytes: int,
) -> dict[str, str]:
    """A name for the first dimension of each tensor that the nodes compute, in the order of the nodes.

    `outputs` are the graph's: they get no name and live to the end. `numbered` tensors keep their dimensions,
    as do scalars. `types` has every tensor that the nodes read or write.
    """
    return _Namer(nodes, types, frozenset(outputs), frozenset(numbered), peak_bytes).names()


@dataclass(slots=True)
class _Buffer:
    """Memory made for `tensor`, with the reads still to come of all tensors that live in it."""

    tensor: str
    reads: int


@dataclass(slots=True)
class _Namer:
    """Follows the runtime's planner through the nodes.

    `held_bytes` are the bytes allocated at each node, gaps included. `dead` are the names of the buffers that
    wait, with the node that read them last, by the type of the tensor that they were made for.
    """

    nodes: Sequence[Node]
    types: Mapping[str, TensorType]
    outputs: frozenset[str]
    numbered: frozenset[str]
    peak_bytes: int
    named: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, _Buffer] = field(default_factory=dict)
    dead: dict[TensorType, list[tuple[str, int]]] = field(default_factory=dict)
    live_bytes: int = 0
    held_bytes: np.ndarray = field(init=False)
    reads: Counter[str] = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self.held_bytes = np.zeros(len(self.nodes), np.int64)
        self.reads = Counter(name for node in self.nodes for name in reads_of(node))

    def names(self) -> dict[str, str]:
        for index, node in enumerate(self.nodes):
            for position, name in enumerate(node.outputs):
                if name in self.outputs:
                    self.live_bytes += self.types[name].size_bytes
                elif name and name not in self.numbered:
                    self._compute(index, node, position)
            self.held_bytes[index] = self.live_bytes + workspace_bytes(node, self.types)
            for name in reads_of(node):
                self._read(index, name)
        return self.named

    def _compute(self, index: int, node: Node, position: int) -> None:
        name, source = node.outputs[position], node.inputs[0] if node.inputs else ""
        is_view = node.op in VIEW_OPERATORS
        # Dimensions must be equal for an operator to run in place, where it then finds that it can.
        inherited = self.named.get(source) if position == 0 and node.op in IN_PLACE_OPERATORS else None
        buffer = self.buffers.get(source)
        if is_view or (inherited and buffer is not None and buffer.reads == 1):
            if buffer is not None:
                buffer.reads += self.reads[name]
                self.buffers[name] = buffer
        else:
            self.buffers[name] = _Buffer(name, self.reads[name])
            self.live_bytes += self.types[name].size_bytes
            inherited = inherited or self._waiting(index, self.types[name])
        if self.types[name].shape:
            self.named[name] = inherited or self._new_name()

    def _new_name(self) -> str:
        self._count += 1
        return f"d{self._count - 1}"

    def _waiting(self, index: int, kind: TensorType) -> str | None:
        """The name of the buffer of this type that died last, if it may be kept until now."""
        waiting = self.dead.get(kind)
        if not waiting:
            return None
        name, died = waiting.pop()
        gap = self.held_bytes[died + 1 : index]
        if gap.size and gap.max() + kind.size_bytes > self.peak_bytes:
            waiting.clear()  # The others have waited longer.
            return None
        gap += kind.size_bytes
        return name

    def _read(self, index: int, name: str) -> None:
        buffer = self.buffers.get(name)
        if buffer is None:
            return
        buffer.reads -= 1
        if buffer.reads:
            return
        kind = self.types[buffer.tensor]
        self.live_bytes -= kind.size_bytes
        if kind.shape:
            self.dead.setdefault(kind, []).append((self.named[buffer.tensor], index))
