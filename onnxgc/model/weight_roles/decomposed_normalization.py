"""Normalisation by running statistics or by those of the data, written out in elementary operators.

Frozen batch normalisation and some exporters write `(x - mean) / sqrt(variance + epsilon)`, or the same
with scale and shift computed first: `x * s + (shift - mean * s)` with `s = scale / sqrt(variance + epsilon)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.weight_roles.value_patterns import has_several_axes

# Rearranging operators through which a weight is still itself.
_MOVING = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Expand", "Cast"})
_SCALING = _MOVING | {"Mul", "Div", "Reciprocal"}
_LARGEST_EPSILON = 0.1


class RunningStatistic(StrEnum):
    """Which of them a weight is."""

    MEAN = "running mean"
    VARIANCE = "running variance"
    MEAN_OF_DATA = "mean of the data"
    DEVIATION_OF_DATA = "deviation of the data"

    @property
    def is_of_data(self) -> bool:
        return self in (RunningStatistic.MEAN_OF_DATA, RunningStatistic.DEVIATION_OF_DATA)


def running_statistics(draft: Draft) -> dict[tuple[str, int], RunningStatistic]:
    """The running statistics by the output and the input's number of the operator that uses them."""
    return _WrittenOut(draft).found


class _WrittenOut:
    def __init__(self, draft: Draft) -> None:
        self._weights = draft.weights
        self._inputs = frozenset(draft.inputs)
        self._producers = draft.producers()
        self._consumers = draft.consumers()
        self._constant = _computed_from_weights(draft)
        # Tensors that are one over a standard deviation, or that times a scale, or the deviation itself.
        self._spreads: set[str] = set()
        self.found: dict[tuple[str, int], RunningStatistic] = {}
        plain = [node for node in draft.nodes if not node.domain]
        for node in plain:
            self._look_for_variance(node)
        for node in plain:
            self._look_for_mean(node)
            self._look_for_data(node)

    def _look_for_variance(self, node: Node) -> None:
        if node.op in _SCALING and self._constant.issuperset(filter(None, node.inputs)):
            if not self._spreads.isdisjoint(node.inputs):
                self._spreads.update(node.outputs)
            return
        if not self._is_root(node):
            return
        total = self._producers.get(node.inputs[0])
        if total is None or total.op != "Add" or total.domain:
            return
        for index, epsilon in ((0, total.inputs[1]), (1, total.inputs[0])):
            if self._is_weight(total.inputs[index]) and self._is_epsilon(epsilon):
                self.found[total.outputs[0], index] = RunningStatistic.VARIANCE
                self._spreads.update(node.outputs)

    def _look_for_mean(self, node: Node) -> None:
        if node.op == "Mul":
            for index in (0, 1):
                source, scale = node.inputs[index], node.inputs[1 - index]
                if (
                    self._is_weight(source)
                    and scale in self._spreads
                    and self._is_subtracted(node.outputs[0])
                ):
                    self.found[node.outputs[0], index] = RunningStatistic.MEAN
        elif node.op == "Sub" and self._is_weight(node.inputs[1]) and node.inputs[0] not in self._constant:
            readers = [reader for reader, _ in self._consumers.get(node.outputs[0], ())]
            scaled = [r for r in readers if r.op in ("Mul", "Div") and not self._spreads.isdisjoint(r.inputs)]
            if scaled:
                self.found[node.outputs[0], 1] = RunningStatistic.MEAN

    def _look_for_data(self, node: Node) -> None:
        """Whether the node divides an input, less a weight, by a weight."""
        before = self._producers.get(node.inputs[0]) if node.op == "Div" else None
        if before is None or before.op != "Sub" or before.domain or not self._is_input(before.inputs[0]):
            return
        weights = (self._weight(before.inputs[1]), self._weight(node.inputs[1]))
        # Tables of several axes are centres, which are learned.
        if all(weight is not None and not has_several_axes(weight.type.shape) for weight in weights):
            self.found.setdefault((before.outputs[0], 1), RunningStatistic.MEAN_OF_DATA)
            self.found.setdefault((node.outputs[0], 1), RunningStatistic.DEVIATION_OF_DATA)

    def _is_input(self, name: str) -> bool:
        """Whether it is an input of the graph, moved, or multiplied or divided by a number, at most."""
        while name not in self._inputs:
            producer = self._producers.get(name)
            if producer is None or producer.domain or producer.op not in _SCALING or not any(producer.inputs):
                return False
            if producer.op not in _MOVING and self._number(producer.inputs[-1]) is None:
                return False
            name = producer.inputs[0]
        return True

    def _is_root(self, node: Node) -> bool:
        if node.op == "Pow":
            exponent = self._number(node.inputs[1])
            return exponent is not None and abs(exponent) == 0.5
        return node.op == "Sqrt"

    def _is_weight(self, name: str) -> bool:
        """Whether it is a weight of several elements, moved at most."""
        weight = self._weight(name)
        return weight is not None and weight.type.element_count > 1

    def _weight(self, name: str) -> Weight | None:
        """The floating weight that a tensor is, moved at most."""
        while name not in self._weights:
            producer = self._producers.get(name)
            if producer is None or producer.domain or producer.op not in _MOVING:
                return None
            name = producer.inputs[0]
        return self._weights[name] if self._weights[name].type.is_floating else None

    def _is_epsilon(self, name: str) -> bool:
        value = self._number(name)
        return value is not None and 0 < value < _LARGEST_EPSILON

    def _is_subtracted(self, name: str) -> bool:
        readers = self._consumers.get(name, ())
        return bool(readers) and all(
            (reader.op == "Sub" and index == 1)
            or reader.op == "Neg"
            or (reader.op in _MOVING and self._is_subtracted(reader.outputs[0]))
            for reader, index in readers
        )

    def _number(self, name: str) -> float | None:
        weight = self._weights.get(name)
        if weight is None or weight.type.element_count != 1 or not weight.type.is_floating:
            return None
        return float(np.asarray(weight.load(), np.float64).reshape(-1)[0])


def _computed_from_weights(draft: Draft) -> set[str]:
    """The weights, and all that is computed from nothing else."""
    weights: Mapping[str, Weight] = draft.weights
    found = set(weights)
    for node in draft.nodes:
        read = [name for name in node.inputs if name]
        if read and found.issuperset(read):
            found.update(node.outputs)
    return found
