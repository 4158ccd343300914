"""Arithmetic, comparisons and other elementwise operators."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from onnxgc.torch.operators.setting_values import Ints, Number, ints, number


def identity(x: Tensor, *, stopped: int = 0) -> Tensor:
    return x.detach() if stopped else x


def div(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def mod(x: Tensor, y: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


def power(x: Tensor, y: Tensor) -> Tensor:
    """The result has the type of x."""
    return torch.pow(x, y).to(x.dtype)


def sum_(*operands: Tensor) -> Tensor:
    return reduce(torch.add, operands)


def maximum(*operands: Tensor) -> Tensor:
    return reduce(torch.maximum, operands)


def minimum(*operands: Tensor) -> Tensor:
    return reduce(torch.minimum, operands)


def cast(x: Tensor, *, to: torch.dtype, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(to)


def is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    both = torch.isposinf(x) if detect_positive else torch.zeros_like(x, dtype=torch.bool)
    return both | torch.isneginf(x) if detect_negative else both


def bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    return x << y if direction == "LEFT" else x >> y


def cumulative_sum(x: Tensor, axis: Ints, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    (along,) = ints(axis)
    ordered = x.flip(along) if reverse else x
    total = ordered.cumsum(along, dtype=x.dtype)
    if exclusive:
        first, rest = total.narrow(along, 0, 1), total.narrow(along, 0, total.shape[along] - 1)
        total = torch.cat([torch.zeros_like(first), rest], along)
    return total.flip(along) if reverse else total


def triangle(x: Tensor, k: Number | Sequence[float] = 0, *, upper: int = 1) -> Tensor:
    diagonal = int(number(k))
    return x.triu(diagonal) if upper else x.tril(diagonal)
