"""Gradient of Pad, in all modes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import Sums, reduce_sum, reshape, zeros
from onnxgc.gradients.slicing import pad_with_zeros


@dataclass(frozen=True, slots=True)
class _AxisPad:
    """Pads before and after one axis of `extent` elements; a negative pad crops the axis."""

    extent: int
    before: int = 0
    after: int = 0

    @property
    def low(self) -> int:
        """First element of x that y contains."""
        return max(0, -self.before)

    @property
    def high(self) -> int:
        """End of the part of x that y contains."""
        return min(self.extent, self.extent + self.after)

    @property
    def kept(self) -> int:
        return max(self.high - self.low, 0)

    @property
    def margin(self) -> int:
        """Elements of y before the part of x."""
        return max(0, self.before)

    @property
    def total(self) -> int:
        return self.extent + self.before + self.after

    @property
    def growth(self) -> float:
        return self.total / max(self.extent, 1)


def pad(g: GradientContext) -> None:
    """y = x between margins: dx = dy at x's elements, and zero where a negative pad crops x.

    In the modes reflect, edge and wrap the margins repeat elements of x, one axis after the other; their
    gradient is added to the repeated elements. In mode constant the constant's gradient is their sum.

    Raises:
        UnsupportedOperatorError: pads or axes are computed in the graph.
    """
    shape = g.input_shape(0)
    pads = _axis_pads(g)
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
        # The axis that shrinks most comes first, to keep intermediate tensors small.
        sizes = list(g.output_shape())
        for axis in sorted(range(len(pads)), key=lambda axis: -pads[axis].growth):
            gradient = _folded_margins(g, gradient, pads, axis, sizes)
            sizes[axis] = pads[axis].kept
    cropped = [along.extent - along.high for along in pads]
    g.give(0, pad_with_zeros(g, gradient, [along.low for along in pads], cropped))


def _axis_pads(g: GradientContext) -> tuple[_AxisPad, ...]:
    shape = g.input_shape(0)
    pads = g.constant_integers(1, "pads")
    found = [_AxisPad(extent) for extent in shape]
    axes = g.constant_integers(3, "axes") or range(len(shape))
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        found[axis] = _AxisPad(shape[axis], before, after)
    return tuple(found)


def _without_margins(g: GradientContext, gradient: str, pads: Sequence[_AxisPad], axes: Sequence[int]) -> str:
    """`gradient` without the margins along `axes`."""
    padded = [axis for axis in axes if pads[axis].before > 0 or pads[axis].after > 0]
    if not padded:
        return gradient
    starts = g.ints(*(pads[axis].margin for axis in padded))
    stops = g.ints(*(pads[axis].margin + pads[axis].kept for axis in padded))
    return g.emit("Slice", gradient, starts, stops, g.ints(*padded))


def _folded_margins(
    g: GradientContext, gradient: str, pads: Sequence[_AxisPad], axis: int, sizes: Sequence[int]
) -> str:
    """`gradient` of `sizes` without the margins along `axis`, which are added to the elements they repeat.

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


def _margin_sum(g: GradientContext, pads: Sequence[_AxisPad]) -> str:
    """Sum of dy over all margins. Axis by axis, without the margins before, so each element counts once."""
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
