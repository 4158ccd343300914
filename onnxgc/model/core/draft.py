"""The graph between two passes of reading: not yet static, not yet trainable.

Every pass takes a `Draft` and returns a new one. A draft never contains a weight's values, so the cost of
reading depends on the size of the graph, not on the size of its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
from onnx import helper

from onnxgc.errors import ModelFileError, ShapeError
from onnxgc.model.core.ir import EMPTY_ATTRIBUTES, Node, TensorType, Weight

# Connects the first state of a Loop or Scan to its body, if bodies are inlined into the graph.
INITIAL_STATE = "InitialState"

ONNX_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Draft:
    """A flat graph with its weights lifted out.

    `declared` contains the types that the file states for its inputs and inner tensors, `types` the
    static ones inferred by `onnxgc.model.static_shapes`. `fixed` are the weights that must not be folded
    (parameters, statistics and frozen weights); `derived` are the constants computed by folding.
    `problems` gives the reason for each tensor without a static shape.
    """

    name: str
    opset: int
    ir_version: int
    other_domains: Mapping[str, int]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight]
    declared: Mapping[str, onnx.TypeProto]
    types: Mapping[str, TensorType] = field(default_factory=lambda: EMPTY_ATTRIBUTES)
    fixed: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()
    problems: Mapping[str, str] = field(default_factory=lambda: EMPTY_ATTRIBUTES)
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=lambda: EMPTY_ATTRIBUTES)

    def with_changes(self, **changes: Any) -> Draft:
        return replace(self, **changes)

    def with_notes(self, *notes: str) -> Draft:
        return replace(self, notes=(*self.notes, *notes))

    def producers(self) -> dict[str, Node]:
        """The node that computes each tensor, by its name."""
        return {output: node for node in self.nodes for output in node.outputs if output}

    def consumers(self) -> dict[str, list[tuple[Node, int]]]:
        """The nodes that read each tensor, each with the input's index (-1 from inside a subgraph)."""
        readers: defaultdict[str, list[tuple[Node, int]]] = defaultdict(list)
        for node in self.nodes:
            for index, name in enumerate(node.inputs):
                if name:
                    readers[name].append((node, index))
            for name in captured_names(node):
                readers[name].append((node, -1))
        return dict(readers)

    def type_of(self, name: str) -> TensorType | None:
        """The static type of a tensor or weight; None if unknown."""
        if name in self.weights:
            return self.weights[name].type
        return self.types.get(name)

    def required_type(self, name: str) -> TensorType:
        """The static type of a tensor or weight.

        Raises:
            ShapeError: the tensor has no static shape.
        """
        kind = self.type_of(name)
        if kind is None:
            raise ShapeError(self.problems.get(name, f"tensor '{name}' has no static shape"))
        return kind

    def without_stale_types(self) -> Draft:
        """The draft without types of removed tensors, whose names may be used again."""
        present = set(self.tensor_names())
        return self.with_changes(types={name: kind for name, kind in self.types.items() if name in present})

    def tensor_names(self) -> Iterator[str]:
        """Every tensor name in use, subgraphs included."""
        yield from self.inputs
        yield from self.weights
        for node in self.nodes:
            yield from filter(None, node.inputs)
            yield from filter(None, node.outputs)
            for graph in subgraphs(node):
                yield from _names_in(graph)


class NameSource:
    """A source of unused names: `loss`, then `loss_2`, `loss_3`, ..."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def fresh(self, wanted: str) -> str:
        return fresh_name(wanted, self._taken)


def captured_names(node: Node) -> tuple[str, ...]:
    """Outer tensors read by a node's subgraphs (If, Loop, Scan)."""
    if not node.attributes:
        return ()
    return tuple(dict.fromkeys(name for graph in subgraphs(node) for name in _captured_by(graph)))


def reads_of(node: Node) -> tuple[str, ...]:
    """All tensors that must exist before the node runs."""
    return (*filter(None, node.inputs), *captured_names(node))


def operator_name(node: Node) -> str:
    """The operator with its domain, if not ONNX's own: `Conv`, `com.microsoft::FastGelu`."""
    return node.op if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op}"


