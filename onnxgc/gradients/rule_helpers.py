"""Operators that several gradient rules emit: shapes, sums, casts."""

import math
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.model.files.contrib_domain import RUNTIME_DOMAIN
from onnxgc.model.operators.reductions import MAX_ORDERED_ROWS


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


def mean_over_last(g: GradientContext, tensor: str, axes: tuple[int, ...], count: int) -> str:
    """The mean over the last `axes`, which hold `count` elements, keeping them with extent 1."""
    if g.provider == "cpu":
        return g.emit("ReduceMean", tensor, g.ints(*axes), keepdims=1)
    # Of all reductions of some axes only sums have a fast kernel on CUDA.
    return g.emit("Mul", reduce_sum(g, tensor, axes, keepdims=True), g.scalar(1.0 / count))


def channel_sums(g: GradientContext, tensor: str, shape: tuple[int, ...], *, keepdims: bool = False) -> str:
    """Sums of `tensor` of shape [N, C, ...] over all axes but C: [C], or [1, C] with `keepdims`.

    ONNX Runtime's fast reduction on CUDA needs contiguous axes, first or last. Over the first axis it adds
    blocks of rows atomically; the result depends on their order from the third block on.
    """
    if g.provider == "cpu":
        return reduce_sum(g, tensor, (0, *range(2, len(shape))))
    if len(shape) > 2:
        tensor = reduce_sum(g, tensor, tuple(range(2, len(shape))))
    if shape[0] <= MAX_ORDERED_ROWS:
        return reduce_sum(g, tensor, (0,), keepdims=keepdims)
    total = reduce_sum(g, g.emit("Transpose", tensor, perm=[1, 0]), (1,))
    return reshape(g, total, (1, shape[1])) if keepdims else total


def product(
    g: GradientContext,
    left: str,
    right: str,
    ranks: tuple[int, int],
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
) -> str:
    """A batched matrix product of operands of `ranks`, one of them transposed in its last two axes.

    On CUDA the product itself transposes, in float32 (the CPU provider has no other type) and with equal
    ranks (for which alone ONNX infers the shape).
    """
    if g.provider == "cuda" and g.input_type(0).dtype == onnx.TensorProto.FLOAT and ranks[0] == ranks[1]:
        transposed = {"transA": int(transpose_left), "transB": int(transpose_right)}
        return g.emit(f"{RUNTIME_DOMAIN}::FusedMatMul", left, right, **transposed)
    rank = ranks[0] if transpose_left else ranks[1]
    perm = [*range(rank - 2), rank - 1, rank - 2]
    if transpose_left:
        return g.emit("MatMul", g.emit("Transpose", left, perm=perm), right)
    return g.emit("MatMul", left, g.emit("Transpose", right, perm=perm))


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
    def on(cls, g: GradientContext, tensor: str, axis: int) -> "Sums":
        """Additions to a tensor of x's type."""
        return cls(g, axis, _as_float32(g, tensor) if is_narrow(g) else tensor)

    @classmethod
    def from_zeros(cls, g: GradientContext, shape: tuple[int, ...], axis: int) -> "Sums":
        if not is_narrow(g):
            return cls(g, axis, zeros(g, shape))
        return cls(g, axis, g.emit("Expand", g.constants.add(np.zeros((), np.float32)), g.ints(*shape)))

    def add(self, places: str, values: str) -> None:
        """Adds values of x's type at indices of the same shape."""
        values = _as_float32(self.g, values) if is_narrow(self.g) else values
        self._total = self.g.emit("ScatterElements", self._total, places, values, axis=self.axis, reduction="add")

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
_MAX_SEQUENTIAL_ROWS = {"cpu": 32, "cuda": MAX_ORDERED_ROWS}


def sum_over(g: GradientContext, tensor: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> str:
    """The sum of `tensor` of `shape` over `axes`, in increasing order, keeping them with extent 1.

    ONNX Runtime adds the rows of leading axes sequentially on a CPU: a bias gradient over 65,536 tokens would
    be off by 1e-3. So leading axes are summed as a tree, a small group of rows at a time. On CUDA only sums
    over contiguous axes at either end are fast, so other axes are summed first, moved to the end.
    """
    lead = next((index for index, axis in enumerate(axes) if axis != index), len(axes))
    if lead < len(axes) and g.provider == "cpu":
        return reduce_sum(g, tensor, axes, keepdims=True)
    if lead < len(axes):
        tensor, shape = _sum_at_end(g, tensor, shape, axes[lead:])
    count, rest = math.prod(shape[:lead]), shape[lead:]
    limit = _MAX_SEQUENTIAL_ROWS[g.provider]
    if count <= limit:
        return reduce_sum(g, tensor, axes[:lead], keepdims=True) if lead else tensor
    while group := _group_size(count, limit):
        if g.provider == "cuda":
            tensor = reshape(g, tensor, (group, count // group * math.prod(rest)))
            tensor = reduce_sum(g, tensor, (0,))
        else:
            tensor = reshape(g, tensor, (count // group, group, math.prod(rest)))
            tensor = reduce_sum(g, tensor, (1,))
        count //= group
    tensor = reshape(g, tensor, (count, math.prod(rest)))
    if g.provider == "cuda" and count > limit:
        tensor, _ = _sum_at_end(g, tensor, (count, math.prod(rest)), (0,))
    else:
        tensor = reduce_sum(g, tensor, (0,))
    return reshape(g, tensor, (*(1,) * lead, *rest))


def _sum_at_end(
    g: GradientContext, tensor: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """The sum over `axes` as the last ones, keeping them with extent 1, and its shape."""
    kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
    result = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    if axes == tuple(range(len(kept), len(shape))):
        return reduce_sum(g, tensor, axes, keepdims=True), result
    moved = g.emit("Transpose", tensor, perm=[*kept, *axes])
    return reshape(g, reduce_sum(g, moved, tuple(range(len(kept), len(shape)))), result), result


def _group_size(count: int, limit: int) -> int:
    """The largest divisor of `count` that one sequential sum may have, or 0 to add all rows at once."""
    if count <= limit:
        return 0
    return next((size for size in range(limit, 1, -1) if count % size == 0), 0)


def unbroadcast(g: GradientContext, tensor: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Sum `tensor` of `shape` over the axes along which `target` was broadcast to it."""
    if shape == target:
        return tensor
    lead = len(shape) - len(target)
    axes = tuple(range(lead)) + tuple(
        lead + axis for axis, size in enumerate(target) if size == 1 and shape[lead + axis] != 1
    )
    if axes:
        tensor = sum_over(g, tensor, shape, axes)
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tensor if shape == target else reshape(g, tensor, target)


def per_channel(g: GradientContext, vector: str, rank: int) -> str:
    """A vector [C] as [1, C, 1, ...] of the given rank, to broadcast over [N, C, ...].

    A Reshape, because a runtime would merge an Unsqueeze with the barrier before it and lose both.
    """
    return reshape(g, vector, (1, g.input_shape(0)[1], *(1,) * (rank - 2)))
