"""Inception v3: blocks of parallel branches."""

from __future__ import annotations

from scripts.networks.builder import CLASSES, Builder, Pair, as_pair

_EPSILON = 1e-3
_Layer = tuple[str, int, int | Pair]
"""A convolution's name, number of output channels and kernel size."""


def inception_v3(net: Builder, x: str) -> str:
    """Inception v3 without the auxiliary classifier.

    Source: Szegedy et al., Rethinking the Inception Architecture, 2015, Table 1 and Figures
    5 to 7, 10; widths of the branches and BatchNormalization epsilon as in torchvision.
    """
    x = _conv(net, x, "Conv2d_1a_3x3", (3, 32), 3, stride=2, padded=False)
    x = _conv(net, x, "Conv2d_2a_3x3", (32, 32), 3, padded=False)
    x = _conv(net, x, "Conv2d_2b_3x3", (32, 64), 3)
    x = net.max_pool(x, "maxpool1", 3, 2)
    x = _conv(net, x, "Conv2d_3b_1x1", (64, 80))
    x = _conv(net, x, "Conv2d_4a_3x3", (80, 192), 3, padded=False)
    x = net.max_pool(x, "maxpool2", 3, 2)
    x = _mixed_a(net, x, "Mixed_5b", 192, 32)
    x = _mixed_a(net, x, "Mixed_5c", 256, 64)
    x = _mixed_a(net, x, "Mixed_5d", 288, 64)
    x = _mixed_b(net, x, "Mixed_6a", 288)
    x = _mixed_c(net, x, "Mixed_6b", 768, 128)
    x = _mixed_c(net, x, "Mixed_6c", 768, 160)
    x = _mixed_c(net, x, "Mixed_6d", 768, 160)
    x = _mixed_c(net, x, "Mixed_6e", 768, 192)
    x = _mixed_d(net, x, "Mixed_7a", 768)
    x = _mixed_e(net, x, "Mixed_7b", 1280)
    x = _mixed_e(net, x, "Mixed_7c", 2048)
    x = net.add("GlobalAveragePool", [x], "avgpool")
    return net.linear(net.flatten(net.dropout(x, "dropout", 0.5)), "fc", (2048, CLASSES))


def _mixed_a(net: Builder, x: str, name: str, channels: int, pool_channels: int) -> str:
    b1 = _conv(net, x, f"{name}.branch1x1", (channels, 64))
    b5 = _chain(net, x, name, channels, ("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5))
    dbl: tuple[_Layer, ...] = (
        ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3),
    )  # fmt: skip
    b3 = _chain(net, x, name, channels, *dbl)
    return net.concat([b1, b5, b3, _pooled(net, x, name, channels, pool_channels)], name)


def _mixed_b(net: Builder, x: str, name: str, channels: int) -> str:
    b3 = _conv(net, x, f"{name}.branch3x3", (channels, 384), 3, stride=2, padded=False)
    dbl = _chain(net, x, name, channels, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3))
    dbl = _conv(net, dbl, f"{name}.branch3x3dbl_3", (96, 96), 3, stride=2, padded=False)
    return net.concat([b3, dbl, net.max_pool(x, f"{name}.max_pool", 3, 2)], name)


def _mixed_c(net: Builder, x: str, name: str, channels: int, width: int) -> str:
    b1 = _conv(net, x, f"{name}.branch1x1", (channels, 192))
    single: tuple[_Layer, ...] = (
        ("branch7x7_1", width, 1), ("branch7x7_2", width, (1, 7)), ("branch7x7_3", 192, (7, 1)),
    )  # fmt: skip
    b7 = _chain(net, x, name, channels, *single)
    double: tuple[_Layer, ...] = (
        ("branch7x7dbl_1", width, 1), ("branch7x7dbl_2", width, (7, 1)), ("branch7x7dbl_3", width, (1, 7)),
        ("branch7x7dbl_4", width, (7, 1)), ("branch7x7dbl_5", 192, (1, 7)),
    )  # fmt: skip
    dbl = _chain(net, x, name, channels, *double)
    return net.concat([b1, b7, dbl, _pooled(net, x, name, channels, 192)], name)


def _mixed_d(net: Builder, x: str, name: str, channels: int) -> str:
    b3 = _conv(net, x, f"{name}.branch3x3_1", (channels, 192))
    b3 = _conv(net, b3, f"{name}.branch3x3_2", (192, 320), 3, stride=2, padded=False)
    layers: tuple[_Layer, ...] = (
        ("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, (1, 7)), ("branch7x7x3_3", 192, (7, 1)),
    )  # fmt: skip
    b7 = _chain(net, x, name, channels, *layers)
    b7 = _conv(net, b7, f"{name}.branch7x7x3_4", (192, 192), 3, stride=2, padded=False)
    return net.concat([b3, b7, net.max_pool(x, f"{name}.max_pool", 3, 2)], name)


def _mixed_e(net: Builder, x: str, name: str, channels: int) -> str:
    b1 = _conv(net, x, f"{name}.branch1x1", (channels, 320))
    b3 = _conv(net, x, f"{name}.branch3x3_1", (channels, 384))
    b3 = _split_3x3(net, b3, f"{name}.branch3x3_2")
    dbl = _chain(net, x, name, channels, ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3))
    dbl = _split_3x3(net, dbl, f"{name}.branch3x3dbl_3")
    return net.concat([b1, b3, dbl, _pooled(net, x, name, channels, 192)], name)


def _conv(
    net: Builder, x: str, name: str, shape: Pair, kernel: int | Pair = 1, *, stride: int = 1, padded: bool = True
) -> str:
    height, width = as_pair(kernel)
    padding = (height // 2, width // 2) if padded else 0
    y = net.conv(x, f"{name}.conv", shape, kernel, stride=stride, padding=padding)
    return net.relu(net.batch_norm(y, f"{name}.bn", shape[1], _EPSILON), f"{name}.relu")


def _chain(net: Builder, x: str, name: str, channels_in: int, *layers: _Layer) -> str:
    for part, channels_out, kernel in layers:
        x = _conv(net, x, f"{name}.{part}", (channels_in, channels_out), kernel)
        channels_in = channels_out
    return x


def _pooled(net: Builder, x: str, name: str, channels_in: int, channels_out: int) -> str:
    pool = net.average_pool(x, f"{name}.avg_pool", 3, 1, 1)
    return _conv(net, pool, f"{name}.branch_pool", (channels_in, channels_out))


def _split_3x3(net: Builder, x: str, name: str) -> str:
    """A 1x3 and a 3x1 convolution in parallel, in place of a 3x3."""
    wide = _conv(net, x, f"{name}a", (384, 384), (1, 3))
    tall = _conv(net, x, f"{name}b", (384, 384), (3, 1))
    return net.concat([wide, tall], f"{name}.concat")
