"""Operators that several gradient rules emit: shapes, sums, casts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.gradients.differentiate import GradientContext


def reshape(g: GradientContext, tensor: str, shape: tuple[int, ...]) -> str:
    """A view of `tensor` with a static shape; costs no memory."""
    if 0 in shape:
        return g.emit("Reshape", tensor, g.ints(*shape), allowzero=1)
    return g.emit("Reshape", tensor, g.ints(*shape))


def as_number(g: GradientContext, condition: str) -> str:
    """1 where a bool tensor is true, else 0, in the element type of input 0."""
    return g.emit("Cast", condition, to=g.input_type(0).dtype)


def zeros(g: GradientContext, shape: tuple[int, ...]) -> str:
    """Zeros of the element type of input 0."""
    return expand(g, g.scalar(0.0), shape)


def expand(g: GradientContext, tensor: str, shape: tuple[int, ...]) -> str:
    """`tensor`, of the element type of input 0, broadcast to `shape`.

    An empty shape gets a new tensor: ONNX Runtime drops an Expand from size one to zero.
    """
    if 0 in shape:
        dtype = g.input_type(0).dtype
        value = onnx.numpy_helper.from_array(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(dtype)))
        return g.emit("ConstantOfShape", g.ints(*shape), value=value)
    return g.emit("Expand", tensor, g.ints(*shape))


def reduce_sum(g: GradientContext, tensor: str, axes: tuple[int, ...], *, keepdims: bool = False) -> str:
    return g.emit("ReduceSum", tensor, g.ints(*axes), keepdims=int(keepdims))


def flat_indices(g: GradientContext, vectors: str, indexed: tuple[int, ...]) -> str:
    """Index vectors along the last axis as indices into the axes of sizes `indexed`, flattened to one."""
    if len(indexed) == 1:
        return vectors
    strides = [math.prod(indexed[axis + 1 :]) for axis in range(len(indexed))]
    offsets = g.emit("Mul", g.emit("Mod", vectors, g.ints(*indexed)), g.ints(*strides))
    return reduce_sum(g, offsets, (-1,))


@dataclass(slots=True)
class Sums:
    """In-place additions at indices along one axis of a tensor.

    Indices may repeat. Where x's type is narrower than float32, sums are float32: in narrower types ONNX
    Runtime adds on GPUs only.
    """

    g: GradientContext
    axis: int
    _total: str

    @classmethod
    def on(cls, g: GradientContext, tensor: str, axis: int) -> Sums:
        """Additions to a tensor of x's type."""
        return cls(g, axis, _as_float32(g, tensor) if is_narrow(g) else tensor)

    @classmethod
    def from_zeros(cls, g: GradientContext, shape: tuple[int, ...], axis: int) -> Sums:
        if not is_narrow(g):
            return cls(g, axis, zeros(g, shape))
        return cls(g, axis, g.emit("Expand", g.constants.add(np.zeros((), np.float32)), g.ints(*shape)))

    def add(self, places: str, values: str) -> None:
        """Adds values of x's type at indices of the same shape."""
        values = _as_float32(self.g, values) if is_narrow(self.g) else values
        self._total = self.g.emit(
            "ScatterElements", self._total, places, values, axis=self.axis, reduction="add"
        )

    def result(self) -> str:
        """The sums in x's type."""
        dtype = self.g.input_type(0).dtype
        return self.g.emit("Cast", self._total, to=dtype) if is_narrow(self.g) else self._total


def is_narrow(g: GradientContext) -> bool:
    """Whether x has a two-byte type."""
    return g.input_type(0).dtype in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _as_float32(g: GradientContext, tensor: str) -> str:
    return g.emit("Cast", tensor, to=onnx.TensorProto.FLOAT)


def scatter_to_zeros(
    g: GradientContext, shape: tuple[int, ...], places: str, values: str, axis: int, *, may_repeat: bool
) -> str:
    """Zeros of `shape` with `values` at `places` along an axis, added up where places repeat."""
    if not may_repeat:
        return g.emit("ScatterElements", zeros(g, shape), places, values, axis=axis)
    sums = Sums.from_zeros(g, shape, axis)
    sums.add(places, values)
    return sums.result()


def reciprocal_or_zero(g: GradientContext, tensor: str) -> str:
    """1 / `tensor` where it is positive, and 0 where it is 0."""
    sign = g.emit("Sign", tensor)
    return g.emit("Div", sign, g.emit("Add", tensor, g.emit("Sub", g.scalar(1.0), sign)))


# Rows added in one sequential sum; the error of a float32 sum grows with their number.
_MAX_SEQUENTIAL_ROWS = 32


def sum_over_leading(g: GradientContext, tensor: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> str:
    """The sum of `tensor` of `shape` over `axes`, keeping them with extent 1.

    ONNX Runtime adds the rows of leading axes sequentially: a bias gradient over 65,536 tokens
    would be off by 1e-3. So leading axes are summed as a tree, a small group of rows at a time.
    """
    is_leading = axes == tuple(range(len(axes)))
    count, rest = math.prod(shape[: len(axes)]), shape[len(axes) :]
    if not is_leading or count <= _MAX_SEQUENTIAL_ROWS:
        return reduce_sum(g, tensor, axes, keepdims=True)
    while group := _group_size(count):
        tensor = reshape(g, tensor, (count // group, group, math.prod(rest)))
        tensor = reduce_sum(g, tensor, (1,))
        count //= group
    tensor = reshape(g, tensor, (count, math.prod(rest)))
    return reshape(g, reduce_sum(g, tensor, (0,)), (*(1,) * len(axes), *rest))


def _group_size(count: int) -> int:
    """The largest divisor of `count` that one sequential sum may have, or 0 to add all rows at once."""
    if count <= _MAX_SEQUENTIAL_ROWS:
        return 0
    return next((size for size in range(_MAX_SEQUENTIAL_ROWS, 1, -1) if count % size == 0), 0)


def unbroadcast(g: GradientContext, tensor: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Sum `tensor` of `shape` over the axes along which `target` was broadcast to it."""
    if shape == target:
        return tensor
    lead = len(shape) - len(target)
    axes = tuple(range(lead)) + tuple(
        lead + axis for axis, size in enumerate(target) if size == 1 and shape[lead + axis] != 1
    )
    if axes:
        tensor = sum_over_leading(g, tensor, shape, axes)
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tensor if shape == target else reshape(g, tensor, target)


def per_channel(g: GradientContext, vector: str, rank: int) -> str:
    """A vector [C] as [1, C, 1, ...] of the given rank, to broadcast over [N, C, ...].

    A Reshape, because a runtime would merge an Unsqueeze with the barrier before it and lose both.
    """
    return reshape(g, vector, (1, g.input_shape(0)[1], *(1,) * (rank - 2)))
