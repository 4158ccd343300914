"""Facts about arithmetic, comparisons, logic, elementary functions, activations, Dropout and Softmax."""

import itertools
import math
from collections.abc import Mapping

import numpy as np

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import OperatorFacts, Place, Settings, Types, itemsize, pointwise


def _sum_workspace(node: Node, types: Types) -> int:
    """Each partial sum is live until the next is computed; the last is the output."""
    y = types[node.outputs[0]]
    shapes = itertools.accumulate((types[name].shape for name in node.inputs), np.broadcast_shapes)
    sizes = [math.prod(shape) * itemsize(y) for shape in shapes][1:]
    return max(map(sum, itertools.pairwise(sizes)), default=y.size_bytes) - y.size_bytes


def _where_workspace(node: Node, types: Types) -> int:
    """Two temporaries: each operand masked by the condition, in their broadcast shape."""
    condition, *operands = (types[name] for name in node.inputs)
    shapes = (np.broadcast_shapes(condition.shape, operand.shape) for operand in operands)
    return sum(math.prod(shape) for shape in shapes) * itemsize(types[node.outputs[0]])


def _independent_cumulative(place: Place) -> bool:
    axis = place.value_of(place.node.inputs[1])
    return place.index == 0 and axis is not None and place.axis != int(axis.reshape(-1)[0]) % place.rank


def _softmax_workspace(node: Node, types: Types) -> int:
    """Transposed copies of input and output, if the axis is not last."""
    x = types[node.inputs[0]]
    rank = len(x.shape)
    return 0 if int(node.attribute("axis", -1)) % rank == rank - 1 else 2 * x.size_bytes


def _one_more_workspace(node: Node, types: Types) -> int:
    """One temporary: the runtime runs this operator as its function body."""
    return types[node.outputs[0]].size_bytes


# From here on Softmax and its kind work along one axis; before, along all from that axis on.
_ONE_AXIS_OPSET = 13


def _independent_softmax(place: Place) -> bool:
    if place.opset < _ONE_AXIS_OPSET:
        return place.axis < place.own_axis(1)
    return place.axis != place.own_axis(-1)


_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual")
_LOGIC = ("And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Not", "Or", "Xor")
_ANY_NUMBER = tuple(range(64))

FACTS: Mapping[str, OperatorFacts] = {
    **dict.fromkeys(_LOGIC, pointwise()),
    **dict.fromkeys((*_COMPARISONS, "Ceil", "Floor", "Round", "Sign"), pointwise(has_gradient=False)),
    **dict.fromkeys(("Add", "Div", "Mul", "Sub"), pointwise(operands=(0, 1))),
    **dict.fromkeys(("Abs", "Neg", "Reciprocal"), pointwise(passes_weights=True)),
    **dict.fromkeys(("Acos", "Asin", "Atan", "Cos", "Sin", "Tan"), pointwise(4)),
    **dict.fromkeys(("Atanh", "Cosh", "Sinh"), pointwise(6)),
    **dict.fromkeys(("Acosh", "Asinh", "Erf"), pointwise(8)),
    **dict.fromkeys(("Exp", "Log"), pointwise(4, passes_weights=True)),
    **dict.fromkeys(
        ("Max", "Min", "Sum"), pointwise(workspace=_sum_workspace, workspace_first=True, operands=_ANY_NUMBER)
    ),
    **dict.fromkeys(("LeakyRelu", "Shrink", "ThresholdedRelu"), pointwise(2, runs_in_place=True)),
    **dict.fromkeys(("HardSigmoid", "Softsign"), pointwise(3, runs_in_place=True)),
    **dict.fromkeys(("Elu", "Selu"), pointwise(5, runs_in_place=True)),
    **dict.fromkeys(("Sigmoid", "Tanh"), pointwise(6, runs_in_place=True, passes_weights=True)),
    **dict.fromkeys(
        ("LogSoftmax", "Softmax"),
        OperatorFacts(flops=7, independent=_independent_softmax, runs_in_place=True, workspace=_softmax_workspace),
    ),
    "Cast": pointwise(0, passes_weights=True),
    "CastLike": pointwise(0, settings=Settings((1,), "determines only the type"), passes_weights=True),
    "Celu": pointwise(5),
    "Clip": pointwise(runs_in_place=True, settings=Settings((1, 2), "limit")),
    "CumSum": OperatorFacts(independent=_independent_cumulative),
    "Dropout": pointwise(2, settings=Settings((1,), "rate")),
    "Gelu": pointwise(12),
    "HardSwish": pointwise(4, workspace=_one_more_workspace),
    "Hardmax": OperatorFacts(independent=_independent_softmax, workspace=_softmax_workspace),
    "Mean": pointwise(operands=_ANY_NUMBER),
    "Mish": pointwise(14),
    "Mod": pointwise(3, settings=Settings((1,), "divisor")),
    "PRelu": pointwise(2, parameters=(1,)),
    "Pow": pointwise(4, operands=(0, 1)),
    "Relu": pointwise(runs_in_place=True),
    "Softplus": pointwise(8, runs_in_place=True, passes_weights=True),
    "Sqrt": pointwise(2, passes_weights=True),
    "Swish": pointwise(7, workspace=_one_more_workspace),
    "Where": pointwise(workspace=_where_workspace, workspace_first=True, operands=(1, 2)),
}
