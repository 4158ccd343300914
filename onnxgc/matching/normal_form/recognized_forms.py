"""Facts about values: how a value follows from another one.

Each class is one form that the normal form recognises. A rule reads these facts to recognise a composed
function at its last operator, such as a softmax at its division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxgc.matching.normal_form.dimensions import Dim, Dims
from onnxgc.matching.normal_form.entities import View, WeightTensor


@dataclass(frozen=True, slots=True)
class Plus:
    """value + offset."""

    value: int
    offset: float


@dataclass(frozen=True, slots=True)
class Clipped:
    """min(max(value, low), high)."""

    value: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Power:
    """value ** exponent."""

    value: int
    exponent: float


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a value over atoms."""

    value: int
    over: Dim


@dataclass(frozen=True, slots=True)
class Maximum:
    """The maximum of a value over atoms."""

    value: int
    over: Dim


@dataclass(frozen=True, slots=True)
class Centred:
    """value - mean(value)."""

    value: int
    over: Dim


@dataclass(frozen=True, slots=True)
class BelowMaximum:
    """value - max(value)."""

    value: int
    over: Dim


@dataclass(frozen=True, slots=True)
class ShiftedExponential:
    """exp(value - max(value)), the numerator of a softmax."""

    value: int
    over: Dim


@dataclass(frozen=True, slots=True)
class Variance:
    """mean(value ** 2) - mean(value) ** 2."""

    value: int
    over: Dim


@dataclass(frozen=True, slots=True)
class InverseDeviation:
    """(variance(value) + epsilon) ** -0.5."""

    value: int
    over: Dim
    epsilon: float


@dataclass(frozen=True, slots=True)
class ByDeviation:
    """value / deviation(value)."""

    value: int
    over: Dim
    epsilon: float


@dataclass(frozen=True, slots=True)
class MeanByDeviation:
    """mean(value) / deviation(value)."""

    value: int
    over: Dim
    epsilon: float


@dataclass(frozen=True, slots=True)
class Normalized:
    """(value - mean(value)) / deviation(value); `rest` are the atoms that are not reduced."""

    value: int
    over: Dim
    epsilon: float
    rest: Dim


@dataclass(frozen=True, slots=True)
class Weighted:
    """scale * value times a weight that extends along `cover`."""

    value: int
    weight: WeightTensor
    cover: Dim
    scale: float


@dataclass(frozen=True, slots=True)
class Shifted:
    """scale * value plus a weight that extends along `cover`."""

    value: int
    weight: WeightTensor
    cover: Dim
    scale: float


@dataclass(frozen=True, slots=True)
class Product:
    """The elementwise product of two values."""

    first: View
    second: View


@dataclass(frozen=True, slots=True)
class Layer:
    """A dense product with weights, which makes the `channels`; `weights` begins with a weight's name."""

    channels: Dim
    op: str
    weights: tuple[Any, ...]
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Expanded:
    """A value that is repeated along new dimensions; `dims` are those before."""

    value: int
    dims: Dims


@dataclass(frozen=True, slots=True)
class Concatenated:
    """Parts that are concatenated along `axis`, and the weights among them."""

    axis: Dim
    parts: tuple[Any, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Padded:
    """A value that is padded with `fill`; `origins` has the dimension and pads behind each padded one."""

    value: int
    origins: Mapping[Dim, tuple[Dim, int, int]]
    fill: float


Fact = (
    Plus
    | Clipped
    | Power
    | Mean
    | Maximum
    | Centred
    | BelowMaximum
    | ShiftedExponential
    | Variance
    | InverseDeviation
    | ByDeviation
    | MeanByDeviation
    | Normalized
    | Weighted
    | Shifted
    | Product
    | Layer
    | Expanded
    | Concatenated
    | Padded
)


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The operands of a sum that only another sum reads; `count` is the number of values in all."""

    views: tuple[View, ...]
    weights: tuple[WeightTensor, ...]
    count: int
