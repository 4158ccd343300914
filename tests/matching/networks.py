"""Networks of random blocks, and changes to a model with known correspondences of tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH, CHANNELS, EXTENT, TOKENS = 2, 4, 6, 5


@dataclass
class Network:
    """Builds a graph; weights are parameters with random elements."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=f"n_{output}", **attributes))
        return output

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        values = np.random.default_rng(len(self.weights)).standard_normal(shape).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def ones(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
        return name

    def constant(self, value: float) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def ints(self, *values: int) -> str:
        name = f"i{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def model(self, output: str, shape: Sequence[int], out: Sequence[int]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, out)],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _convolution(net: Network, x: str) -> str:
    weight = net.weight(CHANNELS, CHANNELS, 3, 3)
    return net.node("Relu", net.node("Conv", x, weight, net.weight(CHANNELS), pads=[1, 1, 1, 1]))


def _normalized(net: Network, x: str) -> str:
    y = net.node("Conv", x, net.weight(CHANNELS, CHANNELS, 1, 1))
    statistics = [net.weight(CHANNELS) for _ in range(4)]
    return net.node("Sigmoid", net.node("BatchNormalization", y, *statistics))


def _residual(net: Network, x: str) -> str:
    return net.node("Add", x, _convolution(net, _convolution(net, x)))


def _composed(net: Network, x: str) -> str:
    """An activation of two operators, the first of which exists in this spelling only."""
    y = net.node("Relu", net.node("Conv", x, net.weight(CHANNELS, CHANNELS, 1, 1)))
    limited = net.node("Min", y, net.constant(6))
    return net.node("Add", x, net.node("Conv", limited, net.weight(CHANNELS, CHANNELS, 3, 3), pads=[1] * 4))


def _twins(net: Network, x: str) -> str:
    """Two equal branches."""
    return net.node("Add", _convolution(net, x), _convolution(net, x))


def _ordered_twins(net: Network, x: str) -> str:
    """Two branches that only the order of a subtraction distinguishes."""
    return net.node("Sub", _convolution(net, x), _convolution(net, x))


def _concatenated(net: Network, x: str) -> str:
    both = net.node("Concat", _convolution(net, x), net.node("Tanh", x), axis=1)
    return net.node("Conv", both, net.weight(CHANNELS, 2 * CHANNELS, 1, 1))


def _shuffled_channels(net: Network, x: str) -> str:
    parts = net.node("Reshape", x, net.ints(BATCH, 2, CHANNELS // 2, EXTENT, EXTENT))
    transposed = net.node("Transpose", parts, perm=[0, 2, 1, 3, 4])
    return _convolution(net, net.node("Reshape", transposed, net.ints(BATCH, CHANNELS, EXTENT, EXTENT)))


def _linear(net: Network, x: str) -> str:
    return net.node("Add", net.node("MatMul", x, net.weight(CHANNELS, CHANNELS)), net.weight(CHANNELS))


def _attention(net: Network, x: str) -> str:
    query, key, value = (_linear(net, x) for _ in range(3))
    scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
    mixed = net.node("MatMul", net.node("Softmax", net.node("Mul", scores, net.constant(0.5))), value)
    return net.node("Add", x, _linear(net, mixed))


def _packed_attention(net: Network, x: str) -> str:
    packed = net.node("MatMul", x, net.weight(CHANNELS, 3 * CHANNELS))
    packed = net.node("Add", packed, net.weight(3 * CHANNELS))
    parts = net.node("Reshape", packed, net.ints(BATCH, TOKENS, 3, CHANNELS))
    query, key, value = (
        net.node("Squeeze", net.node("Gather", parts, net.ints(index), axis=2), net.ints(2)) for index in range(3)
    )
    scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
    return net.node("Add", x, net.node("MatMul", net.node("Softmax", scores), value))


def _perceptron(net: Network, x: str) -> str:
    y = net.node("LayerNormalization", x, net.weight(CHANNELS), net.weight(CHANNELS), axis=-1)
    return net.node("Add", x, _linear(net, net.node("Tanh", _linear(net, y))))


Block = Callable[[Network, str], str]
IMAGE_BLOCKS: Mapping[str, Block] = {
    "convolution": _convolution,
    "normalized": _normalized,
    "residual": _residual,
    "composed": _composed,
    "twins": _twins,
    "ordered twins": _ordered_twins,
    "concatenated": _concatenated,
    "shuffled channels": _shuffled_channels,
}
TOKEN_BLOCKS: Mapping[str, Block] = {
    "attention": _attention,
    "packed attention": _packed_attention,
    "perceptron": _perceptron,
    "linear": _linear,
}


def network(blocks: Sequence[str]) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """A network of blocks, all of images or all of tokens, and the first and last tensor of each block."""
    net, x, ends = Network(), "x", []
    is_image = blocks[0] in IMAGE_BLOCKS
    known = IMAGE_BLOCKS if is_image else TOKEN_BLOCKS
    for name in blocks:
        y = known[name](net, x)
        ends.append((x, y))
        x = y
    axes = (2, 3) if is_image else (1,)
    pooled = net.node("ReduceMean", x, net.ints(*axes), keepdims=0)
    output = net.node("Gemm", pooled, net.weight(CHANNELS, 3), net.weight(3))
    shape = (BATCH, CHANNELS, EXTENT, EXTENT) if is_image else (BATCH, TOKENS, CHANNELS)
    return net.model(output, shape, (BATCH, 3)), ends


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
    dependent, inside = {start}, []
    for node in graph.node:
        if not dependent.isdisjoint(node.input):
            dependent.update(node.output)
    needed = {end}
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output) and not dependent.isdisjoint(node.output):
            inside.append(node)
            needed.update(name for name in node.input if name != start)
    copied = {output for node in inside for output in node.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    made = {node.output[0]: node for node in graph.node if node.op_type == "ConstantOfShape"}
    names: dict[str, str] = {start: end}
    copies: list[onnx.NodeProto] = []
    for node in reversed(inside):
        for name in (*node.input, *node.output):
            if name in tensors and name not in names:
                copy = onnx.TensorProto()
                copy.CopyFrom(tensors[name])
                copy.name = names[name] = f"{name}_again"
                graph.initializer.append(copy)
            elif name in made and name not in names:
                names[name] = f"{name}_again"
                copies.append(helper.make_node("ConstantOfShape", made[name].input, [names[name]]))
                copies[-1].attribute.extend(made[name].attribute)
            elif name in copied:
                names[name] = f"{name}_again"
        copy_of_node = onnx.NodeProto()
        copy_of_node.CopyFrom(node)
        copy_of_node.name = f"{node.name}_again"
        copy_of_node.input[:] = [names.get(name, name) for name in node.input]
        copy_of_node.output[:] = [names[name] for name in node.output]
        copies.append(copy_of_node)
    last = [node.output[0] for node in graph.node].index(end)
    for node in graph.node[last + 1 :]:
        node.input[:] = [names[end] if name == end else name for name in node.input]
    kept = [*graph.node[: last + 1], *copies, *graph.node[last + 1 :]]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def with_activation(model: onnx.ModelProto, tensor: str, op: str) -> onnx.ModelProto:
    """The model with another operator as producer of a tensor."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    (node,) = [node for node in result.graph.node if tensor in node.output]
    node.op_type = op
    return result


def activations(model: onnx.ModelProto) -> list[str]:
    """The results of activations, which `with_activation` may replace."""
    return [node.output[0] for node in model.graph.node if node.op_type in ("Relu", "Tanh", "Sigmoid")]
