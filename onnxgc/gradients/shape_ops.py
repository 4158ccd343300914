"""Gradients of operators that move elements and compute none."""

from __future__ import annotations

import numpy as np

from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import reshape


def view(g: GradientContext) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze: dx = dy in x's shape."""
    g.give(0, reshape(g, g.dy, g.input_shape(0)))


def transpose(g: GradientContext) -> None:
    """y = x with axes permuted: dx = dy with the inverse permutation."""
    rank = len(g.input_shape(0))
    permutation = g.attribute("perm") or list(reversed(range(rank)))
    g.give(0, g.emit("Transpose", g.dy, perm=[int(axis) for axis in np.argsort(permutation)]))


def concat(g: GradientContext) -> None:
    """y = inputs side by side: each gets its slice of dy."""
    rank = len(g.output_shape())
    axis = int(g.attribute("axis")) % rank
    start = 0
    for index in range(len(g.node.inputs)):
        size = g.input_shape(index)[axis]
        if g.wants(index):
            piece = (g.ints(start), g.ints(start + size), g.ints(axis))
            g.give(index, g.emit("Slice", g.dy, *piece))
        start += size


def gather_elements(g: GradientContext) -> None:
    """y = x at indices along an axis: dx = dy added back at the same places.

    Indices may repeat; ScatterElements adds them right on every thread count, ScatterND does not.
    """
    shape = g.input_shape(0)
    zeros = g.emit("Expand", g.scalar(0.0), g.ints(*shape))
    axis = int(g.attribute("axis", 0))
    g.give(0, g.emit("ScatterElements", zeros, g.x(1), g.dy, axis=axis, reduction="add"))
