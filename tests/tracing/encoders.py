"""Small networks of repeated layers, with three styles of names."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH, TOKENS, WIDTH = 2, 4, 8
Names = Callable[[int, str], str]


def dotted(layer: int, part: str) -> str:
    return f"encoder.layers.{layer}.{part}"


def by_torchscript(layer: int, part: str) -> str:
    return f"/encoder/encoder.layers.{layer}/{part}/{part}_output_0"


def numbered(layer: int, part: str) -> str:
    """Names without paths: only parameters have them."""
    return f"{part}_{layer}"


def encoder(layers: int = 3, names: Names = dotted, normalised: bool = True) -> onnx.ModelProto:
    """Layers of attention and two products, each with a residual connection, then four logits."""
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def node(op: str, output: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [output], name="", **attributes))
        return output

    def weight(name: str, *shape: int) -> str:
        values = np.random.default_rng(len(weights)).standard_normal(shape).astype(np.float32)
        weights.append(numpy_helper.from_array(values, name))
        return name

    tensor = node("MatMul", "embedded", "x", weight("embedding", WIDTH, WIDTH))
    for layer in range(layers):

        def made(op: str, part: str, *inputs: str, layer: int = layer, **attributes: Any) -> str:
            return node(op, names(layer, part), *inputs, **attributes)

        def own(part: str, *shape: int, layer: int = layer) -> str:
            return weight(dotted(layer, f"{part}.weight"), *shape)

        def normal(part: str, read: str, layer: int = layer) -> str:
            if not normalised:
                return made("Tanh", part, read)
            return made("LayerNormalization", part, read, own(part, WIDTH), own(f"{part}.shift", WIDTH))

        read = normal("norm1", tensor)
        query, key, value = (made("MatMul", part, read, own(part, WIDTH, WIDTH)) for part in ("query", "key", "value"))
        scores = made("MatMul", "scores", query, made("Transpose", "turned", key, perm=[0, 2, 1]))
        attended = made("MatMul", "attended", made("Softmax", "softmax", scores, axis=-1), value)
        tensor = made("Add", "added", tensor, made("MatMul", "out", attended, own("out", WIDTH, WIDTH)))
        wide = made("MatMul", "wide", normal("norm2", tensor), own("wide", WIDTH, 2 * WIDTH))
        narrow = made("MatMul", "narrow", made("Relu", "relu", wide), own("narrow", 2 * WIDTH, WIDTH))
        tensor = made("Add", "result", tensor, narrow)
    node("ReduceMean", "pooled", tensor, axes=[1], keepdims=0)
    node("MatMul", "logits", "pooled", weight("head", WIDTH, 4))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, TOKENS, WIDTH])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [BATCH, 4])]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
