"""Seeded data for one training step."""

from collections.abc import Mapping

import numpy as np

from onnxgc.api.planned_step import PlannedStep
from onnxgc.model.core.ir import Array, dtype_name
from onnxgc.runtime.measure import random_feeds
from onnxgc.tracing.optimizers import KEEP, LEARNING_RATE, STEP

_STATE_SCALE = 1e-3


def feeds_of(planned: PlannedStep, seed: int) -> dict[str, Array]:
    """Values of inputs, labels and targets; weights are in the file."""

    def described(names: tuple[str, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        kinds = {name: planned.step.types[name] for name in names}
        return {name: (dtype_name(kind.dtype), kind.shape) for name, kind in kinds.items()}

    model = planned.model
    # Integer inputs are masks, or indices of tables with at least two rows.
    feeds = random_feeds(described(model.inputs), seed, 2)
    return feeds | random_feeds(described(model.targets), seed + 1, _classes(planned))


def feeds_of_updates(planned: PlannedStep, weights: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Further inputs of a step with an optimizer; none without.

    Tensors that are updated in place are inputs: parameters from `weights`, states by seed as after a few
    steps.
    """
    updates = planned.step.updates
    feeds: dict[str, Array] = {}
    if planned.model.draw:
        feeds[planned.model.draw] = np.asarray(1, np.int64)
    if updates is None:
        return feeds
    draw = np.random.default_rng(seed + 2)
    feeds |= {name: weights[name] for name in updates.states}
    for name in updates.state_names:
        state = np.abs(draw.standard_normal(updates.types[name].shape))
        feeds[name] = (_STATE_SCALE * state).astype(np.float32)
    numbers = {LEARNING_RATE: np.float32(_STATE_SCALE), STEP: np.int64(3), KEEP: np.float32(1)}
    return feeds | {updates.scalars[key]: np.asarray(numbers[key]) for key in updates.scalars}


def _classes(planned: PlannedStep) -> int:
    """The number of classes: the size of the axis that the loss normalises."""
    for node in planned.model.nodes:
        if node.origin == "loss" and node.op == "LogSoftmax":
            return planned.model.types[node.inputs[0]].shape[int(node.attribute("axis", -1))]
    return 2
