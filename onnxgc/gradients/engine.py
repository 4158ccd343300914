"""Reverse-mode differentiation of a `TrainableModel`, one rule an operator.

A rule sees its node through a `GradientContext`: it asks for forward tensors (`x`, `y`) and for
the incoming gradient (`dy`), emits standard operators and gives each wanted input its gradient.
What backward reads of forward is not declared anywhere: it is what the emitted nodes take.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxgc.errors import NoParametersError, UnsupportedOperatorError
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel

Rule = Callable[["GradientContext"], None]
ExtraOutputs = Callable[[Node, TrainableModel], Sequence[tuple[str, TensorType]]]


@dataclass(frozen=True, slots=True)
class BackwardChunk:
    """The nodes that produce one input gradient of one forward node, sums of gradients included.

    `source` is the forward node's name. Chunks are the grain at which backward is ordered.
    """

    source: str
    nodes: tuple[Node, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Forward and backward of one model in one order.

    `forward` are the model's nodes in the order asked for, with the extra outputs that rules
    need (MaxPool's indices, LayerNormalization's statistics). `gradient_of` maps a tensor to its
    gradient; `seed` is the fed scalar that stands for the gradient of the loss itself.
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
        made = {name for node in self.backward for name in node.outputs}
        seen = dict.fromkeys(name for node in chunk.nodes for name in node.inputs if name)
        return tuple(
            name for name in seen if name not in made and name not in self.constants and name != self.seed
        )


class ConstantPool:
    """Constants of the backward pass, each distinct value once."""

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


def fresh_name(wanted: str, taken: set[str]) -> str:
    """`wanted`, or with the first free number behind it; the result is added to `taken`."""
    name, suffix = wanted, 2
    while name in taken:
        name, suffix = f"{wanted}_{suffix}", suffix + 1
    taken.add(name)
    return name


@dataclass(slots=True)
class GradientContext:
    """What a gradient rule may ask and do; made anew for each node."""

    node: Node
    types: Mapping[str, TensorType]
    constant_of: Callable[[str], Array | None]
    wanted: frozenset[int]
    incoming: Mapping[int, str]
    constants: ConstantPool
    taken: set[str]
    opset: int
    casts_of_bools: Mapping[str, Node]
    chunks: list[tuple[int, str, list[Node]]] = field(default_factory=list)
    _pending: list[Node] = field(default_factory=list)

    # -- what a rule may ask ------------------------------------------------------------------

    def x(self, index: int) -> str:
        """Forward input `index`, as a tensor that backward reads.

        A mask that forward has cast is cast again: the one of bools takes less memory until then.
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

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attribute(name, default)

    # -- what a rule may do -------------------------------------------------------------------

    def emit(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add one operator with one output; returns the output's name."""
        return self.emit_many(op, inputs, 1, **attributes)[0]

    def emit_many(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> tuple[str, ...]:
        base = f"{self.node.outputs[0]}_grad/{op}"
        outputs = tuple(fresh_name(base, self.taken) for _ in range(count))
        name = f"{self.node.name}/grad/{outputs[0].rsplit('/', 1)[1]}"
        self._pending.append(Node(op, tuple(inputs), outputs, attributes, name, self.node.name))
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
        """Gradient of input `index`. Whatever was emitted since the last call belongs to it."""
        self.chunks.append((index, gradient, self._pending))
        self._pending = []


def needs_gradient(model: TrainableModel, rules: Mapping[str, Rule], stops: frozenset[str]) -> frozenset[str]:
    """Floating tensors that depend on a parameter through differentiable operators.

    Raises:
        UnsupportedOperatorError: naming every node on such a path that has no rule.
        NoParametersError: if no parameter reaches the loss.
    """
    useful = _ancestors_of(model, model.loss)
    active = set(model.parameters)
    missing: list[Node] = []
    for node in model.nodes:
        if node.once or node.rule in stops or not node.rule:
            continue
        if not any(name in active for name in reads_of(node)):
            continue
        floating = [name for name in node.outputs if name and model.types[name].is_floating]
        if not floating:
            continue
        if node.rule not in rules and any(name in useful for name in floating):
            missing.append(node)
        # Also behind a missing rule, so that one message names all of them.
        active.update(floating)
    if missing:
        raise UnsupportedOperatorError(_missing_rules(missing))
    if model.loss not in active:
        stopping = [
            node.place
            for node in model.nodes
            if not useful.isdisjoint(node.outputs)
            and not active.isdisjoint(reads_of(node))
            and active.isdisjoint(node.outputs)
        ]
        if stopping:
            raise NoParametersError(
                f"no trainable parameter reaches the loss '{model.loss}': the gradient stops at "
                f"{_first(stopping)}, which has whole numbers or steps as its result; take the loss of what "
                "goes into it"
            )
        raise NoParametersError(
            f"no trainable parameter reaches the loss '{model.loss}'; "
            "run `onnxgc inspect` to see how each weight was taken, and name some with --trainable"
        )
    return frozenset(active & useful)


def _missing_rules(nodes: Sequence[Node]) -> str:
    by_rule: dict[str, list[str]] = {}
    for node in nodes:
        by_rule.setdefault(node.rule, []).append(node.named)
    listed = "; ".join(
        f"{rule} at {_first(list(dict.fromkeys(names)))}" for rule, names in sorted(by_rule.items())
    )
    return (
        f"no gradient rule for: {listed}; rewrite these operators in supported ones, "
        "or pass --freeze so that no parameter before them trains"
    )


def _first(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _ancestors_of(model: TrainableModel, tensor: str) -> set[str]:
    useful = {tensor}
    for node in reversed(model.nodes):
        if any(name in useful for name in node.outputs):
            useful.update(reads_of(node))
    return useful


def differentiate(
    model: TrainableModel,
    rules: Mapping[str, Rule],
    stops: frozenset[str],
    *,
    extra_outputs: Mapping[str, ExtraOutputs],
    seed: str,
    order: Sequence[str] | None = None,
) -> Differentiated:
    """Backward pass of `model`, in the reverse of `order` (node names; default: the model's own).

    Contributions to one tensor's gradient are added as they arrive, so that at most one partial
    sum is held. The gradient of tensor `t` is named `t_grad`. `extra_outputs` gives, by rule, a
    node's outputs behind the first that the rule reads.
    """
    active = needs_gradient(model, rules, stops)
    by_name = {node.name: node for node in model.nodes}
    forward = [by_name[name] for name in order] if order is not None else list(model.nodes)
    extra_types: dict[str, TensorType] = {}
    for position, node in enumerate(forward):
        if node.rule in extra_outputs and any(name in active for name in node.outputs):
            extra = dict(extra_outputs[node.rule](node, model))
            outputs = (node.outputs[0], *extra, *node.outputs[1 + len(extra) :])
            forward[position] = node.with_changes(outputs=outputs)
            extra_types.update((name, kind) for name, kind in extra.items() if name not in node.outputs)

    taken = {name for node in forward for name in (*node.inputs, *node.outputs)} | set(model.types) | {seed}
    final_names = {name: fresh_name(f"{name}_grad", taken) for name in active if name != model.loss}
    constants = ConstantPool(taken)
    types = {**model.types, **extra_types}
    casts_of_bools = {
        node.outputs[0]: node
        for node in forward
        if node.op == "Cast" and not node.domain and types[node.inputs[0]].dtype == TensorProto.BOOL
    }
    gradient_of: dict[str, str] = {model.loss: seed}
    chunks: list[BackwardChunk] = []
    given_in: dict[str, int] = {}
    for node in reversed(forward):
        incoming = {
            index: gradient_of[name]
            for index, name in enumerate(node.outputs)
            if name in active and name in gradient_of
        }
        if not incoming or node.once or node.rule not in rules:
            continue
        wanted = frozenset(index for index, name in enumerate(node.inputs) if name in active)
        context = GradientContext(
            node,
            types,
            model.constant,
            wanted,
            incoming,
            constants,
            taken,
            model.opset,
            casts_of_bools,
        )
        rules[node.rule](context)
        _check_given(context)
        for index, gradient, nodes in context.chunks:
            target = node.inputs[index]
            if target in gradient_of:
                nodes, gradient = _add_to(context, target, gradient_of[target], gradient, nodes)
            gradient_of[target] = gradient
            given_in[target] = len(chunks)
            chunks.append(BackwardChunk(node.name, tuple(nodes), (gradient,)))
    chunks = _name_gradients(model, chunks, gradient_of, given_in, final_names)
    return Differentiated(
        tuple(forward), tuple(chunks), dict(constants.values), extra_types, gradient_of, seed
    )


def _check_given(context: GradientContext) -> None:
    """A gradient that a rule leaves out must not pass for one of zero."""
    node = context.node
    left_out = sorted(context.wanted - {index for index, _, _ in context.chunks})
    if left_out:
        raise UnsupportedOperatorError(
            f"{node.place} has no gradient rule for its input {left_out[0]} "
            f"('{node.inputs[left_out[0]]}'), which depends on a parameter; freeze that parameter, or leave "
            "it out of --trainable"
        )


def _add_to(
    context: GradientContext, target: str, partial: str, gradient: str, nodes: Sequence[Node]
) -> tuple[list[Node], str]:
    total = fresh_name(f"{target}_grad/sum", context.taken)
    # With the target in its name: one forward node may add to the gradients of several tensors.
    name = f"{context.node.name}/grad/{total}"
    add = Node("Add", (partial, gradient), (total,), {}, name, context.node.name)
    return [*nodes, add], total


def _name_gradients(
    model: TrainableModel,
    chunks: list[BackwardChunk],
    gradient_of: dict[str, str],
    given_in: Mapping[str, int],
    final_names: Mapping[str, str],
) -> list[BackwardChunk]:
    """Call the gradient of `t` `t_grad`.

    One tensor may be the gradient of several (Add passes its own on); the first has the name, and
    parameters come first. A parameter's gradient that has no name of its own is copied, since it
    is an output.
    """
    made = {name for chunk in chunks for node in chunk.nodes for name in node.outputs}
    new_name: dict[str, str] = {}
    copies: dict[int, list[Node]] = {}
    parameters = set(model.parameters)
    for target in sorted(given_in, key=lambda name: name not in parameters):
        gradient, final = gradient_of[target], final_names[target]
        if gradient in made and gradient not in new_name:
            new_name[gradient] = final
            gradient_of[target] = final
        elif target in parameters:
            source = chunks[given_in[target]].source
            copy = Node("Identity", (gradient,), (final,), {}, f"{source}/grad/copy/{final}", source)
            copies.setdefault(given_in[target], []).append(copy)
            gradient_of[target] = final
    for target, gradient in gradient_of.items():
        gradient_of[target] = new_name.get(gradient, gradient)

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new_name.get(name, name) for name in names)

    def with_final_names(node: Node) -> Node:
        if new_name.keys().isdisjoint((*node.inputs, *node.outputs)):
            return node
        return node.with_changes(inputs=renamed(node.inputs), outputs=renamed(node.outputs))

    return [
        BackwardChunk(
            chunk.source,
            tuple(map(with_final_names, (*chunk.nodes, *copies.get(index, ())))),
            renamed(chunk.gradients),
        )
        for index, chunk in enumerate(chunks)
    ]
