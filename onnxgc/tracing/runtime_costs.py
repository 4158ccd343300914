"""How ONNX Runtime allocates: which operators share memory and which take a workspace.

Source: kernel definitions of ONNX Runtime's CPU provider (`Alias`, `MayInplace`), checked by
measuring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from onnxgc.model.ir import Node, TensorType

VIEW_OPERATORS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
IN_PLACE_OPERATORS = frozenset(
    {
        "Clip", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "ScatterElements", "Sigmoid",
        "Softmax", "Tanh",
    }
)  # fmt: skip


Types = Mapping[str, TensorType]


def workspace_bytes(node: Node, types: Types) -> int:
    """Bytes that the operator's kernel allocates while it runs and gives back after.

    Left out: 64 KiB a thread in convolutions, and what a kernel keeps per channel.
    """
    rule = _WORKSPACES.get(node.op) if not node.domain else None
    return rule(node, types) if rule is not None else 0


def _conv(node: Node, types: Types) -> int:
    """All columns of one image and group, where there are more filters than output positions.

    Otherwise the kernel takes a few columns at a time, and for a plain product none. Source:
    MlasConvPrepare.
    """
    weight, y = types[node.inputs[1]], types[node.outputs[0]]
    positions = math.prod(y.shape[2:])
    filters = weight.shape[0] // int(node.attribute("group", 1))
    plain = all(size == 1 for size in weight.shape[2:]) and not any(
        [*(stride - 1 for stride in node.attribute("strides") or ()), *(node.attribute("pads") or ())]
    )
    if plain or filters <= positions:
        return 0
    return math.prod(weight.shape[1:]) * positions * _itemsize(y)


def _conv_transpose(node: Node, types: Types) -> int:
    """The columns of one image and one group, which the kernel computes before it folds them."""
    x, weight = types[node.inputs[0]], types[node.inputs[1]]
    return math.prod(weight.shape[1:]) * math.prod(x.shape[2:]) * _itemsize(x)


def _lrn(node: Node, types: Types) -> int:
    """The scale of every element, and one image's squares with the window's margin."""
    x = types[node.inputs[0]]
    margin = x.shape[1] + int(node.attribute("size")) - 1
    return x.size_bytes + margin * math.prod(x.shape[2:]) * _itemsize(x)


def _softmax(node: Node, types: Types) -> int:
    """Input and output with the axis last, unless it is."""
    x = types[node.inputs[0]]
    rank = len(x.shape)
    return 0 if int(node.attribute("axis", -1)) % rank == rank - 1 else 2 * x.size_bytes


def _sum(node: Node, types: Types) -> int:
    """A partial sum, from three operands on."""
    return types[node.outputs[0]].size_bytes if len(node.inputs) > 2 else 0


def _itemsize(tensor: TensorType) -> int:
    return tensor.size_bytes // max(tensor.element_count, 1)


_WORKSPACES: Mapping[str, Callable[[Node, Types], int]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "LRN": _lrn,
    "LogSoftmax": _softmax,
    "Softmax": _softmax,
    "Sum": _sum,
}
