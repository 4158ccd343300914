"""Lowers If, Loop and Scan: inlines the branch that is taken, and a copy of a body for each step.

With static shapes most conditions and trip counts are constants. Control flow that depends on the data
stays in the graph; no gradient passes through it.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, attributes_of, fresh_name, operator_name
from onnxgc.model.core.ir import Array, Node
from onnxgc.model.files.lift_body_weights import outer_names
from onnxgc.model.files.module_paths import module_of
from onnxgc.model.rebatch.shape_pair import ShapeWalk
from onnxgc.model.static_shapes.opset_changes import SETTINGS_AS_INPUTS
from onnxgc.model.static_shapes.type_inference import static_type

MAX_UNROLLED_OPERATORS = 100_000
"""Longer graphs are too slow to plan and to load into a session."""


def check_unrolled(node: Node, steps: int, operators: int) -> None:
    """Checks the number of operators that unrolling adds to a model.

    Raises:
        UnsupportedOperatorError: it exceeds `MAX_UNROLLED_OPERATORS` with the steps of this node.
    """
    if operators > MAX_UNROLLED_OPERATORS:
        raise UnsupportedOperatorError(
            f"{node.location} has {steps} steps; unrolled, the model would have at least {operators} "
            f"operators, over the limit of {MAX_UNROLLED_OPERATORS}; export it for shorter sequences, or "
            "pass --input-shapes with fewer steps"
        )


class ControlFlow:
    """Lowers control flow during a shape walk, which knows conditions, trip counts and lengths."""

    def __init__(self, walk: ShapeWalk, draft: Draft) -> None:
        self._walk = walk
        self._opset = draft.opset
        self._tensors = outer_names(draft)
        self._node_names = {node.name for node in draft.nodes}
        self._unrolled = 0

    def inline_branch(self, node: Node) -> bool:
        """Whether the node is an If with a known condition; visits the taken branch in that case."""
        if node.domain or node.op != "If":
            return False
        condition = self._walk.value(node.inputs[0])
        if condition is None or condition.size != 1:
            return False
        branch = node.attribute("then_branch" if condition.all() else "else_branch")
        for source, output in zip(self._inline(branch, (), node, ""), node.outputs, strict=True):
            self._bind(node, source, output)
        return True

    def unroll(self, node: Node) -> bool:
        """Whether the node is a Loop or Scan of known length; visits all of its steps in that case."""
        if node.domain:
            return False
        if node.op == "Loop":
            return self._unroll_loop(node)
        return node.op == "Scan" and self._unroll_scan(node)

    def _unroll_loop(self, node: Node) -> bool:
        body: onnx.GraphProto = node.attribute("body")
        count, condition = (*node.inputs, "", "")[:2]
        limit = self._scalar(count)
        continues = self._scalar(condition)
        if (count and limit is None) or (condition and continues is None):
            return False
        if (continues is None or continues) and self._stays_true(body):
            if limit is None:
                raise UnsupportedOperatorError(f"{node.location} never ends: its condition stays true; give it a count")
            check_unrolled(node, int(limit), int(limit) * max(len(body.node), 1))
        state = list(node.inputs[2:])
        rows: list[list[str]] = []
        while (continues is None or continues) and (limit is None or len(rows) < limit):
            step = len(rows)
            self._count(node, body, step + 1, 1)
            prefix = f"{node.name}/step{step}/"
            number = self._new_constant(f"{prefix}number", np.asarray(step, np.int64))
            is_running = self._new_constant(f"{prefix}condition", np.asarray(True))
            after, *outputs = self._inline(body, (number, is_running, *state), node, prefix)
            continues = self._scalar(after)
            if continues is None:
                return False
            state = outputs[: len(state)]
            rows.append(outputs[len(state) :])
        declared = [value.type for value in body.output[1 + len(state) :]]
        columns = _columns(rows, [0] * len(declared))
        return self._bind_outputs(node, state, columns, [0] * len(declared), declared)

    def _unroll_scan(self, node: Node) -> bool:
        body: onnx.GraphProto = node.attribute("body")
        scanned = int(node.attribute("num_scan_inputs"))
        state = list(node.inputs[:-scanned])
        self._check_length(node, body)
        slices = self._scan_slices(node, node.inputs[-scanned:])
        if slices is None:
            return False
        steps, longest = (choose(map(len, slices)) for choose in (min, max))
        if steps < longest:
            raise ShapeError(
                f"{node.location} scans inputs of {steps} and {longest} elements; their lengths must be equal"
            )
        self._count(node, body, steps, steps)
        rows: list[list[str]] = []
        for step, parts in enumerate(zip(*slices, strict=True)):
            outputs = self._inline(body, (*state, *parts), node, f"{node.name}/step{step}/")
            state = outputs[: len(state)]
            rows.append(outputs[len(state) :])
        declared = [value.type for value in body.output[len(state) :]]
        axes, backward = (
            node.attribute(f"scan_output_{setting}") or [0] * len(declared) for setting in ("axes", "directions")
        )
        return self._bind_outputs(node, state, _columns(rows, backward), axes, declared)

    def _stays_true(self, body: onnx.GraphProto) -> bool:
        """Whether a Loop's body passes its condition on, or returns a constant that is true."""
        copies = {proto.output[0]: proto.input[0] for proto in body.node if proto.op_type == "Identity" and proto.input}
        name = body.output[0].name
        for _ in copies:
            name = copies.get(name, name)
        value = self._scalar(name)
        return name == body.input[1].name or (value is not None and bool(value))

    def _check_length(self, node: Node, body: onnx.GraphProto) -> None:
        """Checks the steps of a Scan before its inputs are cut into slices."""
        kind = self._walk.type_of(node.inputs[-1])
        axis = int((node.attribute("scan_input_axes") or [0])[-1])
        if kind is not None:
            if not -len(kind.shape) <= axis < len(kind.shape):
                raise ShapeError(f"{node.location} scans axis {axis} of an input of shape {list(kind.shape)}")
            check_unrolled(node, kind.shape[axis], kind.shape[axis] * max(len(body.node), 1))

    def _count(self, node: Node, body: onnx.GraphProto, steps: int, added: int) -> None:
        self._unrolled += added * max(len(body.node), 1)
        check_unrolled(node, steps, self._unrolled)

    def _scan_slices(self, node: Node, sources: Sequence[str]) -> list[list[str]] | None:
        """For each scanned input its slices in the order of the steps; None without a static shape."""
        axes, backward = (
            node.attribute(f"scan_input_{setting}") or [0] * len(sources) for setting in ("axes", "directions")
        )
        slices: list[list[str]] = []
        for source, axis, is_backward in zip(sources, axes, backward, strict=True):
            parts = self._slices(node, source, int(axis))
            if parts is None:
                return None
            slices.append(parts[::-1] if is_backward else parts)
        return slices

    def _bind_outputs(
        self,
        node: Node,
        state: Sequence[str],
        columns: Sequence[Sequence[str]],
        axes: Sequence[int],
        declared: Sequence[onnx.TypeProto],
    ) -> bool:
        """Computes the node's outputs: the last states, and the stacked outputs of all steps.

        Returns whether that was possible: without any step, an output needs a declared static shape.
        """
        outputs = node.outputs
        stacked = list(zip(outputs[len(state) :], columns, axes, declared, strict=False))
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
        """The slices of a tensor along an axis, each without that axis."""
        kind = self._walk.type_of(source)
        if kind is None:
            return None
        axis %= len(kind.shape)
        count = kind.shape[axis]
        if count == 0:
            return []
        names = [self._fresh(f"{node.name}/step{step}/{source}") for step in range(count)]
        parts = [source]
        if count > 1:
            parts = [self._fresh(f"{name}_kept") for name in names]
            self._emit(node, "Split", [source], parts, "split", [1] * count, axis=axis)
        for part, name in zip(parts, names, strict=True):
            self._emit(node, "Squeeze", [part], [name], "axes", [axis])
        return names

    def _stack(self, node: Node, parts: Sequence[str], output: str, axis: int) -> None:
        kind = self._walk.type_of(parts[0])
        if axis < 0:
            axis += len(kind.shape) + 1 if kind is not None else 0
        is_single = len(parts) == 1
        wide = [output] if is_single else [self._fresh(f"{output}_{index}") for index in range(len(parts))]
        for part, name in zip(parts, wide, strict=True):
            self._emit(node, "Unsqueeze", [part], [name], "axes", [axis])
        if not is_single:
            self._emit(node, "Concat", wide, [output], axis=axis)

    def _emit(
        self,
        source: Node,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        setting: str = "",
        values: Sequence[int] = (),
        **attributes: int | list[int],
    ) -> None:
        """Visits a new operator; its setting becomes an input or an attribute, depending on the opset."""
        if setting and self._opset >= SETTINGS_AS_INPUTS:
            constant = self._new_constant(f"{source.name}/{setting}", np.asarray(values, np.int64))
            inputs = (*inputs, constant)
        elif setting:
            attributes[setting] = list(values)
        name = fresh_name(f"{source.name}/{op}_{outputs[0]}", self._node_names)
        self._walk.visit(source.as_operator(op, inputs, outputs, name, **attributes))

    def _bind(self, node: Node, source: str, output: str) -> None:
        if output:
            self._emit(node, "Identity", [source], [output])

    def _scalar(self, name: str) -> Array | None:
        value = self._walk.value(name) if name else None
        return value.reshape(()) if value is not None and value.size == 1 else None

    def _inline(self, graph: onnx.GraphProto, given: Iterable[str], node: Node, prefix: str) -> list[str]:
        """Visits a copy of a body with these inputs; returns the outer names of its outputs."""
        names = dict(zip((value.name for value in graph.input), given, strict=True))
        for proto in graph.node:
            for output in filter(None, proto.output):
                names[output] = self._outer_name(output, node, prefix, self._tensors)
            inner = outer_node(proto, names)
            name = proto.name or f"{proto.op_type}_{next(filter(None, proto.output), 'node')}"
            name = self._outer_name(name, node, prefix, self._node_names)
            self._walk.visit(inner.with_changes(name=name, origin=name))
        return [names.get(value.name, value.name) for value in graph.output]

    def _outer_name(self, name: str, node: Node, prefix: str, taken: set[str]) -> str:
        """A free outer name for a name of a body; names of a branch stay unchanged where they are free."""
        wanted = prefix + name if prefix or name not in taken else f"{node.name}/{name}"
        return fresh_name(wanted, taken)

    def _new_constant(self, wanted: str, value: Array) -> str:
        return self._walk.add_fresh_constant(self._fresh(wanted), value)

    def _fresh(self, wanted: str) -> str:
        return fresh_name(wanted, self._tensors)


def _columns(rows: Sequence[Sequence[str]], backward: Sequence[int]) -> list[list[str]]:
    """For each output of a step the parts to stack; `rows` has the outputs by step."""
    return [
        [row[index] for row in (reversed(rows) if is_backward else rows)] for index, is_backward in enumerate(backward)
    ]


def outer_node(proto: onnx.NodeProto, names: Mapping[str, str]) -> Node:
    """A body's node as a node of the outer graph; `names` maps its tensors to their outer names."""
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


def _empty(declared: onnx.TypeProto, axis: int) -> Array | None:
    """The stacked output of a loop without steps; None if the body declares no static shape."""
    kind = static_type(declared)
    if kind is None:
        return None
    shape = list(kind.shape)
    shape.insert(axis % (len(shape) + 1), 0)
    return np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind.dtype))
