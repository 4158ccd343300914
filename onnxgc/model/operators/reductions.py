"""Facts about reductions, positions of extremes, pooling, normalisations and loss functions.

Data of pooling and of normalisations without an axis: [N, C, spatial...].
"""

import math
from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.core.node_rewrites import ValueOf
from onnxgc.model.operators.facts import (
    MULTIPLY_ADD,
    OperatorFacts,
    Place,
    Settings,
    Types,
    all_but_named_axis,
    axes_of_data,
    has_input,
    itemsize,
    output_of,
)

LOSSES = frozenset(["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
SUMS = frozenset(
    ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "ReduceSum", "ReduceSumSquare"]
)
"""Reductions whose result grows with the number of elements."""
REDUCTIONS = SUMS | {"ReduceMax", "ReduceMean", "ReduceMin"}

MAX_ORDERED_ROWS = 191
"""Rows that ONNX Runtime adds on CUDA in at most two blocks, whose order does not matter.

Source: call_reduce_matrix_rows in onnxruntime/core/providers/cuda/reduction/reduction_functions.cu.
"""


def reduced_axes(node: Node, rank: int, value_of: ValueOf) -> frozenset[int]:
    axes = node.attribute("axes")
    if axes is None and has_input(node, 1):
        value = value_of(node.inputs[1])
        axes = None if value is None else value.reshape(-1).tolist()
    if not axes:
        return frozenset() if node.attribute("noop_with_empty_axes", 0) else frozenset(range(rank))
    return frozenset(int(axis) % max(rank, 1) for axis in axes)


def is_fast_reduction(node: Node, shape: tuple[int, ...], value_of: ValueOf) -> bool:
    """Whether ONNX Runtime has its own kernel on CUDA: for a sum over first or last axes, or over all.

    `shape` is the operand's. Other reductions fall to cuDNN, at a small share of the memory's bandwidth.
    Source: get_applicable_matrix_reduction in
    onnxruntime/core/providers/cuda/reduction/reduction_functions.cc.
    """
    axes = reduced_axes(node, len(shape), value_of)
    extended = [axis for axis, size in enumerate(shape) if size != 1]
    reduced = [axis for axis in extended if axis in axes]
    if reduced == extended:
        return True
    ends = extended[: len(reduced)], extended[len(extended) - len(reduced) :]
    return node.op == "ReduceSum" and reduced in ends


def _independent_reduction(place: Place) -> bool:
    """A mean of everything is the same in any order."""
    axes = reduced_axes(place.node, place.rank, place.value_of)
    return place.axis not in axes or (place.node.op == "ReduceMean" and len(axes) == place.rank)


def _pool_flops(node: Node, types: Types) -> int:
    kernel: list[int] = node.attribute("kernel_shape")
    return output_of(node, types).element_count * math.prod(kernel)


def _lrn_flops(node: Node, types: Types) -> int:
    return output_of(node, types).element_count * (MULTIPLY_ADD * int(node.attribute("size")) + 6)


def _independent_axes_in_front(place: Place) -> bool:
    return place.index == 0 and place.axis < place.own_axis(-1)


def _lrn_workspace(node: Node, types: Types) -> int:
    """The scale of every element, and one image's squares with the window's margin."""
    x = types[node.inputs[0]]
    margin = x.shape[1] + int(node.attribute("size")) - 1
    return x.size_bytes + margin * math.prod(x.shape[2:]) * itemsize(x)


def _independent_loss(place: Place) -> bool:
    return place.index < 2 and (place.axis != 1 or place.index == 1)


FACTS: Mapping[str, OperatorFacts] = {
    **dict.fromkeys(REDUCTIONS, OperatorFacts(independent=_independent_reduction)),
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare"), OperatorFacts(flops=2, independent=_independent_reduction)),
    "ReduceLogSumExp": OperatorFacts(flops=6, independent=_independent_reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), OperatorFacts(independent=all_but_named_axis(0, 0), has_gradient=False)),
    "TopK": OperatorFacts(independent=all_but_named_axis(-1, 0)),
    **dict.fromkeys(
        ("AveragePool", "LpPool", "MaxPool"), OperatorFacts(flops=_pool_flops, independent=axes_of_data(0, 1))
    ),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), OperatorFacts(independent=axes_of_data(0, 1))),
    "GlobalLpPool": OperatorFacts(flops=4, independent=axes_of_data(0, 1)),
    "BatchNormalization": OperatorFacts(
        flops=2, independent=lambda place: place.index == 0 and place.axis != 1, parameters=(1, 2), statistics=(3, 4)
    ),
    **dict.fromkeys(
        ("GroupNormalization", "InstanceNormalization"),
        OperatorFacts(flops=8, independent=axes_of_data(0), parameters=(1, 2)),
    ),
    "LRN": OperatorFacts(flops=_lrn_flops, independent=axes_of_data(0), workspace=_lrn_workspace),
    "LayerNormalization": OperatorFacts(flops=8, independent=_independent_axes_in_front, parameters=(1, 2)),
    "LpNormalization": OperatorFacts(flops=4, independent=all_but_named_axis(-1, 0)),
    "MeanVarianceNormalization": OperatorFacts(flops=8),
    "RMSNormalization": OperatorFacts(flops=5, independent=_independent_axes_in_front, parameters=(1,)),
    **dict.fromkeys(
        LOSSES, OperatorFacts(independent=_independent_loss, settings=Settings((1, 2), "weights of classes"))
    ),
}
