"""Operators that create tensors, on the module's device and in its floating type."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onnxgc.torch.operators.setting_values import Ints, Number, ints, number


def constant_of_shape(shape: Ints, *, like: Tensor, dtype: torch.dtype, value: float = 0.0) -> Tensor:
    return torch.full(ints(shape), value, dtype=dtype, device=like.device)


def range_(start: Number, limit: Number, delta: Number, *, like: Tensor) -> Tensor:
    values = [number(setting) for setting in (start, limit, delta)]
    is_floating = any(isinstance(value, float) for value in values)
    return torch.arange(*values, dtype=like.dtype if is_floating else torch.int64, device=like.device)


def eye_like(x: Tensor, *, k: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    rows, columns = x.shape
    ones = torch.ones(rows, columns, dtype=dtype or x.dtype, device=x.device)
    return ones.triu(k).tril(k)


def random_normal(
    x: Tensor | None = None,
    *,
    like: Tensor,
    shape: Sequence[int] = (),
    mean: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    seed: float = 0.0,
) -> Tensor:
    """With the shape and type of `x` if it is given."""
    dtype = dtype or (like if x is None else x).dtype
    return torch.randn(shape if x is None else x.shape, dtype=dtype, device=like.device) * scale + mean


def random_uniform(
    x: Tensor | None = None,
    *,
    like: Tensor,
    shape: Sequence[int] = (),
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    seed: float = 0.0,
) -> Tensor:
    """With the shape and type of `x` if it is given."""
    dtype = dtype or (like if x is None else x).dtype
    return torch.rand(shape if x is None else x.shape, dtype=dtype, device=like.device) * (high - low) + low


def bernoulli(x: Tensor, *, dtype: torch.dtype | None = None, seed: float = 0.0) -> Tensor:
    return torch.bernoulli(x).to(dtype or x.dtype)


def multinomial(x: Tensor, *, sample_size: int = 1, dtype: torch.dtype = torch.int32, seed: float = 0.0) -> Tensor:
    return torch.multinomial(x.softmax(-1), sample_size, replacement=True).to(dtype)
