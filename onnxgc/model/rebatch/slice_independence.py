"""Along which axes an operator computes each slice of its result from the same slice of what it reads.

Such an axis may hold any number of samples, in any order: the result of each sample stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxgc.model.core.ir import Node
from onnxgc.model.core.node_rewrites import ValueOf

# From here on Softmax and its kind work along one axis; before, along all from that axis on.
_ONE_AXIS_OPSET = 13

# fmt: off
POINTWISE = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Bernoulli", "BitShift",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos",
    "Cosh", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "RandomNormalLike",
    "RandomUniformLike", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
})
SUMS = frozenset({"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "ReduceSum",
                  "ReduceSumSquare"})
LOSSES = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
# fmt: on
REDUCTIONS = SUMS | {"ReduceMax", "ReduceMean", "ReduceMin"}


@dataclass(frozen=True, slots=True)
class Place:
    """An axis of one of a node's inputs, which has `rank` axes."""

    node: Node
    index: int
    axis: int
    rank: int
    opset: int
    value_of: ValueOf

    def own_axis(self, default: int) -> int:
        """The axis that the node's attribute names."""
        return int(self.node.attribute("axis", default)) % max(self.rank, 1)


def is_independent(place: Place) -> bool:
    """Whether the operator treats slices along this axis independently of each other and all alike.

    Operators that are not known do not, nor do those whose constants say what becomes of each slice.
    """
    rule = _RULES.get(place.node.op)
    return rule is not None and not place.node.domain and rule(place)


def reduced_axes(node: Node, rank: int, value_of: ValueOf) -> frozenset[int]:
    """The axes that a reduction goes over."""
    axes = node.attribute("axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1]:
        value = value_of(node.inputs[1])
        axes = None if value is None else value.reshape(-1).tolist()
    if not axes:
        return frozenset() if node.attribute("noop_with_empty_axes", 0) else frozenset(range(rank))
    return frozenset(int(axis) % max(rank, 1) for axis in axes)


def einsum_terms(node: Node, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """The letter of each axis of the operands, and those of the result; `...0`, `...1` from the right."""
    left, arrow, right = str(node.attribute("equation")).replace(" ", "").partition("->")
    terms = [_letters(term, rank) for term, rank in zip(left.split(","), ranks, strict=True)]
    if arrow:
        return terms, _letters(right, max((len(term) for term in terms), default=0) + len(right))
    flat = [letter for term in terms for letter in term]
    return terms, [letter for letter in flat if flat.count(letter) == 1 or letter.startswith(".")]


def _letters(term: str, rank: int) -> list[str]:
    before, dots, after = term.partition("...")
    count = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"...{number}" for number in reversed(range(count))), *after]


def _always(place: Place) -> bool:
    return True


def _of_first(*axes: int) -> Callable[[Place], bool]:
    return lambda place: place.index == 0 and place.axis in axes


def _first_axis(place: Place) -> bool:
    return place.axis == 0


def _other_axes(default: int, *indices: int) -> Callable[[Place], bool]:
    """All axes of these inputs but the one that the node names."""
    return lambda place: place.index in indices and place.axis != place.own_axis(default)


def _softmax(place: Place) -> bool:
    if place.opset < _ONE_AXIS_OPSET:
        return place.axis < place.own_axis(1)
    return place.axis != place.own_axis(-1)


def _axes_in_front(place: Place) -> bool:
    return place.index == 0 and place.axis < place.own_axis(-1)


def _cumulative(place: Place) -> bool:
    axis = place.value_of(place.node.inputs[1])
    return place.index == 0 and axis is not None and place.axis != int(axis.reshape(-1)[0]) % place.rank


def _matmul(place: Place) -> bool:
    if place.index == 0:
        return place.axis != place.rank - 1
    return place.axis != max(place.rank - 2, 0)


def _gemm(place: Place) -> bool:
    if place.index == 2:
        return True
    summed = (1, 0)[place.index]
    is_turned = place.node.attribute(("transA", "transB")[place.index], 0)
    return place.axis != (1 - summed if is_turned else summed)


def _einsum(place: Place) -> bool:
    left = str(place.node.attribute("equation")).partition("->")[0]
    ranks = [place.rank] * len(left.split(","))
    terms, result = einsum_terms(place.node, ranks)
    term = terms[place.index]
    return term[place.axis] in result and term.count(term[place.axis]) == 1


def _recurrent(place: Place) -> bool:
    """Samples are on axis 1, or 0 with `layout`; a state has its directions there. X: [T, N, C]."""
    samples = 0 if place.node.attribute("layout", 0) or place.index == 4 else 1
    return place.index in (0, 4, 5, 6) and place.axis == samples


def _reduction(place: Place) -> bool:
    """A mean of everything is the same in any order."""
    axes = reduced_axes(place.node, place.rank, place.value_of)
    return place.axis not in axes or (place.node.op == "ReduceMean" and len(axes) == place.rank)


def _loss(place: Place) -> bool:
    return place.index < 2 and (place.axis != 1 or place.index == 1)


def _gather_nd(place: Place) -> bool:
    batch = int(place.node.attribute("batch_dims", 0))
    return place.axis < batch if place.index == 0 else place.axis != place.rank - 1


def _reverse_sequence(place: Place) -> bool:
    return place.index == 1 or place.axis != int(place.node.attribute("time_axis", 0)) % place.rank


# fmt: off
_RULES: Mapping[str, Callable[[Place], bool]] = {
    **dict.fromkeys(POINTWISE, _always),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(LOSSES, _loss),
    # Their own constants are looked at where the node is met.
    **dict.fromkeys((
        "Concat", "Expand", "Flatten", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "Transpose",
        "Unsqueeze", "Upsample",
    ), _always),
    **dict.fromkeys(("Conv", "ConvTranspose", "DepthToSpace", "DFT", "GroupNormalization",
                     "InstanceNormalization", "LRN", "Multinomial", "STFT", "SpaceToDepth"), _of_first(0)),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool",
                     "MaxPool"), _of_first(0, 1)),
    **dict.fromkeys(("Col2Im", "GridSample", "RotaryEmbedding"), _first_axis),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("ArgMax", "ArgMin"), _other_axes(0, 0)),
    **dict.fromkeys(("LpNormalization", "TopK"), _other_axes(-1, 0)),
    **dict.fromkeys(("GatherElements", "ScatterElements"), _other_axes(0, 0, 1, 2)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _axes_in_front),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    "Attention": lambda place: place.axis == 0 and (place.index < 3 or place.rank == 4),
    # Its statistics are those of the whole batch, whatever the order.
    "BatchNormalization": lambda place: place.index == 0 and place.axis != 1,
    "CumSum": _cumulative,
    "Einsum": _einsum,
    "Gather": lambda place: place.index == 1 or place.axis != place.own_axis(0),
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "OneHot": lambda place: place.index == 0,
    "Pad": _of_first(*range(16)),
    "ReverseSequence": _reverse_sequence,
    "Trilu": lambda place: place.index == 0 and place.axis < place.rank - 2,
}
# fmt: on
