"""Gradients of operators that move elements and compute none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.broadcasting import Sums, reduce_sum, reshape, zeros
from onnxgc.gradients.engine import GradientContext


def view(g: GradientContext) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze: dx = dy in x's shape."""
    g.give(0, reshape(g, g.dy, g.input_shape(0)))


def transpose(g: GradientContext) -> None:
    """y = x with axes permuted: dx = dy with the inverse permutation."""
    rank = len(g.input_shape(0))
    if not rank:
        g.give(0, g.dy)
        return
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


def split(g: GradientContext) -> None:
    """y_0, y_1, ... = x in pieces: dx = their gradients side by side, zeros for a piece without one."""
    axis = int(g.attribute("axis", 0))
    pieces = [
        g.incoming[index] if index in g.incoming else zeros(g, g.output_shape(index))
        for index in range(len(g.node.outputs))
    ]
    g.give(0, pieces[0] if len(pieces) == 1 else g.emit("Concat", *pieces, axis=axis))


def pad(g: GradientContext) -> None:
    """y = x amid other elements: dx = dy where x is, and zeros where a negative pad cut x.

    In the modes reflect, edge and wrap the margins of y are elements of x once more, one axis after the
    other, and what they have of dy is added to these. In mode constant the constant has their sum.

    Raises:
        UnsupportedOperatorError: pads or axes are computed in the graph.
    """
    shape = g.input_shape(0)
    pads = _pads(g)
    if g.wants(2):
        g.give(2, reshape(g, _margin_sum(g, pads), g.input_shape(2)))
    if not g.wants(0):
        return
    if 0 in g.output_shape() or any(along.low >= along.high for along in pads):
        g.give(0, zeros(g, shape))
        return
    mode = g.attribute("mode", "constant")
    gradient = g.dy
    if mode == "constant":
        gradient = _without_margins(g, gradient, pads, range(len(pads)))
    else:
        # The axis that shrinks most comes first, so that what lies between is small.
        sizes = list(g.output_shape())
        for axis in sorted(range(len(pads)), key=lambda axis: -pads[axis].growth):
            gradient = _folded_margins(g, gradient, pads, axis, sizes)
            sizes[axis] = pads[axis].kept
    cut = [along.extent - along.high for along in pads]
    g.give(0, _amid_zeros(g, gradient, [along.low for along in pads], cut))


@dataclass(frozen=True, slots=True)
class _Padded:
    """What a Pad does along one axis: a margin before and after it; a negative one cuts `extent`."""

    extent: int
    before: int = 0
    after: int = 0

    @property
    def low(self) -> int:
        """The part of x that is in y begins here."""
        return max(0, -self.before)

    @property
    def high(self) -> int:
        return min(self.extent, self.extent + self.after)

    @property
    def kept(self) -> int:
        return max(self.high - self.low, 0)

    @property
    def margin(self) -> int:
        """Elements of y before that part."""
        return max(0, self.before)

    @property
    def total(self) -> int:
        return self.extent + self.before + self.after

    @property
    def growth(self) -> float:
        return self.total / max(self.extent, 1)


def _pads(g: GradientContext) -> tuple[_Padded, ...]:
    shape = g.input_shape(0)
    pads = _integers(g, 1, "pads")
    padded = [_Padded(extent) for extent in shape]
    axes = _integers(g, 3, "axes") or range(len(shape))
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        padded[axis] = _Padded(shape[axis], before, after)
    return tuple(padded)


def _without_margins(g: GradientContext, gradient: str, pads: Sequence[_Padded], axes: Sequence[int]) -> str:
    """What is left of `gradient` without the margins along `axes`."""
    padded = [axis for axis in axes if pads[axis].before > 0 or pads[axis].after > 0]
    if not padded:
        return gradient
    starts = g.ints(*(pads[axis].margin for axis in padded))
    stops = g.ints(*(pads[axis].margin + pads[axis].kept for axis in padded))
    return g.emit("Slice", gradient, starts, stops, g.ints(*padded))


def _folded_margins(
    g: GradientContext, gradient: str, pads: Sequence[_Padded], axis: int, sizes: Sequence[int]
) -> str:
    """`gradient` of `sizes` without the margins along `axis`, added to the elements that they repeat.

    Source: ONNX opset 19, Pad, whose modes are numpy's.
    """
    along = pads[axis]
    margins = (along.margin, max(0, along.after))
    repeated = np.pad(np.arange(along.kept, dtype=np.int32), margins, mode=g.attribute("mode"))
    total = Sums.on(g, _without_margins(g, gradient, pads, (axis,)), axis)
    for start, stop in ((0, along.margin), (along.margin + along.kept, len(repeated))):
        if start == stop:
            continue
        margin = g.emit("Slice", gradient, g.ints(start), g.ints(stop), g.ints(axis))
        places = repeated[start:stop].reshape([-1 if other == axis else 1 for other in range(len(sizes))])
        target = g.ints(*sizes[:axis], stop - start, *sizes[axis + 1 :])
        total.add(g.emit("Expand", g.constants.add(places), target), margin)
    return total.result()


