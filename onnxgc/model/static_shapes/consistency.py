"""Checks of a node's shapes that ONNX's inference leaves out."""

from collections.abc import Sequence

import numpy as np

from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.core.node_rewrites import ValueOf

Shape = tuple[int, ...]

_WINDOWED = frozenset(["Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"])
# Their scale and shift cover the axes from `axis` on.
_SCALED_TRAILING_AXES = frozenset(["LayerNormalization", "RMSNormalization"])


def inconsistency(node: Node, inputs: Sequence[TensorType | None], output: TensorType | None, value_of: ValueOf) -> str:
    """The contradiction between a node and its inputs, or "".

    `output` is the inferred type of the node's first output.
    """
    shapes = [kind.shape if kind is not None else None for kind in inputs]
    problem = (
        _wrong_channels(node, shapes)
        or _misfit_scale(node, shapes)
        or _index_out_of_range(node, shapes, value_of)
        or _ambiguous_slice(node, value_of)
    )
    if problem or output is None:
        return problem
    return _empty_window(node, shapes, output) or _wrong_reshape(node, shapes, output)


def _wrong_channels(node: Node, shapes: Sequence[Shape | None]) -> str:
    if node.op not in ("Conv", "ConvTranspose", "InstanceNormalization"):
        return ""
    source, weight = shapes[:2]
    if not source or not weight:
        return ""
    expected = weight[1] * int(node.attribute("group", 1)) if node.op == "Conv" else weight[0]
    if source[1] == expected:
        return ""
    return f"its weight '{node.inputs[1]}' expects {expected} channels, but '{node.inputs[0]}' has {source[1]}"


def _misfit_scale(node: Node, shapes: Sequence[Shape | None]) -> str:
    if node.op not in _SCALED_TRAILING_AXES or not shapes[0]:
        return ""
    for name, shape in zip(node.inputs[1:], shapes[1:], strict=True):
        if shape and not _may_broadcast(shape, shapes[0]):
            return f"'{name}' of {list(shape)} does not fit '{node.inputs[0]}' of {list(shapes[0])}"
    return ""


def _may_broadcast(shape: Shape, target: Shape) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def _index_out_of_range(node: Node, shapes: Sequence[Shape | None], value_of: ValueOf) -> str:
    if node.op != "Gather" or not shapes[0]:
        return ""
    size, indices = shapes[0][node.attribute("axis", 0)], value_of(node.inputs[1])
    if indices is None or not indices.size or -size <= indices.min() <= indices.max() < size:
        return ""
    outside = indices[(indices < -size) | (indices >= size)]
    return f"index {outside.flat[0]} is out of range for an axis of {size}"


def _ambiguous_slice(node: Node, value_of: ValueOf) -> str:
    if node.op != "Slice" or node.domain or len(node.inputs) < 5 or not node.inputs[4]:
        return ""
    ends, steps = value_of(node.inputs[2]), value_of(node.inputs[4])
    if ends is None or steps is None or ends.shape != steps.shape:
        return ""
    largest = (np.iinfo(np.int32).max, np.iinfo(np.int64).max)
    if not np.any((steps < 0) & np.isin(ends, largest)):
        return ""
    return (
        "it slices backwards with the largest integer as end, which selects no element in ONNX and all in "
        "ONNX Runtime; export it with the smallest integer as end"
    )


def _empty_window(node: Node, shapes: Sequence[Shape | None], output: TensorType) -> str:
    if node.op not in _WINDOWED or shapes[0] is None:
        return ""
    if 0 in shapes[0]:
        return f"'{node.inputs[0]}' of {list(shapes[0])} has no elements"
    if min(output.shape) < 1:
        return f"'{node.inputs[0]}' of {list(shapes[0])} is too small for its kernel"
    return ""


def _wrong_reshape(node: Node, shapes: Sequence[Shape | None], output: TensorType) -> str:
    if node.op != "Reshape" or shapes[0] is None:
        return ""
    if TensorType(output.dtype, shapes[0]).element_count == output.element_count:
        return ""
    return f"it cannot reshape '{node.inputs[0]}' of {list(shapes[0])} to {list(output.shape)}"
