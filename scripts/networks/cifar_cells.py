"""Networks of searched cells for images of 32 pixels."""

import numpy as np

from scripts.networks.builder import Builder
from scripts.networks.cells import Cells, Features, Operation, add_cell

CIFAR_CLASSES = 10
END = np.iinfo(np.int64).max
"""End of a Slice that covers the rest of an axis."""


def cifar_network(net: Builder, x: str, cells: Cells, *, depth: int = 20, width: int = 36) -> str:
    """The CIFAR-10 network of the DARTS paper, without its auxiliary classifier and drop path.

    Parameters have the names of that paper's published code. A skip connection adds no node.

    Source: Liu et al., DARTS: Differentiable Architecture Search, 2019, Section 3.2 and Appendix A.
    """

    def cell(
        name: str, before: Features, last: Features, width: int, *, reduces: bool, halves_before: bool
    ) -> Features:
        def apply(operation: Operation, x: Features, state: int, place: int) -> str:
            return _apply(net, operation, x, f"{name}._ops.{place}", 2 if reduces and state < 2 else 1)

        adapt_before = _halve if halves_before else _project
        inputs = (
            adapt_before(net, before, f"{name}.preprocess0", width),
            _project(net, last, f"{name}.preprocess1", width),
        )
        return add_cell(net, cells.reduction if reduces else cells.normal, name, inputs, apply, width)

    x = net.conv(x, "stem.0", (3, 3 * width), 3, padding=1)
    before = last = Features(net.batch_norm(x, "stem.1", 3 * width), 3 * width)
    reductions = (depth // 3, 2 * depth // 3)
    for index in range(depth):
        reduces, halves_before = index in reductions, index - 1 in reductions
        width *= 2 if reduces else 1
        result = cell(f"cells.{index}", before, last, width, reduces=reduces, halves_before=halves_before)
        before, last = last, result
    return net.linear(net.global_average(last.name), "classifier", (last.channels, CIFAR_CLASSES))


def _project(net: Builder, x: Features, name: str, width: int) -> Features:
    """Projects to `width` channels."""
    y = net.conv(net.relu(x.name, f"{name}.op.0"), f"{name}.op.1", (x.channels, width))
    return Features(net.batch_norm(y, f"{name}.op.2", width), width)


def _halve(net: Builder, x: Features, name: str, width: int) -> Features:
    """Projects to `width` channels in half the size; half of them see the image shifted by one pixel."""
    y = net.relu(x.name, f"{name}.relu")
    shift = [
        net.constant(f"shift_{part}", np.array(value, dtype=np.int64))
        for part, value in (("starts", [1, 1]), ("ends", [END, END]), ("axes", [2, 3]))
    ]
    shifted = net.add("Slice", [y, *shift], f"{name}.shift")
    shape = (x.channels, width // 2)
    halves = [net.conv(y, f"{name}.conv_1", shape, stride=2), net.conv(shifted, f"{name}.conv_2", shape, stride=2)]
    y = net.concat(halves, f"{name}.concat")
    return Features(net.batch_norm(y, f"{name}.bn", width), width)


def _apply(net: Builder, operation: Operation, x: Features, name: str, stride: int) -> str:
    match operation:
        case "skip":
            assert stride == 1, "no cell has a skip connection with stride 2"
            return x.name
        case "max 3x3":
            return net.max_pool(x.name, name, 3, stride, 1)
        case "avg 3x3":
            return net.average_pool(x.name, name, 3, stride, 1, count_padding=False)
        case "1x7 then 7x1":
            return _factorized_7x7(net, x, name, stride)
        case "dil 3x3":
            return _dilated_3x3(net, x, name, stride)
        case "sep 3x3" | "sep 5x5" | "sep 7x7":
            return _separable(net, x, name, int(operation[-1]), stride)


def _separable(net: Builder, x: Features, name: str, kernel: int, stride: int) -> str:
    """A depthwise and a pointwise convolution, twice."""
    y, shape = x.name, (x.channels, x.channels)
    for first, first_stride in ((0, stride), (4, 1)):
        part = [f"{name}.op.{first + i}" for i in range(4)]
        y = net.relu(y, part[0])
        y = net.conv(y, part[1], shape, kernel, stride=first_stride, padding=kernel // 2, groups=x.channels)
        y = net.batch_norm(net.conv(y, part[2], shape), part[3], x.channels)
    return y


def _dilated_3x3(net: Builder, x: Features, name: str, stride: int) -> str:
    """A depthwise convolution with dilation 2 and a pointwise convolution."""
    y, shape = net.relu(x.name, f"{name}.op.0"), (x.channels, x.channels)
    y = net.conv(y, f"{name}.op.1", shape, 3, stride=stride, padding=2, dilation=2, groups=x.channels)
    return net.batch_norm(net.conv(y, f"{name}.op.2", shape), f"{name}.op.3", x.channels)


def _factorized_7x7(net: Builder, x: Features, name: str, stride: int) -> str:
    y, shape = net.relu(x.name, f"{name}.0"), (x.channels, x.channels)
    y = net.conv(y, f"{name}.1", shape, (1, 7), stride=(1, stride), padding=(0, 3))
    y = net.conv(y, f"{name}.2", shape, (7, 1), stride=(stride, 1), padding=(3, 0))
    return net.batch_norm(y, f"{name}.3", x.channels)
