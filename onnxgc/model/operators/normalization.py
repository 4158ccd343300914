"""Facts about normalisations. x: [N, C, spatial...] unless they take an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import (
    MULTIPLY_ADD,
    OperatorFacts,
    Place,
    Types,
    all_but_named_axis,
    axes_of_data,
    itemsize,
    output_of,
)


def _lrn_flops(node: Node, types: Types) -> int:
    return output_of(node, types).element_count * (MULTIPLY_ADD * int(node.attribute("size")) + 6)


def _independent_axes_in_front(place: Place) -> bool:
    return place.index == 0 and place.axis < place.own_axis(-1)


def _lrn_workspace(node: Node, types: Types) -> int:
    """The scale of every element, and one image's squares with the window's margin."""
    x = types[node.inputs[0]]
    margin = x.shape[1] + int(node.attribute("size")) - 1
    return x.size_bytes + margin * math.prod(x.shape[2:]) * itemsize(x)


FACTS: Mapping[str, OperatorFacts] = {
    "BatchNormalization": OperatorFacts(
        flops=2,
        independent=lambda place: place.index == 0 and place.axis != 1,
        parameters=(1, 2),
        statistics=(3, 4),
    ),
    "GroupNormalization": OperatorFacts(flops=8, independent=axes_of_data(0), parameters=(1, 2)),
    "InstanceNormalization": OperatorFacts(flops=8, independent=axes_of_data(0), parameters=(1, 2)),
    "LRN": OperatorFacts(flops=_lrn_flops, independent=axes_of_data(0), workspace=_lrn_workspace),
    "LayerNormalization": OperatorFacts(flops=8, independent=_independent_axes_in_front, parameters=(1, 2)),
    "LpNormalization": OperatorFacts(flops=4, independent=all_but_named_axis(-1, 0)),
    "MeanVarianceNormalization": OperatorFacts(flops=8),
    "RMSNormalization": OperatorFacts(flops=5, independent=_independent_axes_in_front, parameters=(1,)),
}
