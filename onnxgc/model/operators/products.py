"""Facts about matrix products, convolutions, attention, recurrent layers and quantised weights."""

import math
from collections.abc import Callable, Iterable, Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.einsum_equation import Equation, equation_labels, parse_equation
from onnxgc.model.operators.facts import (
    MULTIPLY_ADD,
    OperatorFacts,
    Place,
    Settings,
    Types,
    axes_of_data,
    first_axis,
    has_input,
    itemsize,
    output_of,
    shape_of,
)


def _conv_flops(node: Node, types: Types) -> int:
    _, channels, *kernel = shape_of(node, types, 1)
    count = output_of(node, types).element_count
    return MULTIPLY_ADD * count * channels * math.prod(kernel) + (count if has_input(node, 2) else 0)


def _conv_transpose_flops(node: Node, types: Types) -> int:
    _, channels, *kernel = shape_of(node, types, 1)
    bias = output_of(node, types).element_count if has_input(node, 2) else 0
    return MULTIPLY_ADD * math.prod(shape_of(node, types, 0)) * channels * math.prod(kernel) + bias


def _gemm_flops(node: Node, types: Types) -> int:
    inner = shape_of(node, types, 0)[0 if node.attribute("transA", 0) else 1]
    count = output_of(node, types).element_count
    return MULTIPLY_ADD * count * inner + (count if has_input(node, 2) else 0)


def _matmul_flops(node: Node, types: Types) -> int:
    return MULTIPLY_ADD * output_of(node, types).element_count * shape_of(node, types, 0)[-1]


def _fused_matmul_flops(node: Node, types: Types) -> int:
    inner = shape_of(node, types, 0)[-2 if node.attribute("transA", 0) else -1]
    return MULTIPLY_ADD * output_of(node, types).element_count * inner


def _einsum_flops(node: Node, types: Types) -> int:
    """Two operations for each combination of index values."""
    equation = _equation(node, types)
    return (MULTIPLY_ADD if len(equation.operands) > 1 else 1) * math.prod(equation.sizes.values())


def _attention_flops(node: Node, types: Types) -> int:
    """Two matrix products, and a softmax between them."""
    query, key = shape_of(node, types, 0), shape_of(node, types, 1)
    scores = math.prod(query) * key[-2]
    return 2 * MULTIPLY_ADD * scores


def _recurrent_flops(gates: int) -> Callable[[Node, Types], int]:
    def flops(node: Node, types: Types) -> int:
        length, batch, features = shape_of(node, types, 0)
        directions, _, hidden = shape_of(node, types, 2)
        return MULTIPLY_ADD * length * batch * directions * gates * hidden * (features + hidden)

    return flops


def _independent_matmul(place: Place) -> bool:
    if place.index == 0:
        return place.axis != place.rank - 1
    return place.axis != max(place.rank - 2, 0)


def _independent_gemm(place: Place) -> bool:
    if place.index == 2:
        return True
    summed = (1, 0)[place.index]
    is_turned = place.node.attribute(("transA", "transB")[place.index], 0)
    return place.axis != (1 - summed if is_turned else summed)


def _independent_einsum(place: Place) -> bool:
    text = str(place.node.attribute("equation"))
    operands, output = equation_labels(text, [place.rank] * len(place.node.inputs))
    labels = operands[place.index]
    return labels[place.axis] in output and labels.count(labels[place.axis]) == 1


def _independent_recurrent(place: Place) -> bool:
    """Samples are on axis 1, or 0 with `layout`; a state has its directions there. X: [T, N, C]."""
    samples = 0 if place.node.attribute("layout", 0) or place.index == 4 else 1
    return place.index in (0, 4, 5, 6) and place.axis == samples


def _independent_attention(place: Place) -> bool:
    return place.axis == 0 and (place.index < 3 or place.rank == 4)


