"""What a node costs to run, in floating-point operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from onnxgc.model.core.draft import operator_name
from onnxgc.model.core.ir import Node, TensorType

Types = Mapping[str, TensorType]

# One multiplication and one addition.
_FUSED = 2
# fmt: off
_FREE = frozenset({
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Concat", "Split", "Slice",
    "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Expand", "Tile", "Pad", "Cast",
    "CastLike", "Shape", "Size", "Constant", "ConstantOfShape", "Range", "DepthToSpace", "SpaceToDepth",
    "EyeLike", "OneHot", "Trilu", "ReverseSequence", "SequenceAt", "SplitToSequence", "SequenceConstruct",
    "ConcatFromSequence", "NonZero", "Compress", "Unique", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike", "Bernoulli",
})
# fmt: on
# Operations an element of the larger of input and output, where it is not one.
_PER_ELEMENT: Mapping[str, int] = {
    "Exp": 4,
    "Log": 4,
    "Sqrt": 2,
    "Pow": 4,
    "Sin": 4,
    "Cos": 4,
    "Tan": 4,
    "Acos": 4,
    "Acosh": 8,
    "Asin": 4,
    "Asinh": 8,
    "Atan": 4,
    "Atanh": 6,
    "Cosh": 6,
    "Sinh": 6,
    "Mod": 3,
    "Tanh": 6,
    "Sigmoid": 6,
    "Erf": 8,
    "Gelu": 12,
    "Softplus": 8,
    "Mish": 14,
    "Elu": 5,
    "Selu": 5,
    "Celu": 5,
    "HardSigmoid": 3,
    "HardSwish": 4,
    "Shrink": 2,
    "Softsign": 3,
    "ThresholdedRelu": 2,
    "Swish": 7,
    "LeakyRelu": 2,
    "PRelu": 2,
    "Softmax": 7,
    "LogSoftmax": 7,
    "BatchNormalization": 2,
    "LayerNormalization": 8,
    "InstanceNormalization": 8,
    "GroupNormalization": 8,
    "RMSNormalization": 5,
    "MeanVarianceNormalization": 8,
    "LpNormalization": 4,
    "GlobalLpPool": 4,
    "ReduceL2": 2,
    "ReduceLogSumExp": 6,
    "ReduceSumSquare": 2,
    "Dropout": 2,
    "Resize": 8,
    "Upsample": 8,
    "GridSample": 16,
}


def node_flops(node: Node, types: Types) -> int:
    """Floating-point operations of one run of a node; a multiplication with addition counts as 2.

    `types` holds the type of each of the node's inputs and outputs, weights included. Operators
    that only move data cost nothing; unknown ones cost one operation an output element.
    """
    if not node.domain:
        if node.op in _FREE:
            return 0
        formula = _FORMULAS.get(node.op)
        if formula is not None:
            return formula(node, types)
    return _largest(node, types) * _PER_ELEMENT.get(operator_name(node), 1)


def _shape(node: Node, types: Types, index: int) -> tuple[int, ...]:
    return types[node.inputs[index]].shape


def _output(node: Node, types: Types) -> TensorType:
    return types[next(filter(None, node.outputs))]


def _largest(node: Node, types: Types) -> int:
    """Elements of the largest tensor that the node touches: reductions read more than they write."""
    names = (*filter(None, node.inputs), *filter(None, node.outputs))
    return max((types[name].element_count for name in names if name in types), default=0)


def _has_input(node: Node, index: int) -> bool:
    return len(node.inputs) > index and bool(node.inputs[index])


def _conv(node: Node, types: Types) -> int:
    _, channels, *kernel = _shape(node, types, 1)
    count = _output(node, types).element_count
    return _FUSED * count * channels * math.prod(kernel) + (count if _has_input(node, 2) else 0)


def _conv_transpose(node: Node, types: Types) -> int:
    _, channels, *kernel = _shape(node, types, 1)
    bias = _output(node, types).element_count if _has_input(node, 2) else 0
    return _FUSED * math.prod(_shape(node, types, 0)) * channels * math.prod(kernel) + bias


def _gemm(node: Node, types: Types) -> int:
    inner = _shape(node, types, 0)[0 if node.attribute("transA", 0) else 1]
    count = _output(node, types).element_count
    return _FUSED * count * inner + (count if _has_input(node, 2) else 0)


def _matmul(node: Node, types: Types) -> int:
    return _FUSED * _output(node, types).element_count * _shape(node, types, 0)[-1]


def _einsum(node: Node, types: Types) -> int:
    """Two operations for each combination of index values."""
    terms = str(node.attribute("equation")).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    under_dots: list[tuple[int, ...]] = []
    for index, term in enumerate(terms):
        shape = _shape(node, types, index)
        before, _, after = term.partition("...")
        end = len(shape) - len(after)
        under_dots.append(shape[len(before) : end])
        # An axis of 1 may meet a longer one.
        for label, size in zip(before + after, (*shape[: len(before)], *shape[end:]), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    combinations = math.prod(sizes.values()) * math.prod(np.broadcast_shapes(*under_dots))
    return (_FUSED if len(terms) > 1 else 1) * combinations


def _pool(node: Node, types: Types) -> int:
    kernel: list[int] = node.attribute("kernel_shape")
    return _output(node, types).element_count * math.prod(kernel)


def _lrn(node: Node, types: Types) -> int:
    return _output(node, types).element_count * (_FUSED * int(node.attribute("size")) + 6)


def _attention(node: Node, types: Types) -> int:
    """Two matrix products, and a softmax between them."""
    query, key = _shape(node, types, 0), _shape(node, types, 1)
    scores = math.prod(query) * key[-2]
    return 2 * _FUSED * scores


def _recurrent(gates: int) -> Callable[[Node, Types], int]:
    def flops(node: Node, types: Types) -> int:
        length, batch, features = _shape(node, types, 0)
        directions, _, hidden = _shape(node, types, 2)
        return _FUSED * length * batch * directions * gates * hidden * (features + hidden)

    return flops


_FORMULAS: Mapping[str, Callable[[Node, Types], int]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Einsum": _einsum,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
    "LRN": _lrn,
    "Attention": _attention,
    "LSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
}
