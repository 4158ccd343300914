"""Settings of operators, which are numbers, or tensors if they are not constant."""

from collections.abc import Sequence

import torch
from torch import Tensor

Ints = Sequence[int] | int | Tensor
"""A setting of integers: a constant as numbers, otherwise a tensor."""
Number = float | int | bool | Tensor
"""A setting of one number."""


def ints(setting: Ints) -> list[int]:
    if isinstance(setting, Tensor):
        return [int(value) for value in setting.reshape(-1).tolist()]
    return [setting] if isinstance(setting, int) else list(setting)


def number(setting: Number | Sequence[float]) -> float:
    """A setting as one number, also from a list of one."""
    if isinstance(setting, Tensor):
        return float(setting.item()) if setting.is_floating_point() else int(setting.item())
    return setting if isinstance(setting, int | float) else setting[0]


def wrap_negative(indices: Tensor, extent: int) -> Tensor:
    """Negative indices, which count from the end, as non-negative ones."""
    return torch.where(indices < 0, indices + extent, indices)
