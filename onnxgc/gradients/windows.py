"""Geometry of the sliding windows of convolution and pooling."""

from dataclasses import dataclass

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.differentiate import GradientContext

# One uncovered element needs no padding; of two or more, ONNX Runtime crops some at both ends.
_MIN_TOTAL_PAD = -1


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding windows over the spatial axes, with defaults and auto_pad resolved.

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
        """Pads in the order of ONNX attributes: all begins, then all ends."""
        return [*self.pads_begin, *self.pads_end]

    @property
    def padded_size(self) -> tuple[int, ...]:
        sizes = zip(self.input_size, self.pads_begin, self.pads_end, strict=True)
        return tuple(size + begin + end for size, begin, end in sizes)

    @property
    def is_padded(self) -> bool:
        return any(self.pads)

    @property
    def may_overlap(self) -> bool:
        """Whether an element may be in several windows."""
        return any(
            out > 1 and stride < dilation * (size - 1) + 1
            for out, stride, dilation, size in zip(
                self.output_size, self.strides, self.dilations, self.kernel, strict=True
            )
        )

    @property
    def overshoot(self) -> tuple[int, ...]:
        """Elements by which the last window extends past the input's end, per axis.

        Negative: the number of elements at the end that no window covers.
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
        """The part of the end pads that the last window covers."""
        return tuple(max(over, 0) for over in self.overshoot)

    def transposed(self) -> dict[str, list[int]]:
        """Attributes of the ConvTranspose from dy to the input's extent.

        `output_shape` would override the pads, so pads and output_padding determine the extent. The forward
        pads are used where possible, since cuDNN requires equal pads at both ends.
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
    """The windows of a convolution or pooling node with the given kernel extent.

    Raises:
        UnsupportedOperatorError: an auto_pad on which runtimes disagree.
    """
    rank = len(kernel)
    input_size, output_size = g.input_shape(0)[2:], g.output_shape()[2:]
    strides, dilations, auto_pad = _settings(g, rank)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = [], []
        for extent, out, size, stride, dilation in zip(
            input_size, output_size, kernel, strides, dilations, strict=True
        ):
            total = (out - 1) * stride + dilation * (size - 1) + 1 - extent
            if total < _MIN_TOTAL_PAD:
                raise UnsupportedOperatorError(
                    f"{g.node.location} has auto_pad {auto_pad} and a stride that leaves {-total} elements "
                    "uncovered, which runtimes crop in different places; export the model with explicit pads"
                )
            total = max(total, 0)
            small, large = total // 2, total - total // 2
            begin.append(small if auto_pad == "SAME_UPPER" else large)
            end.append(large if auto_pad == "SAME_UPPER" else small)
    elif auto_pad == "VALID":
        begin, end = [0] * rank, [0] * rank
    else:
        pads = list(g.attribute("pads") or (0,) * (2 * rank))
        begin, end = pads[:rank], pads[rank:]
    return Windows(input_size, output_size, kernel, strides, dilations, tuple(begin), tuple(end))


def transposed_windows_of(g: GradientContext, kernel: tuple[int, ...]) -> Windows:
    """The windows of the convolution whose transpose a ConvTranspose node is.

    That convolution maps the extent of the node's output to that of its input. The end pad is the part of
    the last window past the extent; output padding is the part that no window covers.
    Source: ONNX ConvTranspose-11, including pads from `output_shape` and `auto_pad`.
    """
    rank = len(kernel)
    extents, counts = g.output_shape()[2:], g.input_shape(0)[2:]
    strides, dilations, auto_pad = _settings(g, rank)
    reach = [
        (count - 1) * stride + dilation * (size - 1) + 1
        for count, stride, dilation, size in zip(counts, strides, dilations, kernel, strict=True)
    ]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") or g.attribute("output_shape"):
        added = g.attribute("output_padding") or (0,) * rank
        totals = [max(full + extra - extent, 0) for full, extra, extent in zip(reach, added, extents, strict=True)]
        begin = [total // 2 if auto_pad == "SAME_UPPER" else total - total // 2 for total in totals]
    elif auto_pad == "VALID":
        begin = [0] * rank
    else:
        begin = list(g.attribute("pads") or (0,) * rank)[:rank]
    end = [max(full - pad - extent, 0) for full, pad, extent in zip(reach, begin, extents, strict=True)]
    return Windows(extents, counts, kernel, strides, dilations, tuple(begin), tuple(end))


def _settings(g: GradientContext, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Strides, dilations and auto_pad."""
    strides = tuple(g.attribute("strides") or (1,) * rank)
    dilations = tuple(g.attribute("dilations") or (1,) * rank)
    auto_pad = g.attribute("auto_pad", "NOTSET")
    return strides, dilations, auto_pad.decode() if isinstance(auto_pad, bytes) else str(auto_pad)