def _margin_sum(g: GradientContext, pads: Sequence[_Padded]) -> str:
    """Sum of dy over all margins, each element once: one axis after the other, and on without these."""
    gradient, total = g.dy, ""
    for axis, along in enumerate(pads):
        for start, stop in ((0, along.margin), (along.margin + along.kept, along.total)):
            if start >= stop:
                continue
            margin = g.emit("Slice", gradient, g.ints(start), g.ints(stop), g.ints(axis))
            part = reduce_sum(g, margin, tuple(range(len(pads))))
            total = g.emit("Add", total, part) if total else part
        gradient = _without_margins(g, gradient, pads, (axis,))
    return total or zeros(g, ())


def depth_to_space(g: GradientContext) -> None:
    """y = x [N, C b^2, H, W] as [N, C, H b, W b]: dx = dy with each block back in its channels.

    A channel of x is numbered by (row in block, column, C) in mode DCR, by (C, row, column) in CRD.
    """
    batch, channels, height, width = g.output_shape()
    block = int(g.attribute("blocksize"))
    order = [0, 1, 3, 5, 2, 4] if g.attribute("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    blocks = reshape(g, g.dy, (batch, channels, height // block, block, width // block, block))
    g.give(0, reshape(g, g.emit("Transpose", blocks, perm=order), g.input_shape(0)))


def space_to_depth(g: GradientContext) -> None:
    """y = x [N, C, H b, W b] as [N, b^2 C, H, W]: dx = dy with the channels back in their block."""
    batch, channels, height, width = g.input_shape(0)
    block = int(g.attribute("blocksize"))
    parts = reshape(g, g.dy, (batch, block, block, channels, height // block, width // block))
    g.give(0, reshape(g, g.emit("Transpose", parts, perm=[0, 3, 4, 1, 5, 2]), g.input_shape(0)))


def col2im(g: GradientContext) -> None:
    """y = blocks [N, C k, L] added up in their places: dx = the windows of dy, one block a window.

    The windows are taken by a convolution whose filters each pick one element.
    """
    batch, channels, *image = g.output_shape()
    block = [int(size) for size in _integers(g, 2, "block shape")]
    count = math.prod(block)
    picks = g.tensor(np.eye(count).reshape(count, 1, *block))
    settings = {name: g.attribute(name) for name in ("dilations", "pads", "strides") if g.attribute(name)}
    images = reshape(g, g.dy, (batch * channels, 1, *image))
    windows = g.emit("Conv", images, picks, kernel_shape=block, **settings)
    g.give(0, reshape(g, windows, g.input_shape(0)))


def slice_(g: GradientContext) -> None:
    """y = elements of x in even steps: dx = dy in their places, and zeros.

    Raises:
        UnsupportedOperatorError: starts, axes or steps are computed in the graph.
    """
    shape = g.input_shape(0)
    if 0 in g.output_shape():
        g.give(0, zeros(g, shape))
        return
    g.give(0, placed(g, g.dy, _taken(g)))


def placed(g: GradientContext, gradient: str, taken: Sequence[Taken]) -> str:
    """The gradient of what was taken in the places that it was taken from, amid zeros.

    An axis is taken for blocks of `step` elements, at most one of which was taken; the last block may be
    incomplete. One Pad makes blocks of the elements and adds the blocks that have none.
    """
    if turned := [axis for axis, along in enumerate(taken) if along.backwards]:
        starts, steps = g.ints(*(-1 for _ in turned)), g.ints(*(-1 for _ in turned))
        stops = g.ints(*(-taken[axis].count - 1 for axis in turned))
        gradient = g.emit("Slice", gradient, starts, stops, g.ints(*turned), steps)
    sizes, before, after = zip(*(part for along in taken for part in along.parts), strict=True)
    if len(sizes) > len(taken):
        gradient = reshape(g, gradient, sizes)
    gradient = _amid_zeros(g, gradient, before, after)
    if len(sizes) > len(taken):
        gradient = reshape(g, gradient, tuple(along.blocks * along.step for along in taken))
    if longer := [axis for axis, along in enumerate(taken) if along.blocks * along.step > along.extent]:
        stops = g.ints(*(taken[axis].extent for axis in longer))
        gradient = g.emit("Slice", gradient, g.ints(*(0 for _ in longer)), stops, g.ints(*longer))
    return gradient


@dataclass(frozen=True, slots=True)
class Taken:
    """What is taken along one axis: `count` of `extent` elements, in steps from `lowest` on."""

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


def _taken(g: GradientContext) -> tuple[Taken, ...]:
    """Of each axis of a Slice that is not empty; where it ends follows from y's shape.

    Source: ONNX opset 18, Slice.
    """
    taken = [Taken(*sizes) for sizes in zip(g.input_shape(0), g.output_shape(), strict=True)]
    starts = _integers(g, 1, "starts")
    axes = _integers(g, 3, "axes") or range(len(starts))
    steps = _integers(g, 4, "steps") or (1,) * len(starts)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        extent, count = taken[axis].extent, taken[axis].count
        first = min(max(start + extent if start < 0 else start, 0), extent - 1)
        if count == 1:
            taken[axis] = Taken(extent, count, first)
        else:
            lowest = first if step > 0 else first + (count - 1) * step
            taken[axis] = Taken(extent, count, lowest, abs(step), step < 0)
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
            f"{g.node.place} computes its {what} in the graph, which has no "
            f"gradient rule; export the model with constant {what}"
        )
    return tuple(int(number) for number in value.reshape(-1))
