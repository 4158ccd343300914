"""Facts about pooling. x: [N, C, spatial...]."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import OperatorFacts, Types, axes_of_data, output_of


def _pool_flops(node: Node, types: Types) -> int:
    kernel: list[int] = node.attribute("kernel_shape")
    return output_of(node, types).element_count * math.prod(kernel)


FACTS: Mapping[str, OperatorFacts] = {
    "AveragePool": OperatorFacts(flops=_pool_flops, independent=axes_of_data(0, 1)),
    "GlobalAveragePool": OperatorFacts(independent=axes_of_data(0, 1)),
    "GlobalLpPool": OperatorFacts(flops=4, independent=axes_of_data(0, 1)),
    "GlobalMaxPool": OperatorFacts(independent=axes_of_data(0, 1)),
    "LpPool": OperatorFacts(flops=_pool_flops, independent=axes_of_data(0, 1)),
    "MaxPool": OperatorFacts(flops=_pool_flops, independent=axes_of_data(0, 1)),
}
