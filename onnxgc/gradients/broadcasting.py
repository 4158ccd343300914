"""Shape helpers that gradient rules share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.gradients.engine import GradientContext


def reshape(g: GradientContext, tensor: str, shape: tuple[int, ...]) -> str:
    """A view of `tensor` with a static shape; costs no memory."""
    if 0 in shape:
        return g.emit("Reshape", tensor, g.ints(*shape), allowzero=1)
    return g.emit("Reshape", tensor, g.ints(*shape))


def zeros(g: GradientContext, shape: tuple[int, ...]) -> str:
    """Zeros of the element type of input 0."""
    return expand(g, g.scalar(0.0), shape)


def expand(g: GradientContext, tensor: str, shape: tuple[int, ...]) -> str:
    """A tensor of the element type of input 0 broadcast to a shape.

    To nothing it is made anew: ONNX Runtime drops an Expand of a size of one to zero.
    """
    if 0 in shape:
        dtype = g.input_type(0).dtype
        value = onnx.numpy_helper.from_array(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(dtype)))
        return g.emit("ConstantOfShape", g.ints(*shape), value=value)
    return g.emit("Expand", tensor, g.ints(*shape))


def reduce_sum(g: GradientContext, tensor: str, axes: tuple[int, ...], *, keepdims: bool = False) -> str:
    return g.emit("ReduceSum", tensor, g.ints(*axes), keepdims=int(keepdims))


@dataclass(slots=True)
class Sums:
    """Additions at places along an axis of a tensor, one after the other and in its own memory.

    Places may repeat. Sums are taken in float32 where x's type is narrower, in which ONNX Runtime adds on a
    GPU only.
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
        """Values of x's type at indices of their shape."""
        values = _as_float32(self.g, values) if is_narrow(self.g) else values
        self._total = self.g.emit(
            "ScatterElements", self._total, places, values, axis=self.axis, reduction="add"
        )

    def result(self) -> str:
        """The sums in x's type."""
        dtype = self.g.input_type(0).dtype
        return self.g.emit("Cast", self._total, to=dtype) if is_narrow(self.g) else self._total


def is_narrow(g: GradientContext) -> bool:
    """Whether x has a type of two bytes."""
    return g.input_type(0).dtype in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _as_float32(g: GradientContext, tensor: str) -> str:
    return g.emit("Cast", tensor, to=onnx.TensorProto.FLOAT)


def added_at(
    g: GradientContext, shape: tuple[int, ...], places: str, values: str, axis: int, *, is_added: bool = True
) -> str:
    """Zeros of `shape` with `values` added at `places` along an axis, or written if none is there twice."""
    if not is_added:
        return g.emit("ScatterElements", zeros(g, shape), places, values, axis=axis)
    sums = Sums.from_zeros(g, shape, axis)
    sums.add(places, values)
    return sums.result()


def reciprocal_or_zero(g: GradientContext, tensor: str) -> str:
    """1 / `tensor` where that is positive, and 0 where it is 0."""
    sign = g.emit("Sign", tensor)
    return g.emit("Div", sign, g.emit("Add", tensor, g.emit("Sub", g.scalar(1.0), sign)))


# Rows that are added one after the other; the error of a float32 sum grows with their number.
_MOST_IN_A_ROW = 32


def sum_over_leading(g: GradientContext, tensor: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> str:
    """The sum of `tensor` of `shape` over `axes`, which stay with extent 1.

    ONNX Runtime adds the rows of leading axes one after the other: the gradient of a bias behind 65,536
    tokens would be off by 1e-3. So a few rows are added at a time, then their sums, and so on.
    """
    leading = axes == tuple(range(len(axes)))
    count, rest = math.prod(shape[: len(axes)]), shape[len(axes) :]
    if not leading or count <= _MOST_IN_A_ROW:
        return reduce_sum(g, tensor, axes, keepdims=True)
    while group := _group_of(count):
        tensor = reshape(g, tensor, (count // group, group, math.prod(rest)))
        tensor = reduce_sum(g, tensor, (1,))
        count //= group
    tensor = reshape(g, tensor, (count, math.prod(rest)))
    return reshape(g, reduce_sum(g, tensor, (0,)), (*(1,) * len(axes), *rest))


def _group_of(count: int) -> int:
    """How many rows to add at a time: the largest divisor that is few rows, or 0 to add all at once."""
    if count <= _MOST_IN_A_ROW:
        return 0
    return next((size for size in range(_MOST_IN_A_ROW, 1, -1) if count % size == 0), 0)


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

    By Reshape: a runtime would merge an Unsqueeze with the barrier in front of it and lose both.
    """
    return reshape(g, vector, (1, g.input_shape(0)[1], *(1,) * (rank - 2)))
