"""Facts about one weight: its values, its marks by the exporter, and its name."""

import re

import numpy as np

from onnxgc.model.core.ir import Array, TensorType, Weight
from onnxgc.model.core.stored_weights import ExportedAs, FilledWeight, StoredWeight, peek
from onnxgc.model.weight_roles.value_patterns import holds_distances, is_additive_mask, is_binary_mask

_MAX_ELEMENTS = 1 << 24
"""Enough for masks of attention over a few thousand tokens."""
_MAX_FILLED = 8
_CONSTANT_WORDS = frozenset(
    {
        *("add", "clone", "const", "constant", "cst", "default", "dim", "div", "eps", "epsilon", "exponent"),
        *("float", "full", "half", "in", "input", "lifted", "like", "literal", "max", "min", "mul", "number"),
        *("one", "two", "three", "four", "five", "six", "zero", "out", "output", "pow", "scalar", "size"),
        *("sqrt", "sub", "tensor", "to", "val", "value", *"abckmnpqstxyz"),
    }
)
"""A name made only of these words belongs to a constant."""


def values_of(weight: Weight) -> Array:
    """A weight's values if they are cheap to read, else a single NaN, which fits no pattern.

    Those of a filled weight are shortened along each axis, which changes no pattern.
    """
    if weight.type.element_count > _MAX_ELEMENTS:
        return np.full((1,), np.nan)
    if isinstance(weight, FilledWeight):
        shape = tuple(min(size, _MAX_FILLED) for size in weight.type.shape)
        return FilledWeight(weight.value, TensorType(weight.type.dtype, shape)).load()
    values = peek(weight)
    return np.full((1,), np.nan) if values is None else values


def is_zero(weight: Weight) -> bool:
    return not np.any(values_of(weight))


def is_mask(weight: Weight) -> bool:
    values = values_of(weight)
    return is_additive_mask(values) or is_binary_mask(values) or holds_distances(values) or is_zero(weight)


def is_initializer(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.is_initializer


def exported_role(weight: Weight) -> ExportedAs:
    return weight.exported_as if isinstance(weight, StoredWeight) else ExportedAs.UNKNOWN


def has_exported_name(weight: Weight) -> bool:
    return exported_role(weight) is ExportedAs.NAMED


def has_descriptive_name(name: str) -> bool:
    """Whether a name has a word of the source program, as `logit_scale` has and `val_12` has not."""
    if name.startswith(("onnx::", "/")):
        return False
    words = re.findall(r"[a-z]+", re.split(r"[/.:]", name.rstrip("/"))[-1].lower())
    return bool(words) and not _CONSTANT_WORDS.issuperset(words)
