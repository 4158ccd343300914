"""Data-parallel workers by `torch.distributed`: gloo on CPUs, NCCL on CUDA.

Each process has all parameters and a session; gradient sums are reduced over all processes.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as distributed

from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array

_BUCKET_BYTES = 25 << 20
_SMALL_BYTES = 1 << 20
"""Tensors below this size are packed into buckets; larger ones are reduced in place."""


class Arrays(Protocol):
    """Arrays of a device by name."""

    device: str

    def array(self, name: str) -> Array: ...

    def value(self, name: str) -> Any: ...


class TorchWorkers:
    """This process in the group that `torchrun` has started."""

    def __init__(self, backend: str | None = None) -> None:
        """Joins the process group of `torchrun`'s environment, unless it has been joined.

        Raises:
            TrainingError: the group cannot be joined.
        """
        self._is_own = not distributed.is_initialized()
        if self._is_own:
            chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
            try:
                distributed.init_process_group(chosen)
            except (ValueError, RuntimeError) as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise TrainingError(
                    f"other workers cannot be joined by {chosen}: {reason}; start all workers by torchrun"
                ) from error
        self.rank = distributed.get_rank()
        self.count = distributed.get_world_size()

    def close(self) -> None:
        """Leaves the process group if this object joined it."""
        if self._is_own and distributed.is_initialized():
            distributed.destroy_process_group()

    def total(self, value: float) -> float:
        """The sum of a number over all workers."""
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        number = torch.tensor([value], dtype=torch.float64, device=device)
        distributed.all_reduce(number)
        return float(number.item())

    def add_up(self, arrays: Arrays, names: Sequence[str]) -> None:
        """Replaces each array, in place, by its sum over all workers."""
        tensors = [_as_tensor(arrays, name) for name in names]
        large = [tensor for tensor in tensors if tensor.nbytes >= _SMALL_BYTES]
        waiting = [distributed.all_reduce(tensor, async_op=True) for tensor in large]
        for bucket in _buckets([tensor for tensor in tensors if tensor.nbytes < _SMALL_BYTES]):
            packed = torch.cat([tensor.reshape(-1) for tensor in bucket])
            distributed.all_reduce(packed)
            parts = torch.split(packed, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        for work in waiting:
            work.wait()


def from_environment() -> TorchWorkers | None:
    """The workers of `torchrun`, or None if it has not started several.

    Each uses one device, selected by its local rank.

    Raises:
        TrainingError: the group cannot be joined.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return TorchWorkers()


def _as_tensor(arrays: Arrays, name: str) -> torch.Tensor:
    """An array's memory as a tensor, without a copy."""
    if arrays.device == "cpu":
        return torch.from_numpy(arrays.array(name))
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(arrays.value(name))
    return tensor


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size = _BUCKET_BYTES
    for tensor in tensors:
        if size + tensor.nbytes > _BUCKET_BYTES or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets
