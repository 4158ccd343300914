"""Gradients of operators that move elements and compute none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import reshape, zeros


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
    nothing = zeros(g, g.input_shape(0))
    axis = int(g.attribute("axis", 0))
    g.give(0, g.emit("ScatterElements", nothing, g.x(1), g.dy, axis=axis, reduction="add"))


def split(g: GradientContext) -> None:
    """y_0, y_1, ... = x in pieces: dx = their gradients side by side, zeros for a piece without one."""
    axis = int(g.attribute("axis", 0))
    pieces = [
        g.incoming[index] if index in g.incoming else zeros(g, g.output_shape(index))
        for index in range(len(g.node.outputs))
    ]
    g.give(0, pieces[0] if len(pieces) == 1 else g.emit("Concat", *pieces, axis=axis))


def pad(g: GradientContext) -> None:
    """y = x amid constants: dx = dy where x is, and zeros where a negative pad cut x.

    Raises:
        UnsupportedOperatorError: another mode than constant, or pads that are computed in the graph.
    """
    mode = g.attribute("mode", "constant")
    if mode != "constant":
        raise UnsupportedOperatorError(
            f"Pad '{g.node.origin or g.node.name}' has mode '{mode}', which has no gradient rule; "
            "pad with constants"
        )
    shape = g.input_shape(0)
    pads = _integers(g, 1, "pads")
    axes = _integers(g, 3, "axes") or range(len(shape))
    begins, ends = [0] * len(shape), [0] * len(shape)
    for axis, begin, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        begins[axis], ends[axis] = begin, end
    # The part of x that is in y.
    lows = [max(0, -begin) for begin in begins]
    highs = [min(size, size + end) for size, end in zip(shape, ends, strict=True)]
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        g.give(0, zeros(g, shape))
        return
    padded = [axis for axis in range(len(shape)) if begins[axis] > 0 or ends[axis] > 0]
    gradient = g.dy
    if padded:
        starts = g.ints(*(lows[axis] + begins[axis] for axis in padded))
        stops = g.ints(*(highs[axis] + begins[axis] for axis in padded))
        gradient = g.emit("Slice", gradient, starts, stops, g.ints(*padded))
    cut = [size - high for size, high in zip(shape, highs, strict=True)]
    g.give(0, _amid_zeros(g, gradient, lows, cut))


def slice_(g: GradientContext) -> None:
    """y = elements of x in even steps: dx = dy in their places, and zeros.

    An axis of x is taken for blocks of |step| elements, at most one of which is in y; the last block may
    be incomplete. One Pad makes blocks of the elements of y and adds the blocks that have none.

    Raises:
        UnsupportedOperatorError: starts, axes or steps are computed in the graph.
    """
    shape = g.input_shape(0)
    if 0 in g.output_shape():
        g.give(0, zeros(g, shape))
        return
    taken = _taken(g)
    gradient = g.dy
    if turned := [axis for axis, along in enumerate(taken) if along.backwards]:
        starts, steps = g.ints(*(-1 for _ in turned)), g.ints(*(-1 for _ in turned))
        stops = g.ints(*(-taken[axis].count - 1 for axis in turned))
        gradient = g.emit("Slice", gradient, starts, stops, g.ints(*turned), steps)
    sizes, before, after = zip(*(part for along in taken for part in along.parts), strict=True)
    if len(sizes) > len(shape):
        gradient = reshape(g, gradient, sizes)
    gradient = _amid_zeros(g, gradient, before, after)
    if len(sizes) > len(shape):
        gradient = reshape(g, gradient, tuple(along.blocks * along.step for along in taken))
    if longer := [axis for axis, along in enumerate(taken) if along.blocks * along.step > along.extent]:
        stops = g.ints(*(shape[axis] for axis in longer))
        gradient = g.emit("Slice", gradient, g.ints(*(0 for _ in longer)), stops, g.ints(*longer))
    g.give(0, gradient)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a Slice takes along one axis: `count` of `extent` elements, in steps from `lowest` on."""

    extent: int
    count: int
    lowest: int = 0
    step: int = 1
    backwards: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.extent // self.step)

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """Size, pad before and pad after: of the axis by blocks, and of the places in a block."""
        block, place = divmod(self.lowest, self.step)
        by_blocks = (self.count, block, self.blocks - block - self.count)
        return (by_blocks,) if self.step == 1 else (by_blocks, (1, place, self.step - 1 - place))


def _taken(g: GradientContext) -> tuple[_Taken, ...]:
    """Of each axis of a Slice that is not empty; where it ends follows from y's shape.

    Source: ONNX opset 18, Slice.
    """
    taken = [_Taken(*sizes) for sizes in zip(g.input_shape(0), g.output_shape(), strict=True)]
    starts = _integers(g, 1, "starts")
    axes = _integers(g, 3, "axes") or range(len(starts))
    steps = _integers(g, 4, "steps") or (1,) * len(starts)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        extent, count = taken[axis].extent, taken[axis].count
        first = min(max(start + extent if start < 0 else start, 0), extent - 1)
        if count == 1:
            taken[axis] = _Taken(extent, count, first)
        else:
            lowest = first if step > 0 else first + (count - 1) * step
            taken[axis] = _Taken(extent, count, lowest, abs(step), step < 0)
    return tuple(taken)


def _amid_zeros(g: GradientContext, tensor: str, before: Sequence[int], after: Sequence[int]) -> str:
    """`tensor` with that many zeros before and after it along each axis."""
    return g.emit("Pad", tensor, g.ints(*before, *after)) if any((*before, *after)) else tensor


def _integers(g: GradientContext, index: int, what: str) -> tuple[int, ...]:
    """Values of the constant input `index`; none if it is absent.

    Raises:
        UnsupportedOperatorError: it is computed in the graph.
    """
    if not g.has_input(index):
        return ()
    value = g.constant_input(index)
    if value is None:
        raise UnsupportedOperatorError(
            f"{g.node.op} '{g.node.origin or g.node.name}' computes its {what} in the graph, which has no "
            f"gradient rule; export the model with constant {what}"
        )
    return tuple(int(number) for number in value.reshape(-1))
