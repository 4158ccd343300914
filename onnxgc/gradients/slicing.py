"""Gradient of Slice: elements at regular steps put back amid zeros."""

from collections.abc import Sequence
from dataclasses import dataclass

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import reshape, zeros


@dataclass(frozen=True, slots=True)
class AxisSlice:
    """`count` of `extent` elements along one axis, every `step` elements from `lowest`."""

    extent: int
    count: int
    lowest: int = 0
    step: int = 1
    is_reversed: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.extent // self.step)

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """Size, pad before and pad after: of the axis of blocks, and of the positions in a block."""
        block, place = divmod(self.lowest, self.step)
        by_blocks = (self.count, block, self.blocks - block - self.count)
        return (by_blocks,) if self.step == 1 else (by_blocks, (1, place, self.step - 1 - place))


def slice_(g: GradientContext) -> None:
    """y = elements of x at regular steps: dx = dy at their positions, else zero.

    Raises:
        UnsupportedOperatorError: starts, axes or steps are computed in the graph.
    """
    shape = g.input_shape(0)
    if 0 in g.output_shape():
        g.give(0, zeros(g, shape))
        return
    g.give(0, undo_slices(g, g.dy, _axis_slices(g)))


def undo_slices(g: GradientContext, gradient: str, slices: Sequence[AxisSlice]) -> str:
    """The gradient of a sliced tensor: that of the slice at its positions, amid zeros.

    An axis counts as blocks of `step` elements, of which the slice has at most one each; the last block may
    be incomplete. One Pad extends the elements to blocks and adds the blocks without an element.
    """
    if reversed_axes := [axis for axis, along in enumerate(slices) if along.is_reversed]:
        starts, steps = g.ints(*(-1 for _ in reversed_axes)), g.ints(*(-1 for _ in reversed_axes))
        stops = g.ints(*(-slices[axis].count - 1 for axis in reversed_axes))
        gradient = g.emit("Slice", gradient, starts, stops, g.ints(*reversed_axes), steps)
    sizes, before, after = zip(*(part for along in slices for part in along.parts), strict=True)
    if len(sizes) > len(slices):
        gradient = reshape(g, gradient, sizes)
    gradient = pad_with_zeros(g, gradient, before, after)
    if len(sizes) > len(slices):
        gradient = reshape(g, gradient, tuple(along.blocks * along.step for along in slices))
    if longer := [axis for axis, along in enumerate(slices) if along.blocks * along.step > along.extent]:
        stops = g.ints(*(slices[axis].extent for axis in longer))
        gradient = g.emit("Slice", gradient, g.ints(*(0 for _ in longer)), stops, g.ints(*longer))
    return gradient


def pad_with_zeros(g: GradientContext, tensor: str, before: Sequence[int], after: Sequence[int]) -> str:
    """`tensor` with these numbers of zeros before and after it along each axis."""
    return g.emit("Pad", tensor, g.ints(*before, *after)) if any((*before, *after)) else tensor


def _axis_slices(g: GradientContext) -> tuple[AxisSlice, ...]:
    """The slice along each axis of a Slice with a nonempty result; its end follows from y's shape.

    Source: ONNX opset 18, Slice.
    """
    slices = [AxisSlice(*sizes) for sizes in zip(g.input_shape(0), g.output_shape(), strict=True)]
    starts = g.constant_integers(1, "starts")
    axes = g.constant_integers(3, "axes") or range(len(starts))
    steps = g.constant_integers(4, "steps") or (1,) * len(starts)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        extent, count = slices[axis].extent, slices[axis].count
        first = min(max(start + extent if start < 0 else start, 0), extent - 1)
        if count == 1:
            slices[axis] = AxisSlice(extent, count, first)
        else:
            lowest = first if step > 0 else first + (count - 1) * step
            slices[axis] = AxisSlice(extent, count, lowest, abs(step), step < 0)
    return tuple(slices)
