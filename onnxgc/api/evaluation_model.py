"""A model in evaluation mode, with its loss, as a function of its weights."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import onnx
from onnx import numpy_helper

from onnxgc.api.read_options import ReadOptions, read_with_options
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto


def evaluation_model(
    source: str | os.PathLike[str] | onnx.ModelProto, options: ReadOptions, shapes: Mapping[str, tuple[int, ...]]
) -> TrainableModel:
    """The model with running statistics and without Dropout, ending in the training loss."""
    read = replace(options, freeze_bn=True, optimizer=None)
    model = read_with_options(source, read, shapes)
    nodes = tuple(
        node.with_changes(op="Identity", inputs=node.inputs[:1], outputs=node.outputs[:1], attributes={})
        if node.op == "Dropout" and not node.domain
        else node
        for node in model.nodes
    )
    return replace(model, nodes=nodes)


def evaluation_graph(
    model: TrainableModel, weights: Iterable[str], values: Mapping[str, Array], *, stores_state: bool = False
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The graph of a model, and the names of those of `weights` that it reads, as inputs.

    `values` replaces the contents of other weights by name. With `stores_state` the inputs have first values.
    """
    read = {name for node in model.nodes for name in node.inputs}
    fed = tuple(name for name in weights if name in model.weights and name in read)
    rest = {name: weight for name, weight in model.weights.items() if name not in fed}
    proto = to_proto(replace(model, weights=rest, inputs=(*model.inputs, *fed)), values)
    for name in fed if stores_state else ():
        value = values[name] if name in values else model.weights[name].load()
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return proto, fed
