"""Rewrites of single nodes that need static types."""

import math
from collections.abc import Callable

import numpy as np

from onnxgc.model.core.constant_folding import MAX_FOLDED_OUTPUT
from onnxgc.model.core.ir import Array, Node, TensorType

TypeOf = Callable[[str], TensorType | None]
ValueOf = Callable[[str], Array | None]


def cast_like_as_cast(node: Node, type_of: TypeOf) -> Node:
    """CastLike as the equivalent Cast, if the types are known."""
    if node.domain or node.op != "CastLike":
        return node
    like = type_of(node.inputs[1])
    if like is None:
        return node
    return node.as_operator("Cast", node.inputs[:1], to=like.dtype)


def range_value(node: Node, value_of: ValueOf) -> Array | None:
    """The result of a Range of constants, scalars or (as in ONNX's own functions) vectors of one number."""
    if node.domain or node.op != "Range":
        return None
    values = [value_of(name) for name in node.inputs]
    limits = [value.reshape(-1)[0] for value in values if value is not None and value.size == 1]
    if len(limits) < 3 or limits[2] == 0:
        return None
    start, limit, step = limits
    exact = [float(limit), float(start), float(step)]
    steps = (exact[0] - exact[1]) / exact[2]
    if not all(map(math.isfinite, exact)) or steps > MAX_FOLDED_OUTPUT:
        return None
    count = max(math.ceil((limit - start) / step), 0)
    return np.asarray(start + np.arange(count) * step, dtype=start.dtype)
