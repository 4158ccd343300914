"""A model's loss and outputs in inference mode, as a function of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import onnx

from onnxgc.api.pipeline import ReadOptions, read_again
from onnxgc.model.core.ir import Array, TensorType, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from onnxgc.runtime.io_binding import BoundSession


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


@dataclass(frozen=True, slots=True)
class EvaluationGraph:
    """A graph whose weights `held` are inputs, and the types of its outputs."""

    proto: onnx.ModelProto
    held: tuple[str, ...]
    outputs: Mapping[str, TensorType]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model in inference mode: its session, its own outputs, and its loss."""

    session: BoundSession
    outputs: tuple[str, ...]
    loss: str


def evaluation_graph(
    model: TrainableModel, weights: Iterable[str], values: Mapping[str, Array]
) -> EvaluationGraph:
    """The graph of a model that takes those of `weights` that it reads as inputs.

    `values` replaces the contents of its other weights by name.
    """
    read = {name for node in model.nodes for name in node.inputs}
    held = tuple(name for name in weights if name in model.weights and name in read)
    rest = {name: weight for name, weight in model.weights.items() if name not in held}
    proto = to_proto(replace(model, weights=rest, inputs=(*model.inputs, *held)), values)
    return EvaluationGraph(proto, held, {value.name: model.types[value.name] for value in proto.graph.output})
