"""Facts about activations, Dropout and Softmax."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import OperatorFacts, Place, Settings, Types, pointwise


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


FACTS: Mapping[str, OperatorFacts] = {
    "Celu": pointwise(5),
    "Dropout": pointwise(2, settings=Settings((1,), "rate")),
    "Elu": pointwise(5, runs_in_place=True),
    "Gelu": pointwise(12),
    "HardSigmoid": pointwise(3, runs_in_place=True),
    "HardSwish": pointwise(4, workspace=_one_more_workspace),
    "Hardmax": OperatorFacts(independent=_independent_softmax, workspace=_softmax_workspace),
    "LeakyRelu": pointwise(2, runs_in_place=True),
    "LogSoftmax": OperatorFacts(
        flops=7, independent=_independent_softmax, runs_in_place=True, workspace=_softmax_workspace
    ),
    "Mish": pointwise(14),
    "PRelu": pointwise(2, parameters=(1,)),
    "Relu": pointwise(runs_in_place=True),
    "Selu": pointwise(5, runs_in_place=True),
    "Shrink": pointwise(2, runs_in_place=True),
    "Sigmoid": pointwise(6, runs_in_place=True, passes_weights=True),
    "Softmax": OperatorFacts(
        flops=7, independent=_independent_softmax, runs_in_place=True, workspace=_softmax_workspace
    ),
    "Softplus": pointwise(8, runs_in_place=True, passes_weights=True),
    "Softsign": pointwise(3, runs_in_place=True),
    "Swish": pointwise(7, workspace=_one_more_workspace),
    "Tanh": pointwise(6, runs_in_place=True, passes_weights=True),
    "ThresholdedRelu": pointwise(2, runs_in_place=True),
}
