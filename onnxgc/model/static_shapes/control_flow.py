"""If, Loop and Scan without control flow: the branch that is taken, and one copy of a body for each step.

With static shapes most conditions and trip counts are constants. What depends on the data stays as
it is; no gradient goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx
from onnx import helper

from onnxgc.model.core.draft import (
    INITIAL_STATE,
    ONNX_DOMAINS,
    Draft,
    attributes_of,
    fresh_name,
    operator_name,
    subgraphs,
)
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.files.lift_bodies import _outer_names
from onnxgc.model.files.pytorch_metadata import module_of
from onnxgc.model.static_shapes.unroll_limit import UnrollLimit

# From here on Split, Squeeze and Unsqueeze take their settings as inputs.
_SETTINGS_ARE_INPUTS = 13


def as_one_graph(draft: Draft) -> Draft:
    """The draft with all bodies and branches beside the other nodes, to see how weights are used.

    Nothing else holds: each body stands once, and both branches give the same tensors.
    """
    if not any(True for node in draft.nodes for _ in subgraphs(node)):
        return draft
    nodes: list[Node] = []
    for node in draft.nodes:
        nodes += _beside(node)
    return draft.with_changes(nodes=tuple(nodes))


class BodyWalk(Protocol):
    """What lowering needs of the walk that finds static shapes."""

    def value(self, name: str) -> Array | None: ...

    def type_of(self, name: str) -> TensorType | None: ...

    def add_fresh_constant(self, wanted: str, value: Array) -> str: ...

    def visit(self, node: Node) -> None: ...


class ControlFlow:
    """Lowers control flow while a walk finds the shapes that decide it."""

    def __init__(self, walk: BodyWalk, draft: Draft) -> None:
        self._walk = walk
        self._opset = draft.opset
        self._tensors = _outer_names(draft)
        self._node_names = {node.name for node in draft.nodes}
        self._budget = UnrollLimit()

    def choose(self, node: Node) -> bool:
        """Whether the node is an If whose branch is known, and has been visited instead."""
        if node.domain or node.op != "If":
            return False
        condition = self._walk.value(node.inputs[0])
        if condition is None or condition.size != 1:
            return False
        branch = node.attribute("then_branch" if condition.all() else "else_branch")
        for source, output in zip(self._inline(branch, {}, node, ""), node.outputs, strict=True):
            self._bind(node, source, output)
        return True

    def unroll(self, node: Node) -> bool:
        """Whether the node is a Loop or Scan of known length, and its steps have been visited instead."""
        if node.domain:
            return False
        if node.op == "Loop":
            return self._loop(node)
        return node.op == "Scan" and self._scan(node)

    def _loop(self, node: Node) -> bool:
        body: onnx.GraphProto = node.attribute("body")
        count, condition = (*node.inputs, "", "")[:2]
        limit = self._constant(count)
        goes_on = self._constant(condition)
        if (count and limit is None) or (condition and goes_on is None):
            return False
        state = list(node.inputs[2:])
        gathered: list[list[str]] = [[] for _ in body.output[1 + len(state) :]]
        step = 0
        while (goes_on is None or goes_on) and (limit is None or step < limit):
            self._budget.take(node, step + 1, max(len(body.node), 1))
            prefix = f"{node.name}/step{step}/"
            given = (
                self._new_constant(f"{prefix}number", np.asarray(step, np.int64)),
                self._new_constant(f"{prefix}condition", np.asarray(True)),
                *state,
            )
            bound = dict(zip((value.name for value in body.input), given, strict=True))
            after, *outputs = self._inline(body, bound, node, prefix)
            goes_on = self._constant(after)
            if goes_on is None:
                return False
            state = outputs[: len(state)]
            for parts, part in zip(gathered, outputs[len(state) :], strict=True):
                parts.append(part)
            step += 1
        declared = [value.type for value in body.output[1 + len(state) :]]
        return self._end(node, state, gathered, [0] * len(gathered), declared)

    def _scan(self, node: Node) -> bool:
        body: onnx.GraphProto = node.attribute("body")
        scanned = int(node.attribute("num_scan_inputs"))
        state, sources = list(node.inputs[:-scanned]), node.inputs[-scanned:]
        axes = node.attribute("scan_input_axes") or [0] * scanned
        backward = node.attribute("scan_input_directions") or [0] * scanned
        slices: list[list[str]] = []
        for source, axis, is_backward in zip(sources, axes, backward, strict=True):
            parts = self._slices(node, source, int(axis))
            if parts is None:
                return False
            slices.append(parts[::-1] if is_backward else parts)
        steps = len(slices[0])
        self._budget.take(node, steps, steps * max(len(body.node), 1))
        gathered: list[list[str]] = [[] for _ in body.output[len(state) :]]
        for step in range(steps):
            given = (*state, *(parts[step] for parts in slices))
            bound = dict(zip((value.name for value in body.input), given, strict=True))
            outputs = self._inline(body, bound, node, f"{node.name}/step{step}/")
            state = outputs[: len(state)]
            for parts, part in zip(gathered, outputs[len(state) :], strict=True):
                parts.append(part)
        for parts, is_backward in zip(
            gathered, node.attribute("scan_output_directions") or [0] * len(gathered), strict=True
        ):
            if is_backward:
                parts.reverse()
        declared = [value.type for value in body.output[len(state) :]]
        output_axes = node.attribute("scan_output_axes") or [0] * len(gathered)
        return self._end(node, state, gathered, output_axes, declared)

    def _end(
        self,
        node: Node,
        state: Sequence[str],
        gathered: Sequence[Sequence[str]],
        axes: Sequence[int],
        declared: Sequence[onnx.TypeProto],
    ) -> bool:
        """Gives the node's outputs: the last states, and what the steps gave, side by side."""
        outputs = node.outputs
        stacked = list(zip(outputs[len(state) :], gathered, axes, declared, strict=False))
        empty = {output: _empty(kind, int(axis)) for output, parts, axis, kind in stacked if not parts}
        if None in empty.values():
            return False
        for source, output in zip(state, outputs, strict=False):
            self._bind(node, source, output)
        for output, parts, axis, _ in stacked:
            value = empty.get(output)
            if not output:
                continue
            if value is not None:
                self._bind(node, self._new_constant(f"{output}_empty", value), output)
            else:
                self._stack(node, parts, output, int(axis))
        return True

    def _slices(self, node: Node, source: str, axis: int) -> list[str] | None:
        """The slices of a tensor along an axis, without it."""
        kind = self._walk.type_of(source)
        if kind is None:
            return None
        axis %= len(kind.shape)
        count = kind.shape[axis]
        if count == 0:
            return []
        names = [self._fresh(f"{node.name}/step{step}/{source}") for step in range(count)]
        kept = [source]
        if count > 1:
            kept = [self._fresh(f"{name}_kept") for name in names]
            self._add(node, "Split", [source], kept, "split", [1] * count, axis=axis)
        for part, name in zip(kept, names, strict=True):
            self._add(node, "Squeeze", [part], [name], "axes", [axis])
        return names

    def _stack(self, node: Node, parts: Sequence[str], output: str, axis: int) -> None:
        kind = self._walk.type_of(parts[0])
        if axis < 0:
            axis += len(kind.shape) + 1 if kind is not None else 0
        if len(parts) == 1:
            self._add(node, "Unsqueeze", parts, [output], "axes", [axis])
            return
        wide = [self._fresh(f"{output}_{index}") for index in range(len(parts))]
        for part, name in zip(parts, wide, strict=True):
            self._add(node, "Unsqueeze", [part], [name], "axes", [axis])
        self._add(node, "Concat", wide, [output], axis=axis)

    def _add(
        self,
        source: Node,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        setting: str = "",
        values: Sequence[int] = (),
        **attributes: int | list[int],
    ) -> None:
        """Visits an operator whose setting is an input or an attribute, as the opset wants it."""
        inputs = list(inputs)
        if setting and self._opset >= _SETTINGS_ARE_INPUTS:
            inputs.append(self._new_constant(f"{source.name}/{setting}", np.asarray(values, np.int64)))
        elif setting:
            attributes[setting] = list(values)
        name = self._fresh_node(f"{source.name}/{op}_{outputs[0]}")
        self._walk.visit(
            Node(
                op,
                tuple(inputs),
                tuple(outputs),
                attributes,
                name=name,
                origin=source.origin,
                module=source.module,
                rule=op,
            )
        )

    def _new_constant(self, wanted: str, value: Array) -> str:
        return self._walk.add_fresh_constant(self._fresh(wanted), value)

    def _bind(self, node: Node, source: str, output: str) -> None:
        if output:
            self._add(node, "Identity", [source], [output])

    def _constant(self, name: str) -> Array | None:
        value = self._walk.value(name) if name else None
        return value.reshape(()) if value is not None and value.size == 1 else None

    def _inline(self, graph: onnx.GraphProto, bound: Mapping[str, str], node: Node, prefix: str) -> list[str]:
        """Visits a copy of a body with its inputs bound; returns what its outputs are called outside."""
        names = dict(bound)
        for proto in graph.node:
            for output in filter(None, proto.output):
                names[output] = self._own(output, node, prefix, self._tensors)
            inner = _outside(proto, names)
            own = proto.name or f"{proto.op_type}_{next(filter(None, proto.output), 'node')}"
            own = self._own(own, node, prefix, self._node_names)
            self._walk.visit(inner.with_changes(name=own, origin=own))
        return [names.get(value.name, value.name) for value in graph.output]

    def _own(self, name: str, node: Node, prefix: str, taken: set[str]) -> str:
        """A name outside for what a body calls so; what a branch holds keeps its name where it can."""
        wanted = prefix + name if prefix or name not in taken else f"{node.name}/{name}"
        return fresh_name(wanted, taken)

    def _fresh(self, wanted: str) -> str:
        return fresh_name(wanted, self._tensors)

    def _fresh_node(self, wanted: str) -> str:
        return fresh_name(wanted, self._node_names)


