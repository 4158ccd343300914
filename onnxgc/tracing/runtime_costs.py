"""How ONNX Runtime allocates: which operators share memory and which take a workspace.

Source: kernel definitions of ONNX Runtime's CPU provider (`Alias`, `MayInplace`), checked by
measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxgc.model.ir import Node, TensorType

VIEW_OPERATORS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
IN_PLACE_OPERATORS = frozenset(
    {
        "Clip", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "ScatterElements", "Sigmoid",
        "Softmax", "Tanh",
    }
)  # fmt: skip


def workspace_bytes(node: Node, types: Mapping[str, TensorType]) -> int:
    """Bytes that the operator's kernel allocates while it runs and gives back after."""
    if node.op == "ConvTranspose":
        return _transposed_columns(types[node.inputs[0]], types[node.inputs[1]], node)
    return 0


def _transposed_columns(dy: TensorType, weight: TensorType, node: Node) -> int:
    """The columns of one image and one group, which the kernel computes before it folds them."""
    itemsize = dy.size_bytes // max(dy.element_count, 1)
    return math.prod(weight.shape[1:]) * math.prod(dy.shape[2:]) * itemsize
