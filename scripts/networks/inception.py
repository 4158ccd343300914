"""Inception v3: blocks of parallel branches."""

from __future__ import annotations

from scripts.networks.builder import CLASSES, Builder, Pair, as_pair


def inception_v3(net: Builder, x: str) -> str:
    """Inception v3 without the auxiliary classifier.

    Source: Szegedy et al., Rethinking the Inception Architecture, 2015, Table 1 and Figures
    5 to 7, 10; widths of the branches and BatchNormalization epsilon as in torchvision.
    """

    def conv(
        x: str, name: str, shape: Pair, kernel: int | Pair = 1, *, stride: int = 1, padded: bool = True
    ) -> str:
        height, width = as_pair(kernel)
        padding = (height // 2, width // 2) if padded else 0
        y = net.conv(x, f"{name}.conv", shape, kernel, stride=stride, padding=padding)
        return net.relu(net.batch_norm(y, f"{name}.bn", shape[1], epsilon=1e-3), f"{name}.relu")

    def chain(x: str, prefix: str, channels_in: int, *layers: tuple[str, int, int | Pair]) -> str:
        for part, channels_out, kernel in layers:
            x = conv(x, prefix + part, (channels_in, channels_out), kernel)
            channels_in = channels_out
        return x

    def pooled(x: str, prefix: str, channels_in: int, channels_out: int) -> str:
        pool = net.average_pool(x, f"{prefix}avg_pool", 3, 1, 1)
        return conv(pool, f"{prefix}branch_pool", (channels_in, channels_out))

    def mixed_a(x: str, name: str, channels: int, pool_channels: int) -> str:
        p = f"{name}."
        b1 = conv(x, f"{p}branch1x1", (channels, 64))
        b5 = chain(x, p, channels, ("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5))
        b3 = chain(
            x, p, channels, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)
        )
        return net.concat([b1, b5, b3, pooled(x, p, channels, pool_channels)], name)

    def mixed_b(x: str, name: str, channels: int) -> str:
        p = f"{name}."
        b3 = conv(x, f"{p}branch3x3", (channels, 384), 3, stride=2, padded=False)
        dbl = chain(x, p, channels, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3))
        dbl = conv(dbl, f"{p}branch3x3dbl_3", (96, 96), 3, stride=2, padded=False)
        return net.concat([b3, dbl, net.max_pool(x, f"{p}max_pool", 3, 2)], name)

    def mixed_c(x: str, name: str, channels: int, width: int) -> str:
        p = f"{name}."
        b1 = conv(x, f"{p}branch1x1", (channels, 192))
        b7 = chain(
            x,
            p,
            channels,
            ("branch7x7_1", width, 1),
            ("branch7x7_2", width, (1, 7)),
            ("branch7x7_3", 192, (7, 1)),
        )
        dbl = chain(
            x,
            p,
            channels,
            ("branch7x7dbl_1", width, 1),
            ("branch7x7dbl_2", width, (7, 1)),
            ("branch7x7dbl_3", width, (1, 7)),
            ("branch7x7dbl_4", width, (7, 1)),
            ("branch7x7dbl_5", 192, (1, 7)),
        )
        return net.concat([b1, b7, dbl, pooled(x, p, channels, 192)], name)

    def mixed_d(x: str, name: str, channels: int) -> str:
        p = f"{name}."
        b3 = conv(x, f"{p}branch3x3_1", (channels, 192))
        b3 = conv(b3, f"{p}branch3x3_2", (192, 320), 3, stride=2, padded=False)
        b7 = chain(
            x,
            p,
            channels,
            ("branch7x7x3_1", 192, 1),
            ("branch7x7x3_2", 192, (1, 7)),
            ("branch7x7x3_3", 192, (7, 1)),
        )
        b7 = conv(b7, f"{p}branch7x7x3_4", (192, 192), 3, stride=2, padded=False)
        return net.concat([b3, b7, net.max_pool(x, f"{p}max_pool", 3, 2)], name)

    def split(x: str, name: str) -> str:
        """A 3x3 convolution as a 1x3 and a 3x1 side by side."""
        wide, tall = conv(x, f"{name}a", (384, 384), (1, 3)), conv(x, f"{name}b", (384, 384), (3, 1))
        return net.concat([wide, tall], f"{name}.concat")

    def mixed_e(x: str, name: str, channels: int) -> str:
        p = f"{name}."
        b1 = conv(x, f"{p}branch1x1", (channels, 320))
        b3 = split(conv(x, f"{p}branch3x3_1", (channels, 384)), f"{p}branch3x3_2")
        dbl = chain(x, p, channels, ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3))
        dbl = split(dbl, f"{p}branch3x3dbl_3")
        return net.concat([b1, b3, dbl, pooled(x, p, channels, 192)], name)

    x = conv(x, "Conv2d_1a_3x3", (3, 32), 3, stride=2, padded=False)
    x = conv(x, "Conv2d_2a_3x3", (32, 32), 3, padded=False)
    x = conv(x, "Conv2d_2b_3x3", (32, 64), 3)
    x = net.max_pool(x, "maxpool1", 3, 2)
    x = conv(x, "Conv2d_3b_1x1", (64, 80))
    x = conv(x, "Conv2d_4a_3x3", (80, 192), 3, padded=False)
    x = net.max_pool(x, "maxpool2", 3, 2)
    x = mixed_a(x, "Mixed_5b", 192, 32)
    x = mixed_a(x, "Mixed_5c", 256, 64)
    x = mixed_a(x, "Mixed_5d", 288, 64)
    x = mixed_b(x, "Mixed_6a", 288)
    x = mixed_c(x, "Mixed_6b", 768, 128)
    x = mixed_c(x, "Mixed_6c", 768, 160)
    x = mixed_c(x, "Mixed_6d", 768, 160)
    x = mixed_c(x, "Mixed_6e", 768, 192)
    x = mixed_d(x, "Mixed_7a", 768)
    x = mixed_e(x, "Mixed_7b", 1280)
    x = mixed_e(x, "Mixed_7c", 2048)
    x = net.add("GlobalAveragePool", [x], "avgpool")
    return net.linear(net.flatten(net.dropout(x, "dropout", 0.5)), "fc", (2048, CLASSES))
