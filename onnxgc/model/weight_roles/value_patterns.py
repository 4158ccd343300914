"""Recognises values that are formulas, which training does not produce: such weights are constants.

Arrays may be mapped from a file, so each test reads a sample before the whole.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from onnxgc.model.core.ir import Array

MAX_MASK_VALUE = -100.0
"""An additive constant of zeros and values up to this one is a mask, as in Swin and BERT."""
_MAX_HIDING_VALUE = -1e4
"""A value up to this one hides any score, also in a mask that contains distances."""
_MIN_FREQUENCIES = 4
_MAX_SEQUENCE = 1 << 14
_MIN_COUNTS = 4
_MIN_ANGLES = 3
_MIN_DISTANCES = 4
_SAMPLE_SIZE = 61
_MAX_ROUNDING = 8
"""Rounding error of values and of sums of their squares, in units of their type's precision."""
_MAX_LOG_ROUNDING = 1e-5
_MAX_FORMULA_NUMBER = 4096
"""Larger numbers replace infinity."""
_GELU = (0.044715, math.sqrt(2 / math.pi), 1.702)
"""The constants of GELU: cubic term and factor of the tanh form, slope of the sigmoid form."""


def is_additive_mask(values: Array) -> bool:
    """Whether all values are zero or large and negative, or a table has values that hide any score."""
    masking = values <= MAX_MASK_VALUE
    if np.all(masking | (values == 0)):
        return bool(np.any(masking))
    return has_several_axes(values.shape) and bool(np.any(values <= _MAX_HIDING_VALUE))


def is_binary_mask(values: Array) -> bool:
    """Whether it contains zeros, ones and nothing else; an untrained scale is all ones, a bias all zeros."""
    some = sample(values)
    if not np.all((some == 0) | (some == 1)):
        return False
    ones = values == 1
    return bool(np.all(ones | (values == 0)) and np.any(ones) and not np.all(ones))


def is_geometric(values: Array) -> bool:
    """Whether the distinct values are a geometric sequence, as frequencies base^(-2i/d) are.

    >>> is_geometric(10000.0 ** (-np.arange(0, 64, 2) / 64))
    True
    """
    if max(values.shape, default=1) != values.size or values.size > _MAX_SEQUENCE:
        return False
    distinct = np.unique(values.astype(np.float64))
    if len(distinct) < _MIN_FREQUENCIES or distinct[0] <= 0 or not np.isfinite(distinct[-1]):
        return False
    allowed = max(_MAX_ROUNDING * _precision(values), _MAX_LOG_ROUNDING)
    return bool(np.ptp(np.diff(np.log(distinct))) <= allowed)


def counts_up(values: Array) -> bool:
    """Whether it is 0, 1, 2, ... or 1, 2, 3, ...: their mean under a distribution is a position."""
    if max(values.shape, default=1) != values.size or not _MIN_COUNTS <= values.size <= _MAX_SEQUENCE:
        return False
    first = float(values.flat[0])
    return first in (0, 1) and bool(np.all(values.reshape(-1) == first + np.arange(values.size)))


def holds_sines_and_cosines(values: Array) -> bool:
    """Whether the halves of a table, or its even and odd entries, are sines and cosines of equal angles."""
    return any(are_sine_and_cosine(one, other) for one, other in _halves(values))


def holds_distances(values: Array) -> bool:
    """Whether rows change by a constant step, from zero on or in both directions from a diagonal."""
    if values.ndim == 0 or values.shape[-1] < _MIN_DISTANCES:
        return False
    if _holds_distances_from_diagonal(values):
        return True
    steps = np.diff(values.astype(np.float64))
    largest = np.max(np.abs(values.astype(np.float64)))
    even = np.ptp(steps, axis=-1) <= _MAX_ROUNDING * _precision(values) * largest
    return bool(np.any(steps) and np.all(even) and not np.any(values[..., 0]))


def _holds_distances_from_diagonal(values: Array) -> bool:
    """Whether each matrix of [..., L, S] is |i - j| times a factor, with the last row at the last column."""
    if values.ndim < 2 or values.shape[-2] > values.shape[-1]:
        return False
    rows, columns = values.shape[-2:]
    distances = np.abs(np.arange(columns) - np.arange(columns - rows, columns)[:, None])
    factors = values[..., -1:, -2:-1].astype(np.float64)
    errors = np.abs(values - factors * distances)
    return bool(np.any(factors) and errors.max() <= _MAX_ROUNDING * _precision(values) * np.abs(values).max())


def are_sine_and_cosine(one: Array, other: Array) -> bool:
    """Whether two tensors are sine and cosine of the same angles, up to a common factor."""
    return _lie_on_circle(sample(one), sample(other)) and _lie_on_circle(one, other)


def likely_sine_and_cosine(samples: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """The pairs of equally large samples that may be sine and cosine."""
    varied = [number for number, values in enumerate(samples) if _varies(values)]
    squares = np.array([samples[number].astype(np.float64) ** 2 for number in varied])
    for position, number in enumerate(varied):
        sums = squares[position] + squares[position + 1 :]
        even = np.ptp(sums, axis=1) <= _MAX_ROUNDING * _precision(samples[number]) * np.max(sums, axis=1)
        yield from ((number, varied[position + 1 + int(other)]) for other in np.flatnonzero(even))


def is_of_a_formula(number: float) -> bool:
    """Whether a number is common in formulas: a small integer, its root or inverse, or one of GELU's.

    >>> is_of_a_formula(64**-0.5), is_of_a_formula(0.07)
    (True, False)
    """
    size = abs(number)
    if size == 0 or not size < _MAX_FORMULA_NUMBER:
        return True
    forms = (size, size**2, 1 / size, 1 / size**2)
    whole = any(form < _MAX_FORMULA_NUMBER and math.isclose(form, round(form), rel_tol=1e-6) for form in forms)
    return whole or any(math.isclose(size, constant, rel_tol=1e-6) for constant in _GELU)


def has_several_axes(shape: tuple[int, ...]) -> bool:
    """Whether more than one axis has several elements, as in tables, but not in biases."""
    return sum(size > 1 for size in shape) > 1


def _halves(values: Array) -> Iterator[tuple[Array, Array]]:
    for axis, size in enumerate(values.shape):
        if size % 2 == 0:
            front = np.moveaxis(values, axis, 0)
            yield front[: size // 2], front[size // 2 :]
            yield front[0::2], front[1::2]


def _lie_on_circle(one: Array, other: Array) -> bool:
    """Whether the values differ and their sums of squares are equal."""
    if not _varies(one):
        return False
    squares = one.astype(np.float64) ** 2 + other.astype(np.float64) ** 2
    return bool(np.ptp(squares) <= _MAX_ROUNDING * _precision(one) * np.max(squares))


def _varies(values: Array) -> bool:
    return len(np.unique(np.abs(values.astype(np.float64)))) >= _MIN_ANGLES


def sample(values: Array) -> Array:
    """Up to `_SAMPLE_SIZE` evenly spaced entries of a tensor."""
    if values.size <= _SAMPLE_SIZE:
        return np.asarray(values).reshape(-1)
    return np.asarray(values.flat[np.linspace(0, values.size - 1, _SAMPLE_SIZE).astype(np.int64)])


def _precision(values: Array) -> float:
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(values.dtype.name, 2.0**-23)
