"""A model's loss and accuracy in inference mode."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.runtime.io_binding import BoundSession
from onnxgc.training.data import Batch, fitting_batch, samples_of
from onnxgc.training.training_file import TrainingFile

Metric: TypeAlias = Callable[[Array, Array], float]
"""A figure of all samples, from the model's first output and the labels or targets."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model in inference mode: its session, its outputs and its loss."""

    session: BoundSession
    outputs: tuple[str, ...]
    loss: str


def evaluate(
    file: TrainingFile,
    batches: Iterable[Batch],
    evaluation_of: Callable[[int], Evaluation],
    metrics: Mapping[str, Metric],
) -> dict[str, float]:
    """The mean loss over all samples, for cross-entropy the accuracy, and other metrics.

    `evaluation_of` gives the model in inference mode for a number of samples.

    Raises:
        TrainingError: a batch does not fit, or metrics have no target.
    """
    if metrics and not file.target:
        raise TrainingError("metrics compare an output with labels or a target, and the model's own loss has neither")
    outputs: list[Array] = []
    targets: list[Array] = []
    losses = weights = 0.0
    right = labelled = 0
    for given in batches:
        batch = fitting_batch(given, file)
        weight = samples_of(batch, file)
        evaluation = evaluation_of(weight)
        evaluation.session.run(batch)
        if file.classes is not None and file.target in batch:
            labels = batch[file.target]
            known = file.labels.get(file.target)
            counts = labels != (None if known is None else known.ignored)
            weight = int(counts.sum())
            scores = evaluation.session.result(evaluation.outputs[0])
            if scores.ndim > labels.ndim + 1:
                # The loss squeezes dimensions of 1.
                scores = scores.reshape(len(scores), -1)
            chosen = scores.argmax(file.class_axis).reshape(labels.shape)
            right += int((chosen == labels)[counts].sum())
            labelled += weight
        if metrics:
            outputs.append(evaluation.session.result(evaluation.outputs[0]))
            targets.append(batch[file.target])
        if weight:
            losses += float(evaluation.session.result(evaluation.loss)) * weight
        weights += weight
    figures = {"loss": losses / weights if weights else float("nan")}
    if labelled:
        figures["accuracy"] = right / labelled
    if outputs:
        whole = np.concatenate(outputs), np.concatenate(targets)
        figures.update({name: float(metric(*whole)) for name, metric in metrics.items()})
    return figures
