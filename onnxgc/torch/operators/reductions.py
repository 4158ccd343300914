"""Reductions along axes, and indices of extrema."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onnxgc.torch.operators.setting_values import Ints, ints


def _reduced(
    function: Callable[..., Tensor], x: Tensor, axes: Ints | None, keepdims: int, noop_with_empty_axes: int
) -> Tensor:
    """Reduces along all axes if none are given, or along none if `noop_with_empty_axes`."""
    along = [] if axes is None else ints(axes)
    if not along and noop_with_empty_axes:
        return x
    return function(x, along or list(range(x.ndim)), bool(keepdims))


def reduce_sum(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(_sum, x, axes, keepdims, noop_with_empty_axes)


def reduce_mean(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(_mean, x, axes, keepdims, noop_with_empty_axes)


def reduce_max(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(torch.amax, x, axes, keepdims, noop_with_empty_axes)


def reduce_min(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(torch.amin, x, axes, keepdims, noop_with_empty_axes)


def reduce_prod(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(_product, x, axes, keepdims, noop_with_empty_axes)


def reduce_l1(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(_sum, x.abs(), axes, keepdims, noop_with_empty_axes)


def reduce_l2(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    # Without axes the norm of each element.
    is_elementwise = noop_with_empty_axes and not (axes is not None and ints(axes))
    return x.abs() if is_elementwise else _reduced(_norm, x, axes, keepdims, noop_with_empty_axes)


def reduce_log_sum(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(_sum, x, axes, keepdims, noop_with_empty_axes).log()


def reduce_log_sum_exp(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(torch.logsumexp, x, axes, keepdims, noop_with_empty_axes)


def reduce_sum_square(
    x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    return _reduced(_sum, x.square(), axes, keepdims, noop_with_empty_axes)


def _sum(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    # torch sums int32 as int64 by default.
    return x.sum(axes, keepdim=keepdim, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keepdim)
    count = x.numel() // max(1, x.sum(axes).numel())
    return torch.div(_sum(x, axes, keepdim), count, rounding_mode="trunc")


def _norm(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, 2, axes, keepdim)
    return norm


def _product(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    along = sorted(axis % x.ndim for axis in axes)
    for axis in reversed(along):
        x = x.prod(axis, keepdim=keepdim, dtype=x.dtype)
    return x


def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _index_of(torch.argmax, x, axis, keepdims, select_last_index)


def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _index_of(torch.argmin, x, axis, keepdims, select_last_index)


def _index_of(
    find: Callable[..., Tensor], x: Tensor, axis: int, keepdims: int, select_last_index: int
) -> Tensor:
    if not select_last_index:
        return find(x, axis, bool(keepdims))
    return x.shape[axis] - 1 - find(x.flip(axis), axis, bool(keepdims))