# MLAS_SGEMM_STRIDEN x MLAS_SGEMM_STRIDEK floats.
_CONV_THREAD_BYTES = 128 * 128 * 4


def _conv_workspace(node: Node, types: Types) -> int:
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
    return math.prod(weight.shape[1:]) * positions * itemsize(y)


def _conv_transpose_workspace(node: Node, types: Types) -> int:
    """The columns of one image and one group, which the kernel computes before it folds them."""
    x, weight = types[node.inputs[0]], types[node.inputs[1]]
    return math.prod(weight.shape[1:]) * math.prod(x.shape[2:]) * itemsize(x)


def _einsum_workspace(node: Node, types: Types) -> int:
    """Transposed operands and intermediate results of pairwise contraction.

    All operands take their axes in the order in which letters first occur, those that need it by a copy
    that stays. Then each pair is one product [both, left, summed] x [both, summed, right], for which
    either may be copied again, and whose result is not the node's output but copied there.
    Source: EinsumTypedComputeProcessor.
    """
    equation = _equation(node, types)
    # Labels under an ellipsis are first.
    labels = sorted(equation.sizes, key=lambda label: label[0] != ".")
    order = {label: position for position, label in enumerate(labels)}
    last_use = {label: index for index, labels in enumerate(equation.operands) for label in labels}

    def bytes_of(labels: Iterable[str]) -> int:
        return math.prod(equation.sizes[label] for label in labels) * itemsize(types[node.outputs[0]])

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


def _equation(node: Node, types: Types) -> Equation:
    return parse_equation(str(node.attribute("equation")), [types[name].shape for name in node.inputs])


FACTS: Mapping[str, OperatorFacts] = {
    "Attention": OperatorFacts(flops=_attention_flops, independent=_independent_attention),
    "Conv": OperatorFacts(flops=_conv_flops, independent=axes_of_data(0), workspace=_conv_workspace, parameters=(1, 2)),
    "ConvTranspose": OperatorFacts(
        flops=_conv_transpose_flops, independent=axes_of_data(0), workspace=_conv_transpose_workspace, parameters=(1, 2)
    ),
    "DeformConv": OperatorFacts(parameters=(1, 3)),
    "Einsum": OperatorFacts(
        flops=_einsum_flops,
        independent=_independent_einsum,
        workspace=_einsum_workspace,
        workspace_first=True,
        parameters=tuple(range(8)),
    ),
    "GRU": OperatorFacts(
        flops=_recurrent_flops(3), independent=_independent_recurrent, parameters=(1, 2, 3), initial_states=(5,)
    ),
    "Gemm": OperatorFacts(flops=_gemm_flops, independent=_independent_gemm, parameters=(0, 1, 2)),
    "LSTM": OperatorFacts(
        flops=_recurrent_flops(4), independent=_independent_recurrent, parameters=(1, 2, 3, 7), initial_states=(5, 6)
    ),
    "com.microsoft::FusedMatMul": OperatorFacts(flops=_fused_matmul_flops),
    "MatMul": OperatorFacts(flops=_matmul_flops, independent=_independent_matmul, parameters=(0, 1)),
    "RNN": OperatorFacts(
        flops=_recurrent_flops(1), independent=_independent_recurrent, parameters=(1, 2, 3), initial_states=(5,)
    ),
    "RotaryEmbedding": OperatorFacts(independent=first_axis, settings=Settings((1, 2), "table of sines and cosines")),
    "DequantizeLinear": OperatorFacts(quantised_bias=(), has_gradient=False),
    "DynamicQuantizeMatMul": OperatorFacts(quantised_bias=(4,)),
    "GatherBlockQuantized": OperatorFacts(settings=Settings(tuple(range(1, 16)), "scale of a quantised weight")),
    "MatMulBnb4": OperatorFacts(quantised_bias=()),
    "MatMulNBits": OperatorFacts(quantised_bias=(5,)),
    "QuantizeLinear": OperatorFacts(quantised_bias=()),
}
