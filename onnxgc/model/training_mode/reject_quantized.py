"""Quantised models: told and refused, since whole numbers have no gradient.

Weights that are only stored as whole numbers and dequantised in the graph do no harm: they stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import Draft, operator_name, reads_of
from onnxgc.model.core.ir import Node

_QUANTIZING = frozenset(
    [
        "ConvInteger",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "QuantizeLinear",
    ]
)
# Beginnings of what ONNX Runtime calls its quantised operators.
_OTHER_QUANTIZING = (
    "DynamicQuantize", "MatMulInteger", "MulInteger", "QAttention", "QEmbed", "QGemm", "QLinear", "QMoE",
    "QOrdered", "Quantize",
)  # fmt: skip


def check_not_quantized(draft: Draft, parameters: Iterable[str]) -> None:
    """Raises `UnsupportedOperatorError` where quantisation cuts parameters off, naming every operator.

    It cuts off those in front of it. A model without parameters has them only as whole numbers.
    """
    reached = set(parameters)
    every = not reached
    cutting: dict[str, list[str]] = {}
    for node in draft.nodes:
        is_reached = any(name in reached for name in reads_of(node))
        if is_reached:
            reached.update(node.outputs)
        if _is_quantizing(node) and (is_reached or every):
            cutting.setdefault(operator_name(node), []).append(node.named)
    if not cutting:
        return
    listed = ", ".join(
        f"{len(names)} {operator} (first {names[0]})" for operator, names in sorted(cutting.items())
    )
    raise UnsupportedOperatorError(
        f"the model is quantised, and whole numbers have no gradient: {listed}; train the floating-point "
        "model that it was made from, and quantise the result"
    )


def _is_quantizing(node: Node) -> bool:
    return node.op in _QUANTIZING or (bool(node.domain) and node.op.startswith(_OTHER_QUANTIZING))
