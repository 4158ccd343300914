"""Geometry of sliding windows: what convolution and pooling share."""

from __future__ import annotations

from dataclasses import dataclass

from onnxgc.gradients.engine import GradientContext


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding windows over the spatial axes, with every default and auto_pad resolved.

    Source: ONNX specification of Conv and the pooling operators.
    """

    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def pads(self) -> list[int]:
        """Pads as ONNX attributes have them: all begins, then all ends."""
        return [*self.pads_begin, *self.pads_end]

    @property
    def is_padded(self) -> bool:
        return any(self.pads)

    @property
    def overshoot(self) -> tuple[int, ...]:
        """How far the last window reaches past the input's end, per axis.

        Negative: how many elements at the end no window covers.
        """
        return tuple(
            (out - 1) * stride + dilation * (size - 1) + 1 - begin - extent
            for out, stride, dilation, size, begin, extent in zip(
                self.output_size,
                self.strides,
                self.dilations,
                self.kernel,
                self.pads_begin,
                self.input_size,
                strict=True,
            )
        )

    @property
    def end_pads_used(self) -> tuple[int, ...]:
        """End pads cut to what the last window reaches: with them, every position is a window's."""
        return tuple(max(over, 0) for over in self.overshoot)

    def transposed(self) -> dict[str, list[int]]:
        """Attributes of the ConvTranspose that sends dy back to the input's extent.

        `output_shape` would override the pads, so the extent is fixed by pads and output_padding:
        the forward pads where they can be, since cuDNN wants both ends alike.
        """
        padding = [
            max(min(max(end - over, 0), stride - 1), -over)
            for end, over, stride in zip(self.pads_end, self.overshoot, self.strides, strict=True)
        ]
        ends = [over + extra for over, extra in zip(self.overshoot, padding, strict=True)]
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": [*self.pads_begin, *ends],
            "output_padding": padding,
        }


def windows_of(g: GradientContext, kernel: tuple[int, ...]) -> Windows:
    """The windows of a convolution or pooling node with the given kernel extent."""
    rank = len(kernel)
    input_size, output_size = g.input_shape(0)[2:], g.output_shape()[2:]
    strides = tuple(g.attribute("strides") or (1,) * rank)
    dilations = tuple(g.attribute("dilations") or (1,) * rank)
    auto_pad = g.attribute("auto_pad", "NOTSET")
    if isinstance(auto_pad, bytes):
        auto_pad = auto_pad.decode()
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = [], []
        for extent, out, size, stride, dilation in zip(
            input_size, output_size, kernel, strides, dilations, strict=True
        ):
            total = max((out - 1) * stride + dilation * (size - 1) + 1 - extent, 0)
            small, large = total // 2, total - total // 2
            begin.append(small if auto_pad == "SAME_UPPER" else large)
            end.append(large if auto_pad == "SAME_UPPER" else small)
    elif auto_pad == "VALID":
        begin, end = [0] * rank, [0] * rank
    else:
        pads = list(g.attribute("pads") or (0,) * (2 * rank))
        begin, end = pads[:rank], pads[rank:]
    return Windows(input_size, output_size, kernel, strides, dilations, tuple(begin), tuple(end))
