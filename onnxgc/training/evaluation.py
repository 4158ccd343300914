"""A model's loss and outputs in inference mode, as a function of its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import onnx

from onnxgc.api.read_options import ReadOptions, read_with_options
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from onnxgc.runtime.io_binding import BoundSession
from onnxgc.training.data import IGNORED_LABEL, Batch, fitting_batch, samples_of
from onnxgc.training.training_file import TrainingFile


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model in inference mode: its session, its outputs and its loss."""

    session: BoundSession
    outputs: tuple[str, ...]
    loss: str


def evaluation_graph(
    model: TrainableModel, weights: Iterable[str], values: Mapping[str, Array]
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The graph of a model, and the names of those of `weights` that it reads, as inputs.

    `values` replaces the contents of other weights by name.
    """
    read = {name for node in model.nodes for name in node.inputs}
    fed = tuple(name for name in weights if name in model.weights and name in read)
    rest = {name: weight for name, weight in model.weights.items() if name not in fed}
    return to_proto(replace(model, weights=rest, inputs=(*model.inputs, *fed)), values), fed


def evaluate(
    file: TrainingFile, batches: Iterable[Batch], evaluation_of: Callable[[int], Evaluation]
) -> dict[str, float]:
    """The mean loss over all samples, and for cross-entropy the accuracy.

    `evaluation_of` gives the model in inference mode for a number of samples.

    Raises:
        TrainingError: a batch does not fit.
    """
    losses = weights = 0.0
    right = labelled = 0
    for given in batches:
        batch = fitting_batch(given, file)
        weight = samples_of(batch, file)
        evaluation = evaluation_of(weight)
        evaluation.session.run(batch)
        if file.classes is not None and file.target in batch:
            labels = batch[file.target]
            counts = labels != IGNORED_LABEL
            weight = int(counts.sum())
            scores = evaluation.session.result(evaluation.outputs[0])
            if scores.ndim > labels.ndim + 1:
                # The loss squeezes dimensions of 1.
                scores = scores.reshape(len(scores), -1)
            chosen = scores.argmax(file.class_axis).reshape(labels.shape)
            right += int((chosen == labels)[counts].sum())
            labelled += weight
        if weight:
            losses += float(evaluation.session.result(evaluation.loss)) * weight
        weights += weight
    figures = {"loss": losses / weights if weights else float("nan")}
    if labelled:
        figures["accuracy"] = right / labelled
    return figures
