"""Names for the first dimensions of inner tensors, by which ONNX Runtime reuses buffers.

With default settings the runtime keeps a dead buffer allocated for a later tensor of equal declared
dimensions. Two tensors whose dimensions have the same name share one buffer, which also occupies memory
between their lifetimes. A tensor with a unique name has a buffer that is freed when the tensor dies. But for
each new tensor the planner searches all dead buffers: with unique names only, loading time would be quadratic
in the length of the file. So a tensor takes the name of one that died earlier if the buffer fits below the
step's peak in the meantime.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.operators.registry import IN_PLACE_OPERATORS, VIEW_OPERATORS, workspace_bytes


def dimension_names(
    nodes: Sequence[Node],
    types: Mapping[str, TensorType],
    *,
    outputs: Collection[str],
    numbered: Collection[str],
    peak_bytes: int,
) -> dict[str, str]:
    """A name for the first dimension of each tensor that the nodes compute, in the order of the nodes.

    `outputs` of the graph get no name and live to the end. `numbered` tensors and scalars keep their
    dimensions. `types` has every tensor that the nodes read or write. `peak_bytes` is the simulated peak.
    """
    return _BufferPlanner(nodes, types, frozenset(outputs), frozenset(numbered), peak_bytes).names()


@dataclass(slots=True)
class _Buffer:
    """Memory allocated for `tensor`, with the number of reads left of all tensors in it."""

    tensor: str
    reads: int


@dataclass(slots=True)
class _BufferPlanner:
    """Follows the runtime's memory planner through the nodes.

    `allocated_bytes` are the bytes allocated at each node, including buffers between two lifetimes. `dead`
    lists, by type, the names of dead buffers with the node of their last read.
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
    allocated_bytes: np.ndarray = field(init=False)
    reads: Counter[str] = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self.allocated_bytes = np.zeros(len(self.nodes), np.int64)
        self.reads = Counter(name for node in self.nodes for name in reads_of(node))

    def names(self) -> dict[str, str]:
        for index, node in enumerate(self.nodes):
            for position, name in enumerate(node.outputs):
                if name in self.outputs:
                    self.live_bytes += self.types[name].size_bytes
                elif name and name not in self.numbered:
                    self._compute(index, node, position)
            self.allocated_bytes[index] = self.live_bytes + workspace_bytes(node, self.types)
            for name in reads_of(node):
                self._read(index, name)
        return self.named

    def _compute(self, index: int, node: Node, position: int) -> None:
        name, source = node.outputs[position], node.inputs[0] if node.inputs else ""
        is_view = node.op in VIEW_OPERATORS
        # An operator runs in place only if its input and output have equal dimensions.
        inherited = self.named.get(source) if position == 0 and node.op in IN_PLACE_OPERATORS else None
        buffer = self.buffers.get(source)
        if is_view or (inherited and buffer is not None and buffer.reads == 1):
            if buffer is not None:
                buffer.reads += self.reads[name]
                self.buffers[name] = buffer
        else:
            self.buffers[name] = _Buffer(name, self.reads[name])
            self.live_bytes += self.types[name].size_bytes
            inherited = inherited or self._reusable_name(index, self.types[name])
        if self.types[name].shape:
            self.named[name] = inherited or self._new_name()

    def _new_name(self) -> str:
        self._count += 1
        return f"d{self._count - 1}"

    def _reusable_name(self, index: int, kind: TensorType) -> str | None:
        """The name of the buffer of this type that died last, if keeping it respects the peak."""
        candidates = self.dead.get(kind)
        if not candidates:
            return None
        name, died = candidates.pop()
        gap = self.allocated_bytes[died + 1 : index]
        if gap.size and gap.max() + kind.size_bytes > self.peak_bytes:
            candidates.clear()  # The others died earlier.
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
