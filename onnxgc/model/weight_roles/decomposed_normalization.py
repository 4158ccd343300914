"""Finds running statistics, or those of the data, in normalisations of elementary operators.

Frozen batch normalisation and some exporters write `(x - mean) / sqrt(variance + epsilon)`, or the same
with scale and shift computed first: `x * s + (shift - mean * s)` with `s = scale / sqrt(variance + epsilon)`.
"""

from enum import StrEnum

import numpy as np

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.weight_roles.graph_context import GraphContext
from onnxgc.model.weight_roles.value_patterns import has_several_axes

# Operators that keep a weight's values.
_REARRANGING = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Expand", "Cast"})
_SCALING = _REARRANGING | {"Mul", "Div", "Reciprocal"}
_MAX_EPSILON = 0.1


class RunningStatistic(StrEnum):
    """The statistic in a weight; those of the data normalise an input of the model."""

    MEAN = "running mean"
    VARIANCE = "running variance"
    MEAN_OF_DATA = "mean of the data"
    DEVIATION_OF_DATA = "deviation of the data"

    @property
    def is_of_data(self) -> bool:
        return self in (RunningStatistic.MEAN_OF_DATA, RunningStatistic.DEVIATION_OF_DATA)


def running_statistics(draft: Draft) -> dict[tuple[str, int], RunningStatistic]:
    """Statistics by the node that reads them: its first output, and the input's index."""
    return _StatisticsFinder(draft).statistics


class _StatisticsFinder(GraphContext):
    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        # The weights, and all tensors computed only from them.
        self._constants = set(draft.weights)
        for node in draft.nodes:
            operands = set(filter(None, node.inputs))
            if operands and operands <= self._constants:
                self._constants.update(node.outputs)
        # Standard deviations, their reciprocals, and products of those with a scale.
        self._deviations: set[str] = set()
        self.statistics: dict[tuple[str, int], RunningStatistic] = {}
        plain = [node for node in draft.nodes if not node.domain]
        for node in plain:
            self._find_variance(node)
        for node in plain:
            self._find_mean(node)
            self._find_data_statistics(node)

    def _find_variance(self, node: Node) -> None:
        if node.op in _SCALING and self._constants.issuperset(filter(None, node.inputs)):
            if not self._deviations.isdisjoint(node.inputs):
                self._deviations.update(node.outputs)
            return
        if not self._is_root(node):
            return
        total = self.producers.get(node.inputs[0])
        if total is None or total.op != "Add" or total.domain:
            return
        for index, epsilon in ((0, total.inputs[1]), (1, total.inputs[0])):
            if self._is_vector(total.inputs[index]) and self._is_epsilon(epsilon):
                self.statistics[total.outputs[0], index] = RunningStatistic.VARIANCE
                self._deviations.update(node.outputs)

    def _find_mean(self, node: Node) -> None:
        if node.op == "Mul":
            for index in (0, 1):
                source, scale = node.inputs[index], node.inputs[1 - index]
                is_scaled = self._is_vector(source) and scale in self._deviations
                if is_scaled and self._is_subtracted(node.outputs[0]):
                    self.statistics[node.outputs[0], index] = RunningStatistic.MEAN
        elif node.op == "Sub" and self._is_vector(node.inputs[1]) and node.inputs[0] not in self._constants:
            readers = [reader for reader, _ in self.consumers.get(node.outputs[0], ())]
            operands = {name for reader in readers if reader.op in ("Mul", "Div") for name in reader.inputs}
            if not self._deviations.isdisjoint(operands):
                self.statistics[node.outputs[0], 1] = RunningStatistic.MEAN

    def _find_data_statistics(self, node: Node) -> None:
        """Records the weights of (input - mean) / deviation, if the node is the division."""
        before = self.producers.get(node.inputs[0]) if node.op == "Div" else None
        if before is None or before.op != "Sub" or before.domain or not self._is_input(before.inputs[0]):
            return
        weights = (self._weight(before.inputs[1]), self._weight(node.inputs[1]))
        # Weights with several axes are learned centres.
        if all(weight is not None and not has_several_axes(weight.type.shape) for weight in weights):
            self.statistics.setdefault((before.outputs[0], 1), RunningStatistic.MEAN_OF_DATA)
            self.statistics.setdefault((node.outputs[0], 1), RunningStatistic.DEVIATION_OF_DATA)

    def _is_input(self, name: str) -> bool:
        """Whether a tensor is an input of the model, possibly rearranged or scaled by a number."""
        while name not in self.inputs:
            producer = self.producers.get(name)
            if producer is None or producer.domain or producer.op not in _SCALING or not any(producer.inputs):
                return False
            if producer.op not in _REARRANGING and self._number(producer.inputs[-1]) is None:
                return False
            name = producer.inputs[0]
        return True

    def _is_root(self, node: Node) -> bool:
        if node.op == "Pow":
            exponent = self._number(node.inputs[1])
            return exponent is not None and abs(exponent) == 0.5
        return node.op == "Sqrt"

    def _is_vector(self, name: str) -> bool:
        """Whether a tensor is a weight of several elements, possibly rearranged."""
        weight = self._weight(name)
        return weight is not None and weight.type.element_count > 1

    def _weight(self, name: str) -> Weight | None:
        """The floating weight that a tensor is, possibly rearranged."""
        weight = self.weight_behind(name, _is_rearranging)
        return weight if weight is not None and weight.type.is_floating else None

    def _is_epsilon(self, name: str) -> bool:
        value = self._number(name)
        return value is not None and 0 < value < _MAX_EPSILON

    def _is_subtracted(self, name: str) -> bool:
        readers = self.consumers.get(name, ())
        return bool(readers) and all(
            (reader.op == "Sub" and index == 1)
            or reader.op == "Neg"
            or (reader.op in _REARRANGING and self._is_subtracted(reader.outputs[0]))
            for reader, index in readers
        )

    def _number(self, name: str) -> float | None:
        weight = self.weights.get(name)
        if weight is None or weight.type.element_count != 1 or not weight.type.is_floating:
            return None
        return float(np.asarray(weight.load(), np.float64).reshape(-1)[0])


def _is_rearranging(node: Node) -> bool:
    return not node.domain and node.op in _REARRANGING
