"""Processes that train one model together."""

from collections.abc import Sequence
from typing import Protocol

from onnxgc.runtime.io_binding import DeviceArrays


class Workers(Protocol):
    """The group of training processes, from this process's point of view."""

    rank: int
    count: int

    def total(self, value: float) -> float:
        """The sum of a number over all workers."""
        ...

    def add_up(self, arrays: DeviceArrays, names: Sequence[str]) -> None:
        """Replaces each array by its sum over all workers."""
        ...


class SingleWorker:
    """A process that trains alone."""

    rank, count = 0, 1

    def total(self, value: float) -> float:
        return value

    def add_up(self, arrays: DeviceArrays, names: Sequence[str]) -> None:
        pass
