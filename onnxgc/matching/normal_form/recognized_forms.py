"""Facts about values: how a value follows from another one.

Each class is one form that the normal form recognises. A rule reads these facts to recognise a composed
function at its last operator, such as a softmax at its division.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxgc.matching.normal_form.dimensions import Dim, Dims
from onnxgc.matching.normal_form.entities import View, WeightTensor


class Fact:
    """How a value follows from others."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Plus(Fact):
    """value + offset."""

    value: int
    offset: float


@dataclass(frozen=True, slots=True)
class Clipped(Fact):
    """min(max(value, low), high)."""

    value: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Power(Fact):
    """value ** exponent."""

    value: int
    exponent: float


@dataclass(frozen=True, slots=True)
class _Reduction(Fact):
    """A fact about a value and its reduction over atoms."""

    value: int
    over: Dim


class Mean(_Reduction):
    """mean(value)."""


class Maximum(_Reduction):
    """max(value)."""


class Centred(_Reduction):
    """value - mean(value)."""


class BelowMaximum(_Reduction):
    """value - max(value)."""


class ShiftedExponential(_Reduction):
    """exp(value - max(value)), the numerator of a softmax."""


class Variance(_Reduction):
    """mean(value ** 2) - mean(value) ** 2."""


@dataclass(frozen=True, slots=True)
class _Deviation(_Reduction):
    """A fact with deviation(value) = (variance(value) + epsilon) ** 0.5."""

    epsilon: float


class InverseDeviation(_Deviation):
    """1 / deviation(value)."""


class ByDeviation(_Deviation):
    """value / deviation(value)."""


class MeanByDeviation(_Deviation):
    """mean(value) / deviation(value)."""


@dataclass(frozen=True, slots=True)
class Normalized(_Deviation):
    """(value - mean(value)) / deviation(value); `rest` are the atoms that are not reduced."""

    rest: Dim


@dataclass(frozen=True, slots=True)
class Affine(Fact):
    """scale * value and a weight that extends along `cover`."""

    value: int
    weight: WeightTensor
    cover: Dim
    scale: float


class Weighted(Affine):
    """scale * value times a weight."""


class Shifted(Affine):
    """scale * value plus a weight."""


@dataclass(frozen=True, slots=True)
class Product(Fact):
    """The elementwise product of two values."""

    first: View
    second: View


@dataclass(frozen=True, slots=True)
class Layer(Fact):
    """A dense product with weights, which makes the `channels`; `weights` begins with a weight's name."""

    channels: Dim
    op: str
    weights: tuple[Any, ...]
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Expanded(Fact):
    """A value that is repeated along new dimensions; `dims` are those before."""

    value: int
    dims: Dims


@dataclass(frozen=True, slots=True)
class Concatenated(Fact):
    """Parts that are concatenated along `axis`, and the weights among them."""

    axis: Dim
    parts: tuple[Any, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Padded(Fact):
    """A value that is padded with `fill`; `origins` has the dimension and pads behind each padded one."""

    value: int
    origins: Mapping[Dim, tuple[Dim, int, int]]
    fill: float


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The operands of a sum that only another sum reads; `count` is the number of values in all."""

    views: tuple[View, ...]
    weights: tuple[WeightTensor, ...]
    count: int
