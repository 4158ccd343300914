"""How ONNX Runtime allocates: which operators share memory and which take a workspace.

Source: kernel definitions of ONNX Runtime's CPU provider (`Alias`, `MayInplace`), checked by
measuring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from onnxgc.gradients.einsum import Equation, parsed
from onnxgc.model.ir import Node, TensorType

VIEW_OPERATORS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
IN_PLACE_OPERATORS = frozenset(
    {
        "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "ScatterElements", "Selu", "Shrink",
        "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu",
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


def _einsum(node: Node, types: Types) -> int:
    """Operands and results laid out anew, in pairs from left to right.

    All operands take their axes in the order in which letters first occur, those that need it by a copy
    that stays. Then each pair is one product [both, left, summed] x [both, summed, right], for which
    either may be copied again, and whose result is not the node's output but copied there.
    Source: EinsumTypedComputeProcessor.
    """
    equation = _parsed_equation(node, types)
    order = {label: place for place, label in enumerate(equation.sizes)}
    last_use = {label: index for index, labels in enumerate(equation.operands) for label in labels}

    def bytes_of(labels: Iterable[str]) -> int:
        return math.prod(equation.sizes[label] for label in labels) * _itemsize(types[node.outputs[0]])

    def summed_with(index: int) -> set[str]:
        return {label for label in order if last_use[label] == index and label not in equation.output}

    kept = sum(
        bytes_of(set(labels))
        for labels in equation.operands
        if [order[label] for label in labels] != sorted({order[label] for label in labels})
    )
    operands = [
        {label for label, size in zip(labels, types[name].shape, strict=True) if size != 1}
        for labels, name in zip(equation.operands, node.inputs, strict=True)
    ]
    left = operands[0] - summed_with(0)
    intermediate = bytes_of(left) if left != operands[0] else 0
    is_in_order = [label for label in order if label in equation.output] == list(equation.output)
    most = intermediate + (0 if is_in_order else bytes_of(equation.output))
    for index, right in enumerate(operands[1:], 1):
        summed = summed_with(index)
        both, rows = (left & right) - summed, left - right - summed
        columns = set(order) - both - rows - summed
        arranged = [sorted(part, key=order.__getitem__) for part in (both, rows, summed, columns)]
        both_in, rows_in, summed_in, columns_in = arranged
        used = 0
        for own, other, layout in (
            (left, right, (*both_in, *rows_in, *summed_in, *columns_in)),
            (right, left, (*both_in, *summed_in, *columns_in, *rows_in)),
        ):
            alone = own & summed - other
            if alone:
                shown = [order[label] for label in layout if label in own - alone]
                used += bytes_of(own - alone) * (1 if shown == sorted(shown) else 2)
            elif list(layout) != list(order):
                used += bytes_of(own)
        result = (left | right) - summed
        is_last = index == len(operands) - 1
        made = [label for label in (*both_in, *rows_in, *columns_in) if label in result]
        wanted = [label for label in (equation.output if is_last else order) if label in result]
        copies = 1 if made == wanted else 2
        most = max(most, intermediate + used + copies * bytes_of(result))
        left, intermediate = result, bytes_of(result)
    return kept + most


def _parsed_equation(node: Node, types: Types) -> Equation:
    """Labels of an Einsum node, those under an ellipsis first, as its kernel counts them."""
    value = node.attribute("equation")
    text = value.decode() if isinstance(value, bytes) else str(value)
    equation = parsed(text, [types[name].shape for name in node.inputs])
    first = sorted(equation.sizes, key=lambda label: (label[0] != ".", 0))
    return replace(equation, sizes={label: equation.sizes[label] for label in first})


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
    """A partial result, from three operands on."""
    return types[node.outputs[0]].size_bytes if len(node.inputs) > 2 else 0


def _where(node: Node, types: Types) -> int:
    """Either choice on its own, each in the shape of condition and operand."""
    condition, *operands = (types[name] for name in node.inputs)
    shapes = (np.broadcast_shapes(condition.shape, operand.shape) for operand in operands)
    return sum(math.prod(shape) for shape in shapes) * _itemsize(types[node.outputs[0]])


def _one_more(node: Node, types: Types) -> int:
    """A tensor inside an operator that the runtime replaces by those that define it."""
    return types[node.outputs[0]].size_bytes


def _itemsize(tensor: TensorType) -> int:
    return tensor.size_bytes // max(tensor.element_count, 1)


_WORKSPACES: Mapping[str, Callable[[Node, Types], int]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "HardSwish": _one_more,
    "LRN": _lrn,
    "LogSoftmax": _softmax,
    "Max": _sum,
    "Min": _sum,
    "Softmax": _softmax,
    "Sum": _sum,
    "Swish": _one_more,
    "Where": _where,
}
