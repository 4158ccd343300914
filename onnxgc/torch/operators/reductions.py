"""Reductions along axes, and indices of extrema."""

from collections.abc import Callable

import torch
from torch import Tensor

from onnxgc.torch.operators.setting_values import Ints, ints


def _reduction(reduce: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    """ONNX's reduction along given axes, from `reduce(x, axes, keepdim)`.

    Without axes it reduces along all of them, or each element by itself if `noop_with_empty_axes`.
    """

    def reduced(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        along = [] if axes is None else ints(axes)
        if not along and noop_with_empty_axes:
            return reduce(x.unsqueeze(-1), [-1], False)
        return reduce(x, along or list(range(x.ndim)), bool(keepdims))

    return reduced


reduce_max = _reduction(torch.amax)
reduce_min = _reduction(torch.amin)
reduce_log_sum_exp = _reduction(torch.logsumexp)


def _sum(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    # torch sums int32 as int64 by default.
    return x.sum(axes, keepdim=keepdim, dtype=x.dtype)


reduce_sum = _reduction(_sum)
reduce_l1 = _reduction(lambda x, axes, keepdim: _sum(x.abs(), axes, keepdim))
reduce_l2 = _reduction(lambda x, axes, keepdim: torch.linalg.vector_norm(x, 2, axes, keepdim))
reduce_log_sum = _reduction(lambda x, axes, keepdim: _sum(x, axes, keepdim).log())
reduce_sum_square = _reduction(lambda x, axes, keepdim: _sum(x.square(), axes, keepdim))


@_reduction
def reduce_mean(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keepdim)
    count = x.numel() // max(1, x.sum(axes).numel())
    return torch.div(_sum(x, axes, keepdim), count, rounding_mode="trunc")


@_reduction
def reduce_prod(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keepdim, dtype=x.dtype)
    return x


def _index_of(find: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def index(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if not select_last_index:
            return find(x, axis, bool(keepdims))
        return x.shape[axis] - 1 - find(x.flip(axis), axis, bool(keepdims))

    return index


arg_max = _index_of(torch.argmax)
arg_min = _index_of(torch.argmin)
