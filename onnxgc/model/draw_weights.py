"""Draws random initial weights for a model."""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from onnx import helper

from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, FilledWeight
from onnxgc.model.operators.registry import FACTS, facts_by_name
from onnxgc.model.read_forward import ForwardModel

Shape: TypeAlias = tuple[int, ...]
Drawing: TypeAlias = Callable[[np.random.Generator, Shape], Array]
Model: TypeAlias = TrainableModel | ForwardModel
Readers: TypeAlias = Mapping[str, Sequence[tuple[Node, int]]]

_HALF_WIDTH = 0.1
"""Of the interval of uniform numbers."""
_EMBEDDING_DEVIATION = 0.02
_NORMALISATIONS = frozenset(op for op, facts in FACTS.items() if facts.parameters and op.endswith("Normalization"))


def draw_weights(model: Model, seed: int, *, only_constant_filled: bool = False) -> dict[str, Array]:
    """New values for the model's float weights, by name.

    Matrices and kernels are normal with variance `2 / fan_in` (Source: He et al. 2015, equation 10),
    scales are near 1, biases and means small, running variances positive. The use of a weight determines
    its kind, so frozen weights are drawn like parameters; numbers of formulas (an epsilon, a scalar factor)
    are left out. Each value depends only on the seed and the weight's name.

    With `only_constant_filled`, the result has only the weights that the file defines as one repeated value
    (ConstantOfShape).
    """
    variances = _running_variances(model)
    readers: defaultdict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in model.nodes:
        for index, name in enumerate(node.inputs):
            readers[name].append((node, index))
    drawn: dict[str, Array] = {}
    for name, weight in model.weights.items():
        if only_constant_filled and not isinstance(weight, FilledWeight):
            continue
        draw = _drawing_for_weight(name, weight, model, variances, readers)
        if draw is not None:
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            dtype = helper.tensor_dtype_to_np_dtype(weight.type.dtype)
            drawn[name] = np.asarray(draw(generator, weight.type.shape)).astype(dtype)
    return drawn


def _drawing_for_weight(
    name: str, weight: Weight, model: Model, variances: frozenset[str], readers: Readers
) -> Drawing | None:
    if not weight.type.is_floating:
        return None
    if any(name == statistic.name for statistic in model.statistics):
        return _positive if name in variances else _around(0.0)
    # Weights that were computed while reading belong to formulas, unless the user declared them parameters.
    if name not in model.parameters and (isinstance(weight, ArrayWeight) or weight.type.element_count <= 1):
        return None
    use = _first_use(name, readers)
    if use is None:
        return None
    node, index, transposed = use
    if name not in model.parameters and index not in facts_by_name(node.op).parameters:
        return None
    return _drawing_for_use(node, index, transposed, weight.type)


def _first_use(name: str, readers: Readers) -> tuple[Node, int, bool] | None:
    """The first operator that does more than rearrange a weight, its input, and whether it is transposed."""
    pending, seen = [(name, False)], {name}
    while pending:
        tensor, transposed = pending.pop(0)
        for node, index in readers.get(tensor, ()):
            if not facts_by_name(node.op).passes_weights:
                return node, index, transposed
            fresh = [output for output in node.outputs if output and output not in seen]
            seen.update(fresh)
            pending += [(output, transposed != (node.op == "Transpose")) for output in fresh]
    return None


def _drawing_for_use(node: Node, index: int, transposed: bool, kind: TensorType) -> Drawing:
    if node.op in _NORMALISATIONS:
        return _around(1.0 if index == 1 else 0.0)
    if node.op in ("Mul", "Div"):
        return _around(1.0)
    if node.op == "PRelu":
        return _around(0.25)
    if node.op in ("Gather", "GatherND"):
        return _embedding
    fan_in = _fan_in(node, index, transposed, kind.shape)
    return _around(0.0) if fan_in is None else _normal(math.sqrt(2.0 / fan_in))


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


def _running_variances(model: Model) -> frozenset[str]:
    """Running variances: those of BatchNormalization nodes, and those that the step updates."""
    of_nodes = (node.inputs[4] for node in model.nodes if node.op == "BatchNormalization" and not node.domain)
    updated = (statistic.name for statistic in model.statistics if statistic.is_variance)
    return frozenset((*of_nodes, *updated))


def _around(centre: float) -> Drawing:
    return lambda generator, shape: centre + generator.uniform(-_HALF_WIDTH, _HALF_WIDTH, shape)


def _normal(deviation: float) -> Drawing:
    return lambda generator, shape: generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation)


def _positive(generator: np.random.Generator, shape: Shape) -> Array:
    return generator.uniform(0.5, 1.5, shape)


def _embedding(generator: np.random.Generator, shape: Shape) -> Array:
    return generator.standard_normal(shape) * _EMBEDDING_DEVIATION
