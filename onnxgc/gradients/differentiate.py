"""Reverse-mode differentiation of a `TrainableModel`, with one rule per operator.

A rule sees its node through a `GradientContext`: it reads forward tensors (`x`, `y`) and the incoming
gradient (`dy`), emits standard operators and gives each wanted input its gradient. No rule declares which
forward tensors backward reads: they are the inputs of the emitted nodes.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.active_tensors import active_tensors
from onnxgc.model.core.draft import fresh_name
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel

# Without a limit of its own, a convolution's columns may take this part of the largest activation.
_COLUMN_SHARE = 4
Rule = Callable[["GradientContext"], None]
ExtraOutputs = Callable[[Node, TrainableModel], Sequence[tuple[str, TensorType]]]


@dataclass(frozen=True, slots=True)
class BackwardChunk:
    """The nodes that produce one input gradient of one forward node, sums of gradients included.

    `source` is the forward node's name. Backward is ordered by whole chunks.
    """

    source: str
    nodes: tuple[Node, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DifferentiatedModel:
    """Forward and backward of one model in one order.

    `forward` are the model's nodes in the requested order, with the extra outputs that rules need (MaxPool's
    indices, LayerNormalization's statistics). `gradient_of` maps a tensor to its gradient; `seed` is the fed
    scalar that is the gradient of the loss itself.
    """

    forward: tuple[Node, ...]
    chunks: tuple[BackwardChunk, ...]
    constants: Mapping[str, Array]
    extra_types: Mapping[str, TensorType]
    gradient_of: Mapping[str, str]
    seed: str

    @property
    def backward(self) -> tuple[Node, ...]:
        return tuple(node for chunk in self.chunks for node in chunk.nodes)

    def reads(self, chunk: BackwardChunk) -> tuple[str, ...]:
        """Forward tensors (and weights) that a chunk reads, in order of first use."""
        computed = {name for node in self.backward for name in node.outputs}
        inputs = dict.fromkeys(name for node in chunk.nodes for name in node.inputs if name)
        return tuple(
            name for name in inputs if name not in computed and name not in self.constants and name != self.seed
        )


class ConstantPool:
    """Constants of a graph, with one name for each distinct value."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._name_of: dict[str, str] = {}
        self.values: dict[str, Array] = {}

    def add(self, value: Array) -> str:
        digest = hashlib.sha1(f"{value.dtype.num}{value.shape}".encode() + value.tobytes()).hexdigest()
        if digest not in self._name_of:
            name = fresh_name(f"constant_{len(self.values)}", self._taken)
            self._name_of[digest] = name
            self.values[name] = value
        return self._name_of[digest]


