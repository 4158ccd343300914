"""What values say of a weight: those that training never leaves behind belong to constants.

Arrays may lie in a file, so that no more of them is read than tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from onnxgc.model.core.ir import Array

# An additive constant of zeros and values up to this one is a mask, as in Swin and BERT.
MASK_VALUE = -100.0
# A value up to this one masks whatever stands beside it, as in a mask that holds distances too.
_HOPELESS = -1e4
_FEWEST_FREQUENCIES = 4
_MOST_FREQUENCIES = 1 << 14
_FEWEST_COUNTS = 4
_FEWEST_ANGLES = 3
_FEWEST_DISTANCES = 4
_SAMPLE = 61
# Rounding of a value and of what is computed from it, in units of its type's precision.
_ROUNDING = 8
_ROUNDING_OF_POWERS = 1e-5
# Beyond it numbers take the place of infinity.
_LARGEST = 4096
# Of GELU: its cubic term, sqrt(2 / pi), and the slope of its form by a sigmoid.
_GELU = (0.044715, math.sqrt(2 / math.pi), 1.702)


def is_additive_mask(values: Array) -> bool:
    """Whether it is zeros and large negative values, or a table with values that hide what they meet."""
    masking = values <= MASK_VALUE
    if np.all(masking | (values == 0)):
        return bool(np.any(masking))
    return has_several_axes(values.shape) and bool(np.any(values <= _HOPELESS))


def is_binary_mask(values: Array) -> bool:
    """Whether it is zeros and ones, and both: a fresh scale is ones alone, a fresh bias zeros alone."""
    few = sample(values)
    if not np.all((few == 0) | (few == 1)):
        return False
    ones = values == 1
    return bool(np.all(ones | (values == 0)) and np.any(ones) and not np.all(ones))


def is_geometric(values: Array) -> bool:
    """Whether the distinct values are a geometric sequence, as frequencies base^(-2i/d) are."""
    if max(values.shape, default=1) != values.size or values.size > _MOST_FREQUENCIES:
        return False
    distinct = np.unique(values.astype(np.float64))
    if len(distinct) < _FEWEST_FREQUENCIES or distinct[0] <= 0 or not np.isfinite(distinct[-1]):
        return False
    allowed = max(_ROUNDING * _precision(values), _ROUNDING_OF_POWERS)
    return bool(np.ptp(np.diff(np.log(distinct))) <= allowed)


def counts_up(values: Array) -> bool:
    """Whether it is the whole numbers from 0 or 1 on, whose mean by a distribution is a place among them."""
    if max(values.shape, default=1) != values.size or not _FEWEST_COUNTS <= values.size <= _MOST_FREQUENCIES:
        return False
    first = float(values.flat[0])
    return first in (0, 1) and bool(np.all(values.reshape(-1) == first + np.arange(values.size)))


def holds_sines_and_cosines(values: Array) -> bool:
    """Whether halves of a table, or neighbours in it, are sines and cosines of the same angles."""
    return any(are_sine_and_cosine(one, other) for one, other in _halves(values))


def holds_distances(values: Array) -> bool:
    """Whether rows rise or fall by one step throughout, from zero or to both sides of a diagonal."""
    if values.ndim == 0 or values.shape[-1] < _FEWEST_DISTANCES:
        return False
    if _holds_distances_from_diagonal(values):
        return True
    steps = np.diff(values.astype(np.float64))
    largest = np.max(np.abs(values.astype(np.float64)))
    even = np.ptp(steps, axis=-1) <= _ROUNDING * _precision(values) * largest
    return bool(np.any(steps) and np.all(even) and not np.any(values[..., 0]))


def _holds_distances_from_diagonal(values: Array) -> bool:
    """Whether [..., L, S] is |i - j| times a factor for each matrix, the last row at the last column."""
    if values.ndim < 2 or values.shape[-2] > values.shape[-1]:
        return False
    rows, columns = values.shape[-2:]
    distances = np.abs(np.arange(columns) - np.arange(columns - rows, columns)[:, None])
    factors = values[..., -1:, -2:-1].astype(np.float64)
    apart = np.abs(values - factors * distances)
    return bool(np.any(factors) and apart.max() <= _ROUNDING * _precision(values) * np.abs(values).max())


def are_sine_and_cosine(one: Array, other: Array) -> bool:
    """Whether two tensors are sine and cosine of the same angles, times one factor."""
    return _on_a_circle(sample(one), sample(other)) and _on_a_circle(one, other)


def likely_sine_and_cosine(samples: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """The pairs of equally large samples that `are_sine_and_cosine` should look at."""
    varied = [number for number, values in enumerate(samples) if _varies(values)]
    squares = np.array([samples[number].astype(np.float64) ** 2 for number in varied])
    for place, number in enumerate(varied):
        sums = squares[place] + squares[place + 1 :]
        even = np.ptp(sums, axis=1) <= _ROUNDING * _precision(samples[number]) * np.max(sums, axis=1)
        yield from ((number, varied[place + 1 + int(other)]) for other in np.flatnonzero(even))


def is_of_a_formula(number: float) -> bool:
    """Whether formulas hold such numbers: small whole ones, roots, the inverses of both, and GELU's."""
    size = abs(number)
    if size == 0 or not size < _LARGEST:
        return True
    forms = (size, size**2, 1 / size, 1 / size**2)
    whole = any(form < _LARGEST and math.isclose(form, round(form), rel_tol=1e-6) for form in forms)
    return whole or any(math.isclose(size, constant, rel_tol=1e-6) for constant in _GELU)


def has_several_axes(shape: tuple[int, ...]) -> bool:
    """Whether more than one axis has more than one element, as tables have and biases have not."""
    return sum(size > 1 for size in shape) > 1


def _halves(values: Array) -> Iterator[tuple[Array, Array]]:
    for axis, size in enumerate(values.shape):
        if size % 2 == 0:
            front = np.moveaxis(values, axis, 0)
            yield front[: size // 2], front[size // 2 :]
            yield front[0::2], front[1::2]


def _on_a_circle(one: Array, other: Array) -> bool:
    """Whether the sums of squares are all the same, though the values are several."""
    if not _varies(one):
        return False
    squares = one.astype(np.float64) ** 2 + other.astype(np.float64) ** 2
    return bool(np.ptp(squares) <= _ROUNDING * _precision(one) * np.max(squares))


def _varies(values: Array) -> bool:
    return len(np.unique(np.abs(values.astype(np.float64)))) >= _FEWEST_ANGLES


def sample(values: Array) -> Array:
    """A few entries from all over a tensor."""
    if values.size <= _SAMPLE:
        return np.asarray(values).reshape(-1)
    return np.asarray(values.flat[np.linspace(0, values.size - 1, _SAMPLE).astype(np.int64)])


def _precision(values: Array) -> float:
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(values.dtype.name, 2.0**-23)
