"""Constants that count by their contents, such as masks.

Weights that are merely frozen do not: two files of one network hold other ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.core.stored_weights import peek

Seen = tuple[tuple[int, str], ...]
# A mask of 2,048 tokens by as many.
_LARGEST = 1 << 22
_MOST_NUMBERS = 8
_SAMPLE = 64
# Masks are of minus infinity, or of any number that an exponential makes zero.
_LOWEST = -1e4


def lowest_as_infinite(number: float) -> float:
    return -np.inf if number <= _LOWEST else number


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The contents of a constant: which of the `numbers`, which ascend, each element is.

    It has size 1 along axes along which it repeats.
    """

    codes: Array
    numbers: tuple[float, ...]

    def mapped(self, function: Callable[[float], float]) -> Table:
        # No zero is negative, so that equal numbers look alike.
        mapped = np.asarray([function(number) for number in self.numbers]) + 0.0
        numbers, codes = np.unique(mapped, return_inverse=True)
        return Table(codes.astype(np.uint8)[self.codes], tuple(numbers.tolist()))

    def largest(self) -> float:
        return max(abs(number) for number in self.numbers)

    def seen_from_axes(self) -> Seen:
        """The contents as seen from each axis: its place from the right, and a digest with it in front."""
        found: list[tuple[int, str]] = []
        numbers = ",".join(f"{number:.5g}" for number in self.numbers)
        rank = self.codes.ndim
        for axis, size in enumerate(self.codes.shape):
            if size > 1:
                turned = np.ascontiguousarray(np.moveaxis(self.codes, axis, 0))
                sizes = [size for size in turned.shape if size > 1]
                content = hashlib.blake2b(turned.tobytes(), digest_size=12)
                content.update(f"{sizes} {numbers}".encode())
                found.append((rank - axis, content.hexdigest()))
        return tuple(found)


def table_of(model: TrainableModel, name: str) -> Table | None:
    """What counts of a constant; None for weights, and for constants of one number or of many."""
    weight = model.weights.get(name)
    is_apart = name in model.parameters or any(name == item.name for item in model.statistics)
    if weight is None or is_apart or not 1 < weight.type.element_count <= _LARGEST:
        return None
    values = peek(weight)
    if values is None or values.dtype.kind in "OSUc":
        return None
    # Most weights show at once that they are none.
    if len(np.unique(values.reshape(-1)[:_SAMPLE].astype(np.float64))) > _MOST_NUMBERS:
        return None
    values = _without_repeats(np.asarray(values, np.float64))
    if weight.type.is_floating:
        values = np.where(values <= _LOWEST, -np.inf, values)
    numbers = _distinct(values)
    if len(numbers) < 2 or not _is_written(values, numbers):
        return None
    codes = np.searchsorted(np.asarray(numbers), values).astype(np.uint8)
    return Table(codes, tuple(numbers))


def _is_written(values: Array, numbers: list[float]) -> bool:
    """Whether somebody wrote the numbers down: each is there several times, or all are whole."""
    return values.size >= 2 * len(numbers) or all(number == np.rint(number) for number in numbers)


def _without_repeats(values: Array) -> Array:
    for axis in range(values.ndim):
        first = values.take([0], axis)
        if values.shape[axis] > 1 and (values == first).all():
            values = first
    return values


def _distinct(values: Array) -> list[float]:
    """The numbers in ascending order; none where they are more, or where one is none."""
    rest = values.reshape(-1)
    numbers: list[float] = []
    while rest.size:
        if len(numbers) == _MOST_NUMBERS or np.isnan(rest[0]):
            return []
        numbers.append(float(rest[0]))
        rest = rest[rest != rest[0]]
    return sorted(numbers)
