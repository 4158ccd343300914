"""Huge graphs: Llama, and chains and ResNets of any number of operators, with weights filled or in sparse files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from scripts.networks.builder import Builder
from scripts.networks.llama import LLAMA_8B, LLAMA_70B, Llama, llama
from scripts.networks.residual import resnet

_OPSET, _IR_VERSION = 17, 9
_NODES_OF_BOTTLENECK = 10
DATA_FILE = "weights.bin"


def llama_model(sizes: Llama) -> onnx.ModelProto:
    """Tokens [1, tokens] to logits, at sequence length `sizes.tokens`."""
    net = Builder()
    llama(net, "x", sizes)
    return _model(net, TensorProto.INT64, [1, sizes.tokens], [1, sizes.tokens, sizes.vocabulary])


def chain_model(operators: int) -> onnx.ModelProto:
    """A chain of linear layers and activations."""
    net, x = Builder(), "x"
    for index in range(operators // 2):
        x = net.relu(net.linear(x, f"fc{index}", (8, 8)), f"relu{index}")
    return _model(net, TensorProto.FLOAT, [2, 8], [2, 8])


def resnet_model(operators: int) -> onnx.ModelProto:
    """A ResNet with bottlenecks, almost all in the third stage."""
    net = Builder()
    resnet(net, "x", (3, 4, max(operators // _NODES_OF_BOTTLENECK - 10, 1), 3), bottleneck=True)
    return _model(net, TensorProto.FLOAT, [1, 3, 64, 64], [1, 1000])


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "llama_8b": partial(llama_model, LLAMA_8B),
    "llama_70b": partial(llama_model, LLAMA_70B),
    **{f"llama_70b_{n}": partial(llama_model, replace(LLAMA_70B, layers=n)) for n in (10, 20, 40)},
    **{f"chain_{n}": partial(chain_model, n) for n in (6_250, 12_500, 25_000, 50_000)},
    **{f"resnet_{n}": partial(resnet_model, n) for n in (6_250, 12_500, 25_000, 50_000)},
}


def write(model: onnx.ModelProto, folder: Path, *, is_external: bool = False) -> Path:
    """Writes a light model; or with its parameters as external data in a file of holes."""
    if is_external:
        _move_to_external(model, folder)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _move_to_external(model: onnx.ModelProto, folder: Path) -> None:
    graph = model.graph
    shapes = {
        tensor.name: numpy_helper.to_array(tensor).tolist()
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.INT64
    }
    filled = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    offset = 0
    for node in filled:
        tensor = graph.initializer.add(name=node.output[0], data_type=TensorProto.FLOAT, dims=shapes[node.input[0]])
        tensor.data_location = TensorProto.EXTERNAL
        size = 4
        for dimension in tensor.dims:
            size *= dimension
        for key, value in {"location": DATA_FILE, "offset": offset, "length": size}.items():
            tensor.external_data.add(key=key, value=str(value))
        offset += -(-size // 4096) * 4096
    with open(folder / DATA_FILE, "wb") as file:
        file.truncate(offset)
    del graph.node[:]
    graph.node.extend(kept)


def _model(net: Builder, kind: int, given: list[int], result: list[int]) -> onnx.ModelProto:
    net.nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        net.parameters + net.nodes,
        "huge",
        [helper.make_tensor_value_info("x", kind, given)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, result)],
        initializer=list(net.initializers.values()),
    )
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=[opset])
