"""Operators that read, write or produce indices and shapes."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.torch.operators.setting_values import Number, number, wrap_negative

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def gather(x: Tensor, indices: Tensor | int, *, axis: int = 0) -> Tensor:
    """A view for a constant scalar index, an embedding for rows of a float matrix."""
    if not isinstance(indices, Tensor):
        return x.select(axis, indices)
    positions = wrap_negative(indices.long(), x.shape[axis])
    if axis % x.ndim == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(positions, x)
    taken = x.index_select(axis, positions.reshape(-1))
    axis %= x.ndim
    return taken.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, wrap_negative(indices.long(), x.shape[axis]))


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """indices: [..., d], whose rows index the first d axes after the batch axes."""
    end = batch_dims + indices.shape[-1]
    samples = torch.arange(math.prod(x.shape[:batch_dims]), device=x.device)
    first = samples.reshape([*x.shape[:batch_dims], *[1] * (indices.ndim - 1 - batch_dims)])
    flat = _flat_index(indices, x.shape[batch_dims:end], first)
    taken = x.reshape(-1, *x.shape[end:]).index_select(0, flat.reshape(-1))
    return taken.reshape([*indices.shape[:-1], *x.shape[end:]])


def _flat_index(indices: Tensor, extents: Sequence[int], flat: Tensor) -> Tensor:
    """The flat index, in axes of these extents, of each row of indices: [..., d]; `flat` is its start."""
    for axis, extent in enumerate(extents):
        flat = flat * extent + wrap_negative(indices[..., axis].long(), extent)
    return flat


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    positions = wrap_negative(indices.long(), x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, positions, updates)
    if reduction == "add":
        return x.scatter_add(axis, positions, updates)
    return x.scatter_reduce(axis, positions, updates, _REDUCTIONS[reduction])


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """indices: [..., d], whose rows index the first d axes of x."""
    depth = indices.shape[-1]
    flat = _flat_index(indices, x.shape[:depth], indices.new_zeros(indices.shape[:-1]).long())
    rows = x.reshape(-1, *x.shape[depth:]) if depth else x.unsqueeze(0)
    values = updates.reshape(-1, *x.shape[depth:])
    if reduction == "none":
        return rows.index_put((flat.reshape(-1),), values).reshape(x.shape)
    if reduction == "add":
        return rows.index_add(0, flat.reshape(-1), values).reshape(x.shape)
    target = flat.reshape(-1, *[1] * (values.ndim - 1)).expand(values.shape)
    return rows.scatter_reduce(0, target, values, _REDUCTIONS[reduction]).reshape(x.shape)


def one_hot(indices: Tensor, depth: Number | Sequence[float], values: Tensor, *, axis: int = -1) -> Tensor:
    """`values` are (off, on); an index out of range selects no element."""
    count = int(number(depth))
    positions = wrap_negative(indices.long(), count).unsqueeze(axis)
    shape = [1] * positions.ndim
    shape[axis] = count
    is_on = positions == torch.arange(count, device=positions.device).reshape(shape)
    return torch.where(is_on, values[1], values[0])


def top_k(
    x: Tensor, k: Number | Sequence[float], *, outputs: int, axis: int = -1, largest: int = 1, sorted: int = 1
) -> Tensor | tuple[Tensor, Tensor]:
    """Stable: equal elements keep their order, unlike in `torch.topk`."""
    values, positions = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = int(number(k))
    top = values.narrow(axis, 0, count)
    return top if outputs == 1 else (top, positions.narrow(axis, 0, count))


def non_zero(x: Tensor) -> Tensor:
    return x.nonzero().t()


def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64, device=x.device)


def size_of(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64, device=x.device)
