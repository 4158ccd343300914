"""How ONNX Runtime allocates: which operators share memory and which take a workspace.

Source: kernel definitions of ONNX Runtime's CPU provider (`Alias`, `MayInplace`), checked by
measuring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from onnxgc.gradients.einsum import Equation, parsed
from onnxgc.model.core.ir import Node, TensorType

VIEW_OPERATORS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
IN_PLACE_OPERATORS = frozenset(
    {
        "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "ScatterElements", "Selu", "Shrink",
        "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu",
    }
)  # fmt: skip
WORKSPACE_FIRST_OPERATORS = frozenset({"Einsum", "Max", "Min", "Sum", "Where"})
"""Their kernels have the result in a workspace, or parts of it, before they ask for the output."""

Types = Mapping[str, TensorType]


def workspace_bytes(node: Node, types: Types) -> int:
    """Bytes that the operator's kernel allocates while it runs, on one thread, and gives back after.

    Left out is what a kernel keeps per channel.
    """
    rule = _WORKSPACES.get(node.op) if not node.domain else None
    return rule(node, types) if rule is not None else 0


# MLAS_SGEMM_STRIDEN x MLAS_SGEMM_STRIDEK floats.
_CONV_THREAD_BYTES = 128 * 128 * 4
# Two indices of eight bytes and two weights of four.
_RESIZE_POSITION_BYTES = 24


def _conv(node: Node, types: Types) -> int:
    """All columns of one image and group, where there are more filters than output positions.

    Otherwise each thread takes a few columns at a time, and for a plain product there are none.
    Source: MlasConvPrepare.
    """
    weight, y = types[node.inputs[1]], types[node.outputs[0]]
    positions = math.prod(y.shape[2:])
    filters = weight.shape[0] // int(node.attribute("group", 1))
    plain = all(size == 1 for size in weight.shape[2:]) and not any(
        [*(stride - 1 for stride in node.attribute("strides") or ()), *(node.attribute("pads") or ())]
    )
    if plain:
        return 0
    if filters <= positions:
        return _CONV_THREAD_BYTES
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


def _resize(node: Node, types: Types) -> int:
    """Where to read and by which weights, for each position of an axis; with antialiasing also one image.

    That is resized axis by axis from the last on, and what comes before the first is not the output.
    Source: SetupUpsampleBilinear, SetupUpsampleTrilinear and the ResizeBiLinear functions of antialiasing.
    """
    x, y = types[node.inputs[0]], types[node.outputs[0]]
    is_antialiased = bool(node.attribute("antialias", 0))
    if node.attribute("mode", "nearest") != "linear" and not is_antialiased:
        return 0
    tables = _RESIZE_POSITION_BYTES * sum(y.shape[2:] or y.shape)
    if not is_antialiased:
        return tables
    images = ((*x.shape[1:axis], *y.shape[axis:]) for axis in range(3, len(x.shape)))
    return tables + sum(math.prod(image) for image in images) * _itemsize(x)


def _softmax(node: Node, types: Types) -> int:
    """Input and output with the axis last, unless it is."""
    x = types[node.inputs[0]]
    rank = len(x.shape)
    return 0 if int(node.attribute("axis", -1)) % rank == rank - 1 else 2 * x.size_bytes


def _sum(node: Node, types: Types) -> int:
    """Partial results, the last of which is the output: each is there until the next one is made."""
    y = types[node.outputs[0]]
    shapes = itertools.accumulate((types[name].shape for name in node.inputs), np.broadcast_shapes)
    sizes = [math.prod(shape) * _itemsize(y) for shape in shapes][1:]
    return max(map(sum, itertools.pairwise(sizes)), default=y.size_bytes) - y.size_bytes


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
    "Hardmax": _softmax,
    "LRN": _lrn,
    "LogSoftmax": _softmax,
    "Max": _sum,
    "Min": _sum,
    "Resize": _resize,
    "Softmax": _softmax,
    "Sum": _sum,
    "Swish": _one_more,
    "Where": _where,
}
