"""What operators' functions share: settings, which are numbers or tensors that hold them, and axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ints = Sequence[int] | int | Tensor
"""A setting of integers: as the graph holds it where it is constant, else as a tensor."""
Number = float | int | bool | Tensor
"""A setting of one number."""


def ints(setting: Ints) -> list[int]:
    if isinstance(setting, Tensor):
        return [int(value) for value in setting.reshape(-1).tolist()]
    return [setting] if isinstance(setting, int) else list(setting)


def number(setting: Number | Sequence[float]) -> float:
    """A setting as one number, also where it is a list of one."""
    if isinstance(setting, Tensor):
        return float(setting.item()) if setting.is_floating_point() else int(setting.item())
    return setting if isinstance(setting, int | float) else setting[0]


def not_negative(indices: Tensor, extent: int) -> Tensor:
    """Indices that count from the end as ones that count from the beginning."""
    return torch.where(indices < 0, indices + extent, indices)