def _outside(proto: onnx.NodeProto, names: Mapping[str, str]) -> Node:
    """A body's node as one of the outer graph, with its tensors' names there."""
    if any(attribute.type == onnx.AttributeProto.GRAPH for attribute in proto.attribute):
        copy = onnx.NodeProto()
        copy.CopyFrom(proto)
        for attribute in copy.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_captured(attribute.g, names)
        proto = copy
    domain = "" if proto.domain in ONNX_DOMAINS else proto.domain
    node = Node(
        proto.op_type,
        tuple(names.get(name, name) for name in proto.input),
        tuple(names.get(name, name) for name in proto.output),
        attributes_of(proto),
        name=proto.name,
        origin=proto.name,
        module=module_of(proto),
        domain=domain,
    )
    return node.with_changes(rule=operator_name(node))


def _rename_captured(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames, in place, the outer tensors that a graph reads."""
    local = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    local |= {output for proto in graph.node for output in proto.output}
    outer = {name: renamed for name, renamed in names.items() if name not in local}
    for proto in graph.node:
        proto.input[:] = [outer.get(name, name) for name in proto.input]
        for attribute in proto.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_captured(attribute.g, outer)
    for value in graph.output:
        value.name = outer.get(value.name, value.name)


def _empty(kind: onnx.TypeProto, axis: int) -> Array | None:
    """What no step at all gives: an empty tensor, if the body says of which shape."""
    shape = kind.tensor_type.shape
    if not kind.tensor_type.HasField("shape") or not all(dim.HasField("dim_value") for dim in shape.dim):
        return None
    sizes = [dim.dim_value for dim in shape.dim]
    sizes.insert(axis % (len(sizes) + 1), 0)
    return np.zeros(sizes, helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def _beside(node: Node) -> list[Node]:
    """A node, or in its place its bodies with what goes into them and comes out."""
    links = _LINKS.get(node.op) if not node.domain else None
    if links is None:
        return [node]
    nodes: list[Node] = []
    for key, graph in node.attributes.items():
        if not isinstance(graph, onnx.GraphProto):
            continue
        own = {output for proto in graph.node for output in proto.output if output}
        names = {name: f"{node.name}/{key}/{name}" for name in (*own, *(v.name for v in graph.input))}
        inner, outer = links(node, graph)
        states = len(inner) - int(node.attribute("num_scan_inputs", 0))
        taken = [names[value.name] for value in graph.input]
        nodes += _links(node, INITIAL_STATE, inner[:states], taken)
        nodes += _links(node, "Identity", inner[states:], taken[states:])
        for proto in graph.node:
            nodes += _beside(_outside(proto, names))
        nodes += _links(node, "Identity", [names.get(v.name, v.name) for v in graph.output], outer)
    return nodes


def _links(node: Node, op: str, sources: Iterable[str], outputs: Iterable[str]) -> list[Node]:
    return [
        Node(op, (source,), (output,), name=f"{node.name}/{output}")
        for source, output in zip(sources, outputs, strict=False)
        if source and output
    ]


def _loop_links(node: Node, graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    return ["", "", *node.inputs[2:]], ["", *node.outputs]


def _plain_links(node: Node, graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    return list(node.inputs) if graph.input else [], list(node.outputs)


_LINKS: Mapping[str, Callable[[Node, onnx.GraphProto], tuple[list[str], list[str]]]] = {
    "If": _plain_links,
    "Loop": _loop_links,
    "Scan": _plain_links,
}
