"""Draws random initial weights for a model."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from onnx import helper

from onnxgc.model.core.ir import Array, Node, Statistic, TensorType, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, FilledWeight
from onnxgc.model.operators.registry import FACTS, facts_by_name

Shape = tuple[int, ...]
Generator = np.random.Generator

_SPREAD = 0.1
_EMBEDDING_DEVIATION = 0.02
_NORMALISATIONS = frozenset(
    op for op, facts in FACTS.items() if facts.parameters and op.endswith("Normalization")
)


class WeightedGraph(Protocol):
    """The part of a model that drawing its weights needs."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def weights(self) -> Mapping[str, Weight]: ...

    @property
    def parameters(self) -> Sequence[str]: ...

    @property
    def statistics(self) -> Sequence[Statistic]: ...


def draw_weights(model: WeightedGraph, seed: int, *, only_constant_filled: bool = False) -> dict[str, Array]:
    """New values for the model's float weights, by name.

    Matrices and kernels are normal with variance `2 / fan_in` (Source: He et al. 2015, equation 10),
    scales are near 1, biases and means small, running variances positive. The use of a weight determines
    its kind, so frozen weights are drawn like parameters; numbers of formulas (an epsilon, a scalar factor)
    are left out. Each value depends only on the seed and the weight's name.

    With `only_constant_filled`, the result has only the weights that the file defines as one repeated value
    (ConstantOfShape).
    """
    variances = _running_variances(model)
    uses = _FirstUses(model)
    drawn: dict[str, Array] = {}
    for name, weight in model.weights.items():
        if only_constant_filled and not isinstance(weight, FilledWeight):
            continue
        draw = _drawing_for_weight(name, weight, model, variances, uses)
        if draw is not None:
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            dtype = helper.tensor_dtype_to_np_dtype(weight.type.dtype)
            drawn[name] = np.asarray(draw(generator, weight.type.shape)).astype(dtype)
    return drawn


Drawing = Callable[[Generator, Shape], Array]


class _FirstUses:
    """The first operator after each weight that does more than rearrange it."""

    def __init__(self, model: WeightedGraph) -> None:
        self._readers: dict[str, list[tuple[Node, int]]] = {}
        for node in model.nodes:
            for index, name in enumerate(node.inputs):
                self._readers.setdefault(name, []).append((node, index))

    def of(self, name: str) -> tuple[Node, int, bool] | None:
        """The node that uses the weight, its input, and whether the weight is transposed there."""
        transposed = False
        pending = [(name, transposed)]
        seen = {name}
        while pending:
            tensor, transposed = pending.pop(0)
            for node, index in self._readers.get(tensor, ()):
                if not facts_by_name(node.op).passes_weights:
                    return node, index, transposed
                fresh = [output for output in node.outputs if output and output not in seen]
                seen.update(fresh)
                pending += [(output, transposed != (node.op == "Transpose")) for output in fresh]
        return None


def _drawing_for_weight(
    name: str, weight: Weight, model: WeightedGraph, variances: frozenset[str], uses: _FirstUses
) -> Drawing | None:
    if not weight.type.is_floating:
        return None
    if any(name == statistic.name for statistic in model.statistics):
        return _positive if name in variances else _small
    # Weights that were computed while reading belong to formulas, unless the user declared them parameters.
    if name not in model.parameters and (isinstance(weight, ArrayWeight) or weight.type.element_count <= 1):
        return None
    use = uses.of(name)
    if use is None:
        return None
    node, index, transposed = use
    if name not in model.parameters and index not in facts_by_name(node.op).parameters:
        return None
    return _drawing_for_use(node, index, transposed, weight.type)


def _drawing_for_use(node: Node, index: int, transposed: bool, kind: TensorType) -> Drawing:
    if node.op in _NORMALISATIONS:
        return _near_one if index == 1 else _small
    if node.op in ("Mul", "Div"):
        return _near_one
    if node.op == "PRelu":
        return _slope
    if node.op in ("Gather", "GatherND"):
        return _embedding
    fan_in = _fan_in(node, index, transposed, kind.shape)
    return _small if fan_in is None else _normal(math.sqrt(2.0 / fan_in))


def _fan_in(node: Node, index: int, transposed: bool, shape: Shape) -> int | None:
    """The number of inputs that contribute to one output, or None for a bias."""
    if len(shape) < 2 or not all(shape):
        return None
    if node.op in ("Conv", "DeformConv") and index == 1:
        return math.prod(shape[1:])
    if node.op == "ConvTranspose" and index == 1:
        return max(1, shape[0] * math.prod(shape[2:]) // int(node.attribute("group", 1)))
    if node.op == "Gemm" and index < 2:
        flipped = bool(node.attribute("transA" if index == 0 else "transB", 0)) != transposed
        return shape[0 if flipped == (index == 0) else -1] if len(shape) == 2 else shape[-1]
    if node.op == "MatMul":
        return shape[-1 if transposed != (index == 0) else -2]
    if node.op in ("LSTM", "GRU", "RNN") and index in (1, 2):
        return shape[-1]
    if node.op == "Einsum":
        return shape[0]
    return None


def _running_variances(model: WeightedGraph) -> frozenset[str]:
    """Running variances: those of BatchNormalization, and statistics updated from a mean of squares."""
    producers = {output: node for node in model.nodes for output in node.outputs}
    found = [node.inputs[4] for node in model.nodes if node.op == "BatchNormalization" and not node.domain]
    for statistic in model.statistics:
        if statistic.updated not in producers:
            continue
        increment = producers[producers[statistic.updated].inputs[1]]
        batch = producers.get(increment.inputs[0])
        if batch is not None and batch.op == "Cast":
            batch = producers.get(batch.inputs[0])
        if batch is not None and batch.op == "ReduceMean":
            found.append(statistic.name)
    return frozenset(found)


def _normal(deviation: float) -> Drawing:
    return lambda generator, shape: generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation)


def _near_one(generator: Generator, shape: Shape) -> Array:
    return 1.0 + generator.uniform(-_SPREAD, _SPREAD, shape)


def _small(generator: Generator, shape: Shape) -> Array:
    return generator.uniform(-_SPREAD, _SPREAD, shape)


def _positive(generator: Generator, shape: Shape) -> Array:
    return generator.uniform(0.5, 1.5, shape)


def _slope(generator: Generator, shape: Shape) -> Array:
    return 0.25 + generator.uniform(-_SPREAD, _SPREAD, shape)


def _embedding(generator: Generator, shape: Shape) -> Array:
    return generator.standard_normal(shape) * _EMBEDDING_DEVIATION
