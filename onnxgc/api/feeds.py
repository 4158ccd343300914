"""Seeded data for one training step."""

from __future__ import annotations

from onnxgc.api.pipeline import PlannedStep
from onnxgc.model.ir import Array, dtype_name
from onnxgc.runtime.measure import random_feeds


def feeds_of(planned: PlannedStep, seed: int) -> dict[str, Array]:
    """Values for inputs, labels and targets of a step; weights are in its file."""

    def described(names: tuple[str, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        kinds = {name: planned.step.types[name] for name in names}
        return {name: (dtype_name(kind.dtype), kind.shape) for name, kind in kinds.items()}

    model = planned.model
    # Integer inputs are masks and indices of tables, of which every one has two rows.
    feeds = random_feeds(described(model.inputs), seed, 2)
    return feeds | random_feeds(described(model.targets), seed + 1, _classes(planned))


def _classes(planned: PlannedStep) -> int:
    """How many classes the labels are of: the extent of the axis that the loss normalises."""
    for node in planned.model.nodes:
        if node.origin == "loss" and node.op == "LogSoftmax":
            return planned.model.types[node.inputs[0]].shape[int(node.attribute("axis", -1))]
    return 2
