"""Twins: one network in several frameworks. Sizes of the networks, and weights that follow from their names.

A weight's name determines its elements. All exports of a network compute the same numbers, and equal tensors
of two files have equal contents. Names and layouts are those of PyTorch.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CLASSES = 10
BATCH = 2
PIXELS = 64
# Blocks of each stage of ResNet-50.
BOTTLENECKS = (3, 4, 6, 3)


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """An encoder of transformer blocks with a normalisation after each residual, as in BERT."""

    words: int = 100
    length: int = 16
    width: int = 64
    heads: int = 4
    inner: int = 128
    blocks: int = 4


ENCODER = EncoderSizes()
# The defaults of flax, torch and Keras differ.
EPSILON = 1e-5


def value_of(name: str, shape: tuple[int, ...]) -> Array:
    """The weight of a name in PyTorch's layout, scaled so that activations remain bounded."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("running_var"):
        values = draw.uniform(0.5, 1.5, shape)
    elif len(shape) > 1:
        values = draw.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)
    elif name.endswith(".weight"):
        values = draw.uniform(0.5, 1.5, shape)
    else:
        values = draw.normal(0, 0.1, shape)
    return np.asarray(values, np.float32)
