"""Small rewrites of single nodes that need static types."""

from __future__ import annotations

import math
from collections.abc import Callable, Container

import numpy as np

from onnxgc.model.ir import Array, Node, TensorType

TypeOf = Callable[[str], TensorType | None]
ValueOf = Callable[[str], Array | None]


def batched_target(node: Node, type_of: TypeOf, value_of: ValueOf, old: int, new: int) -> Array | None:
    """The Reshape target for the new batch where the literal one was made for the old batch.

    A target is rewritten only where it no longer fits: its first entry is the old batch, or is the
    product of leading dimensions that start with the batch.
    """
    if node.domain or node.op != "Reshape" or len(node.inputs) < 2:
        return None
    source, target = type_of(node.inputs[0]), value_of(node.inputs[1])
    if (
        source is None
        or target is None
        or target.ndim != 1
        or target.size == 0
        or node.attribute("allowzero", 0)
    ):
        return None
    entries = [int(entry) for entry in target]
    if 0 in entries[len(source.shape) :]:
        return None
    sizes = [source.shape[axis] if entry == 0 else entry for axis, entry in enumerate(entries)]
    if -1 not in sizes:
        return _fitting(entries, sizes, source, old, new)
    # [old, -1] still fits by count, but would move samples into the second dimension.
    if entries[0] == old and source.shape[:1] == (new,) and sizes.index(-1) > 0:
        return np.asarray([new, *entries[1:]], dtype=np.int64)
    return None


def cast_like_as_cast(node: Node, type_of: TypeOf) -> Node:
    """CastLike as the Cast that it is once types are known."""
    if node.domain or node.op != "CastLike":
        return node
    like = type_of(node.inputs[1])
    if like is None:
        return node
    return node.with_changes(op="Cast", inputs=node.inputs[:1], attributes={"to": like.dtype}, rule="Cast")


def range_value(node: Node, value_of: ValueOf) -> Array | None:
    """What a Range of constants gives: ONNX's own functions pass vectors of one number to it."""
    if node.domain or node.op != "Range":
        return None
    values = [value_of(name) for name in node.inputs]
    limits = [value.reshape(-1)[0] for value in values if value is not None and value.size == 1]
    if len(limits) < 3 or limits[2] == 0:
        return None
    start, limit, step = limits
    count = max(math.ceil((limit - start) / step), 0)
    return np.asarray(start + np.arange(count) * step, dtype=start.dtype)


def unused(wanted: str, taken: Container[str]) -> str:
    """`wanted`, with a suffix where it is taken."""
    name, suffix = wanted, 1
    while name in taken:
        suffix += 1
        name = f"{wanted}_{suffix}"
    return name


def _fitting(entries: list[int], sizes: list[int], source: TensorType, old: int, new: int) -> Array | None:
    count = source.element_count
    if math.prod(sizes) == count:
        return None
    rest = math.prod(sizes[1:])
    if entries[0] == old and new * rest == count:
        return np.asarray([new, *entries[1:]], dtype=np.int64)
    for merged in range(2, len(source.shape) + 1):
        leading = math.prod(source.shape[:merged])
        if source.shape[0] == new and leading * rest == count and leading * old == entries[0] * new:
            return np.asarray([leading, *entries[1:]], dtype=np.int64)
    return None
