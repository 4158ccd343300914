"""Constants that are identified by their contents, such as masks.

Frozen weights are not: they may differ between two files of one network.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.core.stored_weights import peek

AxisContents = tuple[tuple[int, str], ...]
"""The contents of a table along each axis: its position from the right, and a digest."""

# A mask of 2,048 by 2,048 tokens.
_MAX_ELEMENTS = 1 << 22
_MAX_NUMBERS = 8
_SAMPLE = 64
# Masks are minus infinity, or any number whose exponential is zero.
_MAX_MASK = -1e4


def with_infinite_mask(number: float) -> float:
    """Minus infinity for any number that masks."""
    return -np.inf if number <= _MAX_MASK else number


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The contents of a constant: for each element its index in `numbers`, which ascend.

    `codes` has size 1 along axes along which the constant repeats.
    """

    codes: Array
    numbers: tuple[float, ...]

    def mapped(self, function: Callable[[float], float]) -> "Table":
        # Adding zero makes negative zeros positive.
        mapped = np.asarray([function(number) for number in self.numbers]) + 0.0
        numbers, codes = np.unique(mapped, return_inverse=True)
        return Table(codes.astype(np.uint8)[self.codes], tuple(numbers.tolist()))

    def scaled(self, factor: float) -> "Table":
        return self.mapped(lambda number: number * factor)

    def largest(self) -> float:
        return max(abs(number) for number in self.numbers)

    def contents_by_axis(self) -> AxisContents:
        """Digests of the contents, with each axis moved to the front."""
        contents: list[tuple[int, str]] = []
        numbers = ",".join(f"{number:.5g}" for number in self.numbers)
        rank = self.codes.ndim
        for axis, size in enumerate(self.codes.shape):
            if size > 1:
                moved = np.ascontiguousarray(np.moveaxis(self.codes, axis, 0))
                sizes = [size for size in moved.shape if size > 1]
                content = hashlib.blake2b(moved.tobytes(), digest_size=12)
                content.update(f"{sizes} {numbers}".encode())
                contents.append((rank - axis, content.hexdigest()))
        return tuple(contents)


def is_learned(model: TrainableModel, name: str) -> bool:
    """Whether a weight is a parameter or a running statistic."""
    return name in model.parameter_set or any(name == statistic.name for statistic in model.statistics)


def table_of(model: TrainableModel, name: str) -> Table | None:
    """The contents of a constant; None for weights, and for constants of one number or of many."""
    weight = model.weights.get(name)
    if weight is None or is_learned(model, name) or not 1 < weight.type.element_count <= _MAX_ELEMENTS:
        return None
    values = peek(weight)
    if values is None or values.dtype.kind in "OSUc":
        return None
    # Most weights are excluded by a sample.
    if len(np.unique(values.reshape(-1)[:_SAMPLE].astype(np.float64))) > _MAX_NUMBERS:
        return None
    values = _without_repeats(np.asarray(values, np.float64))
    if weight.type.is_floating:
        values = np.where(values <= _MAX_MASK, -np.inf, values)
    numbers = _distinct(values)
    if len(numbers) < 2 or not _is_handwritten(values, numbers):
        return None
    codes = np.searchsorted(np.asarray(numbers), values).astype(np.uint8)
    return Table(codes, tuple(numbers))


def _is_handwritten(values: Array, numbers: list[float]) -> bool:
    """Whether the numbers were written down, not learned: they repeat, or all are whole."""
    return values.size >= 2 * len(numbers) or all(number == np.rint(number) for number in numbers)


def _without_repeats(values: Array) -> Array:
    for axis in range(values.ndim):
        first = values.take([0], axis)
        if values.shape[axis] > 1 and (values == first).all():
            values = first
    return values


def _distinct(values: Array) -> list[float]:
    """The distinct numbers in ascending order; empty if they are too many or one is NaN."""
    rest = values.reshape(-1)
    numbers: list[float] = []
    while rest.size:
        if len(numbers) == _MAX_NUMBERS or np.isnan(rest[0]):
            return []
        numbers.append(float(rest[0]))
        rest = rest[rest != rest[0]]
    return sorted(numbers)
