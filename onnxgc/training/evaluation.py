"""A model's loss and outputs in inference mode, as a function of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import onnx
from onnx import helper

from onnxgc.api.pipeline import ReadOptions, read_again
from onnxgc.model.export import to_proto
from onnxgc.model.ir import Array, TensorType, TrainableModel


def evaluation_model(
    source: str | os.PathLike[str] | onnx.ModelProto,
    options: ReadOptions,
    shapes: Mapping[str, tuple[int, ...]],
) -> TrainableModel:
    """The model with running statistics and without Dropout, ending in the loss that it is trained by."""
    read = replace(options, freeze_bn=True, optimizer=None)
    model = read_again(source, read, shapes)
    nodes = tuple(
        node.with_changes(op="Identity", inputs=node.inputs[:1], outputs=node.outputs[:1], attributes={})
        if node.op == "Dropout" and not node.domain
        else node
        for node in model.nodes
    )
    return replace(model, nodes=nodes)


def evaluation_graph(
    model: TrainableModel, inputs: Iterable[str], values: Mapping[str, Array]
) -> tuple[onnx.ModelProto, dict[str, TensorType]]:
    """The graph whose weights are `inputs` where it reads them, and the types of its outputs.

    `values` replaces the contents of other weights by name.
    """
    read = {name for node in model.nodes for name in node.inputs}
    fed = [name for name in inputs if name in model.weights and name in read]
    rest = {name: weight for name, weight in model.weights.items() if name not in fed}
    proto = to_proto(replace(model, weights=rest), values)
    proto.graph.input.extend(
        helper.make_tensor_value_info(name, model.types[name].dtype, model.types[name].shape) for name in fed
    )
    listed = {*fed}
    infos = [value for value in proto.graph.value_info if value.name not in listed]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(infos)
    return proto, {value.name: model.types[value.name] for value in proto.graph.output}
