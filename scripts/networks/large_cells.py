"""NASNet-A Large for ImageNet (331 pixels).

Parameters have timm's names. Windows with stride 2 have TensorFlow's padding SAME for any input size.
"""

from dataclasses import replace

import numpy as np

from scripts.networks.builder import CLASSES, Builder, Padding
from scripts.networks.cells import NASNET_A, Cell, Features, Operation, add_cell

EPSILON = 1e-3
"""BatchNormalization's, as in the published TensorFlow models."""


def nasnet_a_large(net: Builder, x: str) -> str:
    """NASNet-A (6 @ 4032): three stages of six normal cells, a reduction cell between stages.

    The first cell of a stage reads the reduction cell's result, and the reduction cell's input in half size.
    A normal cell's result contains its state 0.

    Source: Zoph et al., Learning Transferable Architectures for Scalable Image Recognition, 2018,
    Figures 2 and 4, Appendix A.
    """
    normal = replace(NASNET_A.normal, outputs=(0, 2, 3, 4, 5, 6))
    reduction = replace(NASNET_A.reduction, outputs=(3, 4, 5, 6))

    def halving_cell(cell: Cell, name: str, before: Features, last: Features, width: int, stride: int) -> Features:
        state_1 = _project(net, last, f"{name}.conv_1x1", width)
        return _cell(net, cell, name, (_halve(net, before, name, width), state_1), width, stride)

    def plain_cell(cell: Cell, name: str, before: Features, last: Features, width: int, stride: int) -> Features:
        state_0 = _project(net, before, f"{name}.conv_prev_1x1", width)
        state_1 = _project(net, last, f"{name}.conv_1x1", width)
        return _cell(net, cell, name, (state_0, state_1), width, stride)

    image = _stem(net, x, "conv0")
    state_1 = _project(net, image, "cell_stem_0.conv_1x1", 42)
    before = _cell(net, reduction, "cell_stem_0", (image, state_1), 42, 2)
    last = halving_cell(reduction, "cell_stem_1", image, before, 84, 2)
    for stage in range(3):
        width = 168 << stage
        if stage > 0:
            last = plain_cell(reduction, f"reduction_cell_{stage - 1}", before, last, width, 2)
        for index in range(6):
            make = halving_cell if index == 0 else plain_cell
            result = make(normal, f"cell_{6 * stage + index}", before, last, width, 1)
            before, last = last, result
    return _head(net, last)


def _stem(net: Builder, x: str, name: str) -> Features:
    x = net.conv(x, f"{name}.conv", (3, 96), 3, stride=2)
    return Features(net.batch_norm(x, f"{name}.bn", 96, EPSILON), 96)


def _head(net: Builder, x: Features) -> str:
    y = net.global_average(net.relu(x.name, "act"))
    return net.linear(y, "last_linear", (x.channels, CLASSES))


def _cell(net: Builder, cell: Cell, name: str, inputs: tuple[Features, Features], width: int, stride: int) -> Features:
    """`stride`: stride of operations on states 0 and 1."""

    def apply(operation: Operation, x: Features, state: int, place: int) -> str:
        part = f"{name}.comb_iter_{place // 2}_{('left', 'right')[place % 2]}"
        return _apply(net, operation, x, part, width, stride if state < 2 else 1)

    return add_cell(net, cell, name, inputs, apply, width)


def _apply(net: Builder, operation: Operation, x: Features, name: str, width: int, stride: int) -> str:
    padding: Padding = 1 if stride == 1 else "same"
    match operation:
        case "skip":
            return x.name if stride == 1 else _project(net, x, name, width, stride).name
        case "max 3x3":
            if x.channels == width:
                return net.max_pool(x.name, name, 3, stride, padding)
            y = net.max_pool(x.name, f"{name}.max_pool", 3, stride, padding)
            y = net.conv(y, f"{name}.conv", (x.channels, width))
            return net.batch_norm(y, f"{name}.bn", width, EPSILON)
        case "avg 3x3":
            # timm counts padding only with stride 2.
            return net.average_pool(x.name, name, 3, stride, padding, count_padding=stride == 2)
        case "sep 3x3" | "sep 5x5" | "sep 7x7":
            return _separable(net, x, name, int(operation[-1]), width, stride)
        case _:
            raise AssertionError(f"NASNet-A has no operation {operation}")


def _project(net: Builder, x: Features, name: str, width: int, stride: int = 1) -> Features:
    """Projects to `width` channels."""
    y = net.conv(net.relu(x.name, f"{name}.act"), f"{name}.conv", (x.channels, width), stride=stride)
    return Features(net.batch_norm(y, f"{name}.bn", width, EPSILON), width)


def _halve(net: Builder, x: Features, name: str, width: int) -> Features:
    """Projects to `width` channels in half the size; half of them see the image shifted by one pixel."""
    y = net.relu(x.name, f"{name}.act")
    pads = net.constant("shift_pads", np.array([0, 0, -1, -1, 0, 0, 1, 1], dtype=np.int64))
    halves = []
    for path in (f"{name}.path_1", f"{name}.path_2"):
        source = y if path.endswith("1") else net.add("Pad", [y, pads], f"{path}.pad")
        pooled = net.average_pool(source, f"{path}.avgpool", 1, 2)
        halves.append(net.conv(pooled, f"{path}.conv", (x.channels, width // 2)))
    y = net.concat(halves, f"{name}.final_path")
    return Features(net.batch_norm(y, f"{name}.final_path_bn", width, EPSILON), width)


def _separable(net: Builder, x: Features, name: str, kernel: int, width: int, stride: int) -> str:
    """A depthwise and a pointwise convolution, twice."""
    y, channels = x.name, x.channels
    for part, part_stride in ((1, stride), (2, 1)):
        padding: Padding = kernel // 2 if part_stride == 1 else "same"
        separable = f"{name}.separable_{part}"
        y = net.relu(y, f"{name}.act_{part}")
        y = net.conv(
            y,
            f"{separable}.depthwise_conv2d",
            (channels, channels),
            kernel,
            stride=part_stride,
            padding=padding,
            groups=channels,
        )
        y = net.conv(y, f"{separable}.pointwise_conv2d", (channels, width))
        y = net.batch_norm(y, f"{name}.bn_sep_{part}", width, EPSILON)
        channels = width
    return y