@dataclass(slots=True)
class GradientContext:
    """The interface of a gradient rule to one node: facts about it, and operators to emit.

    `provider` is the execution provider for which forms are chosen, `column_bytes` the temporary memory that
    the gradient of a convolution's weight may take. `is_portable` rules out what some runtimes compute wrongly.
    """

    node: Node
    types: Mapping[str, TensorType]
    constant_of: Callable[[str], Array | None]
    wanted: frozenset[int]
    incoming: Mapping[int, str]
    constants: ConstantPool
    taken: set[str]
    opset: int
    casts_of_bools: Mapping[str, Node]
    provider: str
    column_bytes: int
    is_portable: bool = False
    chunks: list[tuple[int, str, list[Node]]] = field(default_factory=list)
    _pending: list[Node] = field(default_factory=list)

    # -- facts about the node -----------------------------------------------------------------

    def x(self, index: int) -> str:
        """Forward input `index`, as a tensor that backward reads.

        A mask that forward cast is cast again in backward, since its bools need less memory until then.
        """
        name = self.node.inputs[index]
        cast = self.casts_of_bools.get(name)
        return name if cast is None else self.emit("Cast", cast.inputs[0], **cast.attributes)

    def y(self, index: int = 0) -> str:
        """Forward output `index`, as a tensor that backward reads."""
        return self.node.outputs[index]

    @property
    def dy(self) -> str:
        """Gradient of output 0."""
        return self.incoming[0]

    def has_input(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def wants(self, index: int) -> bool:
        return index in self.wanted

    def input_type(self, index: int) -> TensorType:
        return self.types[self.node.inputs[index]]

    def output_type(self, index: int = 0) -> TensorType:
        return self.types[self.node.outputs[index]]

    def input_shape(self, index: int) -> tuple[int, ...]:
        return self.input_type(index).shape

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.output_type(index).shape

    def constant_input(self, index: int) -> Array | None:
        """Value of input `index` if it is a constant of the model, else None."""
        return self.constant_of(self.node.inputs[index]) if self.has_input(index) else None

    def required_constant(self, index: int, what: str) -> Array:
        """Value of the constant input `index`, which messages call `what`.

        Raises:
            UnsupportedOperatorError: the graph computes it.
        """
        value = self.constant_input(index)
        if value is None:
            raise UnsupportedOperatorError(
                f"{self.node.location} computes its {what} in the graph, which has no gradient rule; "
                f"export the model with {what} as a constant"
            )
        return value

    def constant_integers(self, index: int, what: str) -> tuple[int, ...]:
        """Values of the constant input `index`, or () if it is absent; raises like `required_constant`."""
        if not self.has_input(index):
            return ()
        return tuple(int(number) for number in self.required_constant(index, what).reshape(-1))

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attribute(name, default)

    # -- the gradient --------------------------------------------------------------------------

    def emit(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Emits one operator with one output; returns the output's name.

        `op` has its domain if it is not ONNX's own: `com.microsoft::FusedMatMul`.
        """
        return self.emit_many(op, inputs, 1, **attributes)[0]

    def emit_many(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> tuple[str, ...]:
        domain, _, op = op.rpartition("::")
        base = f"{self.node.outputs[0]}_grad/{op}"
        outputs = tuple(fresh_name(base, self.taken) for _ in range(count))
        name = f"{self.node.name}/grad/{outputs[0].rsplit('/', 1)[1]}"
        made = Node(op, tuple(inputs), outputs, attributes, name, self.node.name, domain=domain)
        self._pending.append(made.with_changes(module=self.node.module))
        return outputs

    def ints(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.constants.add(np.asarray(values, np.int64))

    def scalar(self, value: float, like: int = 0) -> str:
        """A constant scalar of the element type of input `like`."""
        return self.tensor(np.asarray(value), like)

    def tensor(self, value: Array, like: int = 0) -> str:
        """A constant tensor, cast to the element type of input `like`."""
        dtype = helper.tensor_dtype_to_np_dtype(self.input_type(like).dtype)
        return self.constants.add(np.ascontiguousarray(value.astype(dtype)).reshape(value.shape))

    def give(self, index: int, gradient: str) -> None:
        """Sets the gradient of input `index`, computed by the operators emitted since the last call."""
        self.chunks.append((index, gradient, self._pending))
        self._pending = []


def differentiate(
    model: TrainableModel,
    rules: Mapping[str, Rule],
    stops: frozenset[str],
    *,
    extra_outputs: Mapping[str, ExtraOutputs],
    seed: str,
    order: Sequence[str] | None = None,
) -> DifferentiatedModel:
    """Backward pass of `model`, in the reverse of `order` (node names; default: the model's own).

    Contributions to a tensor's gradient are added as they arrive, so that at most one partial sum is live.
    The gradient of tensor `t` is named `t_grad`. `extra_outputs` lists, by rule, a node's outputs after the
    first that the rule reads.

    Raises:
        UnsupportedOperatorError: an operator has no rule, or none for an input that needs a gradient.
        NoParametersError: no parameter reaches the loss.
    """
    active = active_tensors(model, rules, stops)
    by_name = {node.name: node for node in model.nodes}
    forward = [by_name[name] for name in order] if order is not None else list(model.nodes)
    forward, extra_types = _with_extra_outputs(model, forward, active, extra_outputs)
    taken = {name for node in forward for name in (*node.inputs, *node.outputs)} | set(model.types) | {seed}
    final_names = {name: fresh_name(f"{name}_grad", taken) for name in active if name != model.loss}
    constants = ConstantPool(taken)
    types = {**model.types, **extra_types}
    casts_of_bools = _casts_of_bools(forward, types)
    computed = (types[name] for node in forward for name in node.outputs if name in types)
    largest = max((kind.size_bytes for kind in computed), default=0)
    backward = _Backward({model.loss: seed})
    for node in reversed(forward):
        incoming = {
            index: backward.gradient_of[name]
            for index, name in enumerate(node.outputs)
            if name in active and name in backward.gradient_of
        }
        if not incoming or node.once or node.rule not in rules:
            continue
        context = GradientContext(
            node,
            types,
            model.constant,
            frozenset(index for index, name in enumerate(node.inputs) if name in active),
            incoming,
            constants,
            taken,
            model.opset,
            casts_of_bools,
            model.provider,
            model.column_bytes.get(node.name, largest // _COLUMN_SHARE),
            model.is_portable,
        )
        rules[node.rule](context)
        _check_complete(context)
        backward.add(context)
    backward.name_gradients(model.parameters, final_names)
    chunks, gradient_of = tuple(backward.chunks), backward.gradient_of
    return DifferentiatedModel(tuple(forward), chunks, dict(constants.values), extra_types, gradient_of, seed)


def _casts_of_bools(nodes: Iterable[Node], types: Mapping[str, TensorType]) -> dict[str, Node]:
    """The Casts of bool tensors, by output."""
    return {
        node.outputs[0]: node
        for node in nodes
        if node.op == "Cast" and not node.domain and types[node.inputs[0]].dtype == TensorProto.BOOL
    }


def _with_extra_outputs(
    model: TrainableModel, forward: Sequence[Node], active: frozenset[str], extra_outputs: Mapping[str, ExtraOutputs]
) -> tuple[list[Node], dict[str, TensorType]]:
    """The forward nodes with the outputs that rules read, and the types of the added outputs."""
    nodes: list[Node] = []
    types: dict[str, TensorType] = {}
    for node in forward:
        if node.rule in extra_outputs and any(name in active for name in node.outputs):
            extra = dict(extra_outputs[node.rule](node, model))
            types.update((name, kind) for name, kind in extra.items() if name not in node.outputs)
            outputs = (node.outputs[0], *extra, *node.outputs[1 + len(extra) :])
            node = node.with_changes(outputs=outputs)
        nodes.append(node)
    return nodes, types


def _check_complete(context: GradientContext) -> None:
    """Raises for a wanted gradient that a rule omits: it would count as zero."""
    node = context.node
    missing = sorted(context.wanted - {index for index, _, _ in context.chunks})
    if missing:
        raise UnsupportedOperatorError(
            f"{node.location} has no gradient rule for its input {missing[0]} "
            f"('{node.inputs[missing[0]]}'), which depends on a parameter; freeze that parameter, or leave "
            "it out of --trainable"
        )


@dataclass(slots=True)
class _Backward:
    """The backward pass under construction: its chunks, and the current gradient of each tensor."""

    gradient_of: dict[str, str]
    chunks: list[BackwardChunk] = field(default_factory=list)
    _last_chunk_of: dict[str, int] = field(default_factory=dict)

    def add(self, context: GradientContext) -> None:
        """Appends the chunks of one node, with sums where a tensor already has a partial gradient."""
        node = context.node
        for index, gradient, nodes in context.chunks:
            target = node.inputs[index]
            if target in self.gradient_of:
                total = fresh_name(f"{target}_grad/sum", context.taken)
                # The target is part of the name: one forward node may add to gradients of several tensors.
                name = f"{node.name}/grad/{total}"
                parts = (self.gradient_of[target], gradient)
                nodes = [*nodes, Node("Add", parts, (total,), {}, name, node.name, module=node.module)]
                gradient = total
            self.gradient_of[target] = gradient
            self._last_chunk_of[target] = len(self.chunks)
            self.chunks.append(BackwardChunk(node.name, tuple(nodes), (gradient,)))

    def name_gradients(self, parameters: Sequence[str], final_names: Mapping[str, str]) -> None:
        """Renames the gradient of each tensor to its final name.

        One tensor may be the gradient of several, since Add passes its own on: the first tensor, parameters
        first, names a shared gradient. Other parameters get an Identity, since each gradient is a separate
        output.
        """
        computed = {name for chunk in self.chunks for node in chunk.nodes for name in node.outputs}
        new_name: dict[str, str] = {}
        copies: dict[int, list[Node]] = {}
        parameter_names = set(parameters)
        for target in sorted(self._last_chunk_of, key=lambda name: name not in parameter_names):
            gradient, final = self.gradient_of[target], final_names[target]
            if gradient in computed and gradient not in new_name:
                new_name[gradient] = final
                self.gradient_of[target] = final
            elif target in parameter_names:
                last = self._last_chunk_of[target]
                source = self.chunks[last].source
                copy = Node("Identity", (gradient,), (final,), {}, f"{source}/grad/copy/{final}", source)
                copies.setdefault(last, []).append(copy)
                self.gradient_of[target] = final
        for target, gradient in self.gradient_of.items():
            self.gradient_of[target] = new_name.get(gradient, gradient)

        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(new_name.get(name, name) for name in names)

        def with_final_names(node: Node) -> Node:
            if new_name.keys().isdisjoint((*node.inputs, *node.outputs)):
                return node
            return node.with_changes(inputs=renamed(node.inputs), outputs=renamed(node.outputs))

        self.chunks = [
            BackwardChunk(
                chunk.source,
                tuple(map(with_final_names, (*chunk.nodes, *copies.get(index, ())))),
                renamed(chunk.gradients),
            )
            for index, chunk in enumerate(self.chunks)
        ]
