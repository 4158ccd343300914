"""Rejects quantised models, since integers have no gradient.

Weights that are stored as integers and dequantised in the graph are allowed; they stay constant.
"""

from collections import defaultdict
from collections.abc import Iterable

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import Draft, operator_name, reads_of
from onnxgc.model.core.ir import Node

# fmt: off
_QUANTIZING = frozenset([
    "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul", "QuantizeLinear",
])
# Prefixes of ONNX Runtime's quantised operators.
_QUANTIZING_PREFIXES = (
    "DynamicQuantize", "MatMulInteger", "MulInteger", "QAttention", "QEmbed", "QGemm", "QLinear", "QMoE",
    "QOrdered", "Quantize",
)
# fmt: on


def check_not_quantized(draft: Draft, parameters: Iterable[str]) -> None:
    """Checks that no quantisation lies between a parameter and the outputs.

    In a model without parameters, whose weights must be integers, any quantisation is an error.

    Raises:
        UnsupportedOperatorError: with the number and the first node of each quantising operator.
    """
    reached = set(parameters)
    has_no_parameters = not reached
    quantizing: defaultdict[str, list[str]] = defaultdict(list)
    for node in draft.nodes:
        is_reached = not reached.isdisjoint(reads_of(node))
        if is_reached:
            reached.update(node.outputs)
        if _is_quantizing(node) and (is_reached or has_no_parameters):
            quantizing[operator_name(node)].append(node.label)
    if not quantizing:
        return
    listed = ", ".join(f"{len(names)} {operator} (first {names[0]})" for operator, names in sorted(quantizing.items()))
    raise UnsupportedOperatorError(
        f"the model is quantised, and integers have no gradient: {listed}; train the floating-point "
        "model from which it was made, and quantise the result"
    )


def _is_quantizing(node: Node) -> bool:
    return node.op in _QUANTIZING or (bool(node.domain) and node.op.startswith(_QUANTIZING_PREFIXES))
