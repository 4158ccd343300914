"""Facts about operators on quantised weights."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.model.operators.facts import OperatorFacts, Settings

FACTS: Mapping[str, OperatorFacts] = {
    "DequantizeLinear": OperatorFacts(quantised_bias=(), has_gradient=False),
    "DynamicQuantizeMatMul": OperatorFacts(quantised_bias=(4,)),
    "GatherBlockQuantized": OperatorFacts(
        settings=Settings(tuple(range(1, 16)), "scale of a quantised weight")
    ),
    "MatMulBnb4": OperatorFacts(quantised_bias=()),
    "MatMulNBits": OperatorFacts(quantised_bias=(5,)),
    "QuantizeLinear": OperatorFacts(quantised_bias=()),
}
