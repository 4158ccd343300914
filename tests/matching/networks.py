"""Networks as expressions, `x * (x + 3).Clip(0, 6) / 6`, of random blocks, and changes with known correspondences."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH, CHANNELS, EXTENT, TOKENS = 2, 4, 6, 5
IMAGE, SEQUENCE = (BATCH, CHANNELS, EXTENT, EXTENT), (BATCH, TOKENS, CHANNELS)


@dataclass
class Network:
    """Builds a graph; weights are parameters with random elements."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=f"n_{output}", **attributes))
        return output

    def stored(self, values: Any, dtype: type = np.float32, letter: str = "w") -> str:
        name = f"{letter}{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.stored(np.random.default_rng(len(self.weights)).standard_normal(shape))

    def ones(self, *shape: int) -> str:
        return self.stored(np.ones(shape))

    def constant(self, value: float) -> str:
        return self.stored(value, letter="c")

    def ints(self, *values: int) -> str:
        return self.stored(values, np.int64, "i")

    def model(self, output: str, shape: Sequence[int], out: Sequence[int]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, out)],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A tensor of a network. Its methods are the operators of ONNX, which add nodes.

    Operands are tensors, numbers (float32), sequences (int64), arrays (by a Constant node), or names.
    """

    net: Network
    name: str

    def __getattr__(self, op: str) -> Callable[..., Expr]:
        if not op[0].isupper():
            raise AttributeError(op)
        return lambda *operands, **attributes: apply(self.net, op, self, *operands, **attributes)

    def __add__(self, other: Operand) -> Expr:
        return self.Add(other)

    def __radd__(self, other: Operand) -> Expr:
        return apply(self.net, "Add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return self.Sub(other)

    def __rsub__(self, other: Operand) -> Expr:
        return apply(self.net, "Sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return self.Mul(other)

    def __truediv__(self, other: Operand) -> Expr:
        return self.Div(other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return apply(self.net, "Div", other, self)

    def __matmul__(self, other: Operand) -> Expr:
        return self.MatMul(other)

    def weight(self, *shape: int) -> Expr:
        return Expr(self.net, self.net.weight(*shape))

    def stored(self, *shape: int, seed: int = 0) -> Expr:
        """A new parameter. All parameters of one seed and size have the same elements."""
        return self.parameter(np.random.default_rng(seed).standard_normal(shape))

    def parameter(self, values: np.ndarray) -> Expr:
        return Expr(self.net, self.net.stored(values))


Operand = Expr | float | Sequence[int] | np.ndarray | str
Part = Callable[[Expr], Expr]


def apply(net: Network, op: str, *operands: Operand, **attributes: Any) -> Expr:
    return Expr(net, net.node(op, *(_name(net, operand) for operand in operands), **attributes))


def _name(net: Network, operand: Operand) -> str:
    match operand:
        case Expr():
            return operand.name
        case str():
            return operand
        case np.ndarray():
            return net.node("Constant", value=numpy_helper.from_array(operand))
        case int() | float():
            return net.constant(operand)
    return net.ints(*operand)


def start() -> Expr:
    return Expr(Network(), "x")


def ended(y: Expr, shape: Sequence[int] = IMAGE) -> onnx.ModelProto:
    head = y.ReduceMean([2, 3] if len(shape) == 4 else [1], keepdims=0) @ y.weight(CHANNELS, 3)
    return y.net.model(head.name, shape, (shape[0], 3))


def conv(x: Expr, kernel: int = 1, *, has_bias: bool = False) -> Expr:
    bias = [x.weight(CHANNELS)] if has_bias else []
    return x.Conv(x.weight(CHANNELS, CHANNELS, kernel, kernel), *bias, pads=[kernel // 2] * 4)


def batch_norm(x: Expr, **attributes: Any) -> Expr:
    return x.BatchNormalization(*(x.weight(CHANNELS) for _ in range(4)), **attributes)


def linear(x: Expr) -> Expr:
    return x @ x.weight(CHANNELS, CHANNELS) + x.weight(CHANNELS)


def _convolution(x: Expr) -> Expr:
    return conv(x, 3, has_bias=True).Relu()


def _normalized(x: Expr) -> Expr:
    return batch_norm(conv(x)).Sigmoid()


def _residual(x: Expr) -> Expr:
    return x + _convolution(_convolution(x))


def _composed(x: Expr) -> Expr:
    """An activation of two operators, the first of which exists in this spelling only."""
    return x + conv(conv(x).Relu().Min(6), 3)


def _twins(x: Expr) -> Expr:
    return _convolution(x) + _convolution(x)


def _ordered_twins(x: Expr) -> Expr:
    return _convolution(x) - _convolution(x)


def _concatenated(x: Expr) -> Expr:
    return _convolution(x).Concat(x.Tanh(), axis=1).Conv(x.weight(CHANNELS, 2 * CHANNELS, 1, 1))


def _shuffled_channels(x: Expr) -> Expr:
    parts = x.Reshape([BATCH, 2, CHANNELS // 2, EXTENT, EXTENT]).Transpose(perm=[0, 2, 1, 3, 4])
    return _convolution(parts.Reshape(IMAGE))


def attended(query: Expr, key: Expr, value: Expr, *, factor: float | None = None) -> Expr:
    scores = query @ key.Transpose(perm=[0, 2, 1])
    return (scores if factor is None else scores * factor).Softmax() @ value


def _attention(x: Expr) -> Expr:
    return x + linear(attended(*(linear(x) for _ in range(3)), factor=0.5))


def _packed_attention(x: Expr) -> Expr:
    packed = x @ x.weight(CHANNELS, 3 * CHANNELS) + x.weight(3 * CHANNELS)
    parts = packed.Reshape([BATCH, TOKENS, 3, CHANNELS])
    return x + attended(*(parts.Gather([index], axis=2).Squeeze([2]) for index in range(3)))


def _perceptron(x: Expr) -> Expr:
    y = x.LayerNormalization(x.weight(CHANNELS), x.weight(CHANNELS), axis=-1)
    return x + linear(linear(y).Tanh())


IMAGE_BLOCKS: Mapping[str, Part] = {
    "convolution": _convolution,
    "normalized": _normalized,
    "residual": _residual,
    "composed": _composed,
    "twins": _twins,
    "ordered twins": _ordered_twins,
    "concatenated": _concatenated,
    "shuffled channels": _shuffled_channels,
}
TOKEN_BLOCKS: Mapping[str, Part] = {
    "attention": _attention,
    "packed attention": _packed_attention,
    "perceptron": _perceptron,
    "linear": linear,
}


def network(blocks: Sequence[str]) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """A network of blocks, all of images or all of tokens, and the first and last tensor of each block."""
    x, ends = start(), []
    is_image = blocks[0] in IMAGE_BLOCKS
    for name in blocks:
        y = (IMAGE_BLOCKS if is_image else TOKEN_BLOCKS)[name](x)
        ends.append((x.name, y.name))
        x = y
    return ended(x, IMAGE if is_image else SEQUENCE), ends


def renamed(model: onnx.ModelProto, draw: random.Random) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with new names and its nodes in another order, and the new name of each tensor."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    every = dict.fromkeys(
        [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
        + [name for node in graph.node for name in (*node.input, *node.output) if name]
    )
    numbers = list(range(len(every)))
    draw.shuffle(numbers)
    names = {old: f"v{number}" for old, number in zip(every, numbers, strict=True)}
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names[value.name]
    del graph.value_info[:]
    for node in graph.node:
        node.name = ""
        node.input[:] = [names[name] if name else "" for name in node.input]
        node.output[:] = [names[name] if name else "" for name in node.output]
    ordered = _reordered(list(graph.node), draw)
    del graph.node[:]
    graph.node.extend(ordered)
    return result, names


def _reordered(nodes: Iterable[onnx.NodeProto], draw: random.Random) -> list[onnx.NodeProto]:
    waiting = list(nodes)
    missing = {output for node in waiting for output in node.output}
    ordered = []
    while waiting:
        node = draw.choice([node for node in waiting if missing.isdisjoint(node.input)])
        waiting.remove(node)
        missing -= set(node.output)
        ordered.append(node)
    return ordered


def with_block_twice(model: onnx.ModelProto, start: str, end: str) -> onnx.ModelProto:
    """The model with a copy of the block between two tensors after it, with separate weights."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    dependent: set[str] = {start}
    inside: list[onnx.NodeProto] = []
    for node in graph.node:
        if not dependent.isdisjoint(node.input):
            dependent.update(node.output)
    needed = {end}
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output) and not dependent.isdisjoint(node.output):
            inside.insert(0, node)
            needed.update(name for name in node.input if name != start)
    read = {name for node in inside for name in node.input}
    filled = [node for node in graph.node if node.op_type == "ConstantOfShape" and node.output[0] in read]
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    written = [name for node in (*filled, *inside) for name in node.output]
    names = {name: f"{name}_again" for name in (*written, *(tensor.name for tensor in weights))} | {start: end}
    for tensor in weights:
        graph.initializer.append(onnx.TensorProto.FromString(tensor.SerializeToString()))
        graph.initializer[-1].name = names[tensor.name]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*filled, *inside)]
    for copy in copies:
        copy.name = f"{copy.name}_again"
        copy.input[:] = [names.get(name, name) for name in copy.input]
        copy.output[:] = [names[name] for name in copy.output]
    last = [node.output[0] for node in graph.node].index(end) + 1
    for node in graph.node[last:]:
        node.input[:] = [names[end] if name == end else name for name in node.input]
    nodes = [*graph.node[:last], *copies, *graph.node[last:]]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return result


def with_activation(model: onnx.ModelProto, tensor: str, op: str) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    (node,) = [node for node in result.graph.node if tensor in node.output]
    node.op_type = op
    return result


def activations(model: onnx.ModelProto) -> list[str]:
    return [node.output[0] for node in model.graph.node if node.op_type in ("Relu", "Tanh", "Sigmoid")]
