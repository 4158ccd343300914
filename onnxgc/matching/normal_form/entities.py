"""Entities of a network, and tensors as seen by the rules of operators."""

from dataclasses import dataclass
from typing import Any

from onnxgc.matching.normal_form.constant_tables import Table
from onnxgc.matching.normal_form.dimensions import Dim, Dims


@dataclass(frozen=True, slots=True)
class Entity:
    """A value or an axis: an operator applied to a term.

    `weights` distinguish entities with equal terms that read different weights. `cover` is the set of atoms
    along which a weight that makes the value extends.
    """

    op: str
    term: Any
    weights: tuple[Any, ...] = ()
    is_axis: bool = False
    size: int = 0
    cover: Dim = ()


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a value: `scale` times it, arranged as `dims`, after `dropouts` dropouts."""

    value: int
    dims: Dims
    scale: float = 1.0
    dropouts: int = 0


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A tensor that depends on weights alone.

    `number` is the element of a constant whose elements are equal. `table` has the contents of a constant
    that is identified by them. `is_transposed` marks a matrix that is read transposed.
    """

    name: str
    shape: tuple[int, ...]
    number: float | None = None
    table: Table | None = None
    is_transposed: bool = False