def topologically_sorted(nodes: Iterable[Node], available: Iterable[str]) -> tuple[Node, ...]:
    """The nodes with every tensor computed before it is read, in the file's order where possible.

    Raises:
        ModelFileError: a tensor has no source, or nodes form a cycle.
    """
    nodes = list(nodes)
    reads = [reads_of(node) for node in nodes]
    ready = set(available)
    producers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name not in ready}
    readers: dict[int, list[int]] = defaultdict(list)
    waits = [0] * len(nodes)
    for index, names in enumerate(reads):
        sources = {producers.get(name, -1) for name in names if name not in ready}
        waits[index] = len(sources)
        for source in sources:
            readers[source].append(index)
    # A node runs in the first pass over the file in which everything that it reads exists.
    passes = [0] * len(nodes)
    free = [index for index, count in enumerate(waits) if not count]
    for index in free:
        for reader in readers[index]:
            passes[reader] = max(passes[reader], passes[index] + (index >= reader))
            waits[reader] -= 1
            if not waits[reader]:
                free.append(reader)
    if len(free) < len(nodes):
        ready.update(name for index in free for name in nodes[index].outputs)
        raise _not_computable([node for node, count in zip(nodes, waits, strict=True) if count], ready)
    return tuple(nodes[index] for index in sorted(range(len(nodes)), key=lambda index: (passes[index], index)))


def without_dead_nodes(draft: Draft, wanted: Iterable[str]) -> Draft:
    """The draft with only the nodes and weights on which `wanted` tensors depend."""
    needed = set(wanted)
    kept: list[Node] = []
    for node in reversed(draft.nodes):
        if any(output in needed for output in node.outputs):
            kept.append(node)
            needed.update(reads_of(node))
    weights = {name: weight for name, weight in draft.weights.items() if name in needed}
    return draft.with_changes(nodes=tuple(reversed(kept)), weights=weights)


def attributes_of(proto: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes as Python values.

    Empty lists are omitted: to ONNX they mean an absent attribute, and their type is lost in Python.
    """
    values: dict[str, Any] = {}
    for attribute in proto.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = _text_or_bytes(value)
        elif attribute.type == onnx.AttributeProto.STRINGS:
            value = [_text_or_bytes(item) for item in value]
        elif not isinstance(value, int | float | str | bytes) and hasattr(value, "__len__"):
            value = list(value)
        if value != []:
            values[attribute.name] = value
    return values


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def subgraphs(node: Node) -> Iterator[onnx.GraphProto]:
    """The bodies and branches of an If, Loop or Scan."""
    for value in node.attributes.values():
        if isinstance(value, onnx.GraphProto):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, onnx.GraphProto))


def nodes_in(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for subgraph in _graphs_inside(node):
            yield from nodes_in(subgraph)


def _graphs_inside(proto: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in proto.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _captured_by(graph: onnx.GraphProto) -> list[str]:
    inner = {value.name for value in graph.input} | {value.name for value in graph.initializer}
    inner.update(output for node in graph.node for output in node.output)
    read: list[str] = []
    for node in graph.node:
        read += filter(None, node.input)
        for subgraph in _graphs_inside(node):
            read += _captured_by(subgraph)
    read += [value.name for value in graph.output]
    return [name for name in read if name not in inner]


def _names_in(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from filter(None, node.output)
        for subgraph in _graphs_inside(node):
            yield from _names_in(subgraph)


def _not_computable(blocked: list[Node], ready: set[str]) -> ModelFileError:
    computed = {output for node in blocked for output in node.outputs}
    for node in blocked:
        for name in reads_of(node):
            if name not in ready and name not in computed:
                return ModelFileError(
                    f"node {node.label} ({operator_name(node)}) reads tensor '{name}', which no node, "
                    "input or initializer provides; the file is not a valid ONNX model"
                )
    return ModelFileError(
        f"node '{blocked[0].name}' ({operator_name(blocked[0])}) depends on its own output; "
        "the file is not a valid ONNX model"
    )


def fresh_name(wanted: str, taken: set[str]) -> str:
    """An unused name, which becomes taken."""
    name = unused_name(wanted, taken)
    taken.add(name)
    return name


def unused_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, with a suffix if it is taken."""
    name, suffix = wanted, 1
    while name in taken:
        suffix += 1
        name = f"{wanted}_{suffix}"
    return name
