"""ONNX Runtime's attention operators in standard operators."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper

from onnxgc.model.static_shapes.contrib_builder import ContribBuilder


def attention(f: ContribBuilder) -> None:
    """softmax(Q K^T scale + mask) V, where one product computes Q, K and V. Input: [N, S, D]."""
    f.reject_inputs(4, 6)
    f.reject_outputs(1)
    if f.attribute("do_rotary", 0):
        raise f.unsupported("it rotates its queries and keys")
    width = f.shape(f.input(1))[1]
    sizes = list(f.attribute("qkv_hidden_sizes") or [width // 3] * 3)
    projected = f.emit("MatMul", f.input(0), f.input(1))
    if f.has_input(2):
        projected = f.emit("Add", projected, f.input(2))
    parts = f.split(projected, sizes, 2)
    _attend(f, *parts, mask=f.input_or_empty(3), bias=f.input_or_empty(5))


def multi_head_attention(f: ContribBuilder) -> None:
    """softmax(Q K^T scale + mask) V. Query: [N, S, D], key and value: [N, T, D]."""
    f.reject_inputs(6, 7, 8, 9)
    f.reject_outputs(1, 2, 3)
    has_all = f.has_input(1) and f.has_input(2)
    if not has_all or any(len(f.shape(f.input(index))) != 3 for index in range(3)):
        raise f.unsupported("its query, key and value are not three tensors [batch, sequence, width]")
    query, key, value = (f.input(index) for index in range(3))
    if f.has_input(3):
        widths = [f.shape(name)[2] for name in (query, key, value)]
        parts = f.split(f.input(3), widths, 0)
        query, key, value = (
            f.emit("Add", name, part) for name, part in zip((query, key, value), parts, strict=True)
        )
    _attend(f, query, key, value, mask=f.input_or_empty(4), bias=f.input_or_empty(5))


def _attend(f: ContribBuilder, query: str, key: str, value: str, *, mask: str, bias: str) -> None:
    heads = int(f.attribute("num_heads"))
    batch, rows, width = f.shape(query)
    columns = f.shape(key)[1]
    scale = float(f.attribute("scale", 0.0)) or 1 / math.sqrt(width // heads)

    def by_head(tensor: str, perm: list[int]) -> str:
        length, size = f.shape(tensor)[1:]
        heads_apart = f.emit("Reshape", tensor, f.ints(batch, length, heads, size // heads))
        return f.emit("Transpose", heads_apart, perm=perm)

    scaled = f.emit("Mul", query, f.number(scale))
    scores = f.emit("MatMul", by_head(scaled, [0, 2, 1, 3]), by_head(key, [0, 2, 3, 1]))
    if bias:
        scores = f.emit("Add", scores, bias)
    masked_score = float(f.attribute("mask_filter_value", -10000.0))
    if mask:
        scores = f.emit("Add", scores, _additive_mask(f, mask, batch, rows, columns, masked_score))
    if f.attribute("unidirectional", 0):
        later = np.triu(np.full((rows, columns), masked_score), 1 + columns - rows)
        dtype = helper.tensor_dtype_to_np_dtype(f.type_of(f.input(0)).dtype)
        scores = f.emit("Add", scores, f.constant(later.astype(dtype)))
    result = f.emit("MatMul", f.emit("Softmax", scores, axis=3), by_head(value, [0, 2, 1, 3]))
    result = f.emit("Transpose", result, perm=[0, 2, 1, 3])
    f.set_output(f.emit("Reshape", result, f.ints(batch, rows, f.shape(value)[2])))


def _additive_mask(
    f: ContribBuilder, mask: str, batch: int, rows: int, columns: int, masked_score: float
) -> str:
    """0 for valid positions and `masked_score` elsewhere; broadcasts to the scores [N, heads, S, T]."""
    shape = f.shape(mask)
    dtype = f.type_of(f.input(0)).dtype
    if shape == (batch,):
        # The number of valid keys of each sample.
        lengths = f.emit("Reshape", mask, f.ints(batch, 1, 1, 1))
        positions = np.arange(columns, dtype=helper.tensor_dtype_to_np_dtype(f.type_of(mask).dtype))
        valid = f.emit("Cast", f.emit("Less", f.constant(positions), lengths), to=dtype)
    elif shape in ((batch, columns), (batch, rows, columns)):
        wide = (batch, 1, 1, columns) if len(shape) == 2 else (batch, 1, rows, columns)
        binary = f.emit("Cast", f.emit("Cast", mask, to=onnx.TensorProto.BOOL), to=dtype)
        valid = f.emit("Reshape", binary, f.ints(*wide))
    else:
        raise f.unsupported(f"its mask '{mask}' has the shape {list(shape)}")
    return f.emit("Mul", f.emit("Sub", f.number(1.0), valid), f.number(masked_score))
