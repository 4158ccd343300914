"""Inception v3: blocks of parallel branches."""

from scripts.networks.builder import CLASSES, Builder, Pair, as_pair

_EPSILON = 1e-3
_Layer = tuple[int, int | Pair]
"""Output channels and kernel of a convolution."""


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
    for part, channels, pool_channels in (("b", 192, 32), ("c", 256, 64), ("d", 288, 64)):
        x = _mixed_a(net, x, f"Mixed_5{part}", channels, pool_channels)
    x = _mixed_b(net, x, "Mixed_6a", 288)
    for part, width in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
        x = _mixed_c(net, x, f"Mixed_6{part}", 768, width)
    x = _mixed_d(net, x, "Mixed_7a", 768)
    x = _mixed_e(net, x, "Mixed_7b", 1280)
    x = _mixed_e(net, x, "Mixed_7c", 2048)
    x = net.add("GlobalAveragePool", [x], "avgpool")
    return net.linear(net.flatten(net.dropout(x, "dropout", 0.5)), "fc", (2048, CLASSES))


def _mixed_a(net: Builder, x: str, name: str, channels: int, pool_channels: int) -> str:
    b1 = _conv(net, x, f"{name}.branch1x1", (channels, 64))
    b5 = _chain(net, x, f"{name}.branch5x5", channels, (48, 1), (64, 5))
    b3 = _chain(net, x, f"{name}.branch3x3dbl", channels, (64, 1), (96, 3), (96, 3))
    return net.concat([b1, b5, b3, _pooled(net, x, name, channels, pool_channels)], name)


def _mixed_b(net: Builder, x: str, name: str, channels: int) -> str:
    b3 = _conv(net, x, f"{name}.branch3x3", (channels, 384), 3, stride=2, padded=False)
    dbl = _chain(net, x, f"{name}.branch3x3dbl", channels, (64, 1), (96, 3))
    dbl = _conv(net, dbl, f"{name}.branch3x3dbl_3", (96, 96), 3, stride=2, padded=False)
    return net.concat([b3, dbl, net.max_pool(x, f"{name}.max_pool", 3, 2)], name)


def _mixed_c(net: Builder, x: str, name: str, channels: int, width: int) -> str:
    wide, tall = (1, 7), (7, 1)
    b1 = _conv(net, x, f"{name}.branch1x1", (channels, 192))
    b7 = _chain(net, x, f"{name}.branch7x7", channels, (width, 1), (width, wide), (192, tall))
    double: list[_Layer] = [(width, 1), (width, tall), (width, wide), (width, tall), (192, wide)]
    dbl = _chain(net, x, f"{name}.branch7x7dbl", channels, *double)
    return net.concat([b1, b7, dbl, _pooled(net, x, name, channels, 192)], name)


def _mixed_d(net: Builder, x: str, name: str, channels: int) -> str:
    b3 = _conv(net, x, f"{name}.branch3x3_1", (channels, 192))
    b3 = _conv(net, b3, f"{name}.branch3x3_2", (192, 320), 3, stride=2, padded=False)
    b7 = _chain(net, x, f"{name}.branch7x7x3", channels, (192, 1), (192, (1, 7)), (192, (7, 1)))
    b7 = _conv(net, b7, f"{name}.branch7x7x3_4", (192, 192), 3, stride=2, padded=False)
    return net.concat([b3, b7, net.max_pool(x, f"{name}.max_pool", 3, 2)], name)


def _mixed_e(net: Builder, x: str, name: str, channels: int) -> str:
    b1 = _conv(net, x, f"{name}.branch1x1", (channels, 320))
    b3 = _conv(net, x, f"{name}.branch3x3_1", (channels, 384))
    b3 = _split_3x3(net, b3, f"{name}.branch3x3_2")
    dbl = _chain(net, x, f"{name}.branch3x3dbl", channels, (448, 1), (384, 3))
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
    """Convolutions in sequence, numbered from 1."""
    for number, (channels_out, kernel) in enumerate(layers, 1):
        x = _conv(net, x, f"{name}_{number}", (channels_in, channels_out), kernel)
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
