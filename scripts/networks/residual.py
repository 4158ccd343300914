"""Networks of residual blocks: ResNet and MobileNet V2."""

from collections.abc import Sequence

from scripts.networks.builder import CLASSES, Builder, Pair


def resnet(net: Builder, x: str, depths: Sequence[int], *, bottleneck: bool, classes: int = CLASSES) -> str:
    """ResNet; the stride of a bottleneck is in its 3x3 convolution, as in torchvision.

    Source: He et al., Deep Residual Learning for Image Recognition, 2015, Table 1.
    """
    expansion = 4 if bottleneck else 1

    def conv_bn(x: str, prefix: str, part: str, shape: Pair, kernel: int, stride: int = 1) -> str:
        conv = net.conv(x, f"{prefix}conv{part}", shape, kernel, stride=stride, padding=kernel // 2)
        return net.batch_norm(conv, f"{prefix}bn{part}", shape[1])

    def shortcut(x: str, prefix: str, shape: Pair, stride: int) -> str:
        if stride == 1 and shape[0] == shape[1]:
            return x
        conv = net.conv(x, f"{prefix}downsample.0", shape, stride=stride)
        return net.batch_norm(conv, f"{prefix}downsample.1", shape[1])

    def block(x: str, prefix: str, channels_in: int, width: int, stride: int) -> str:
        if bottleneck:
            layers = [(channels_in, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        else:
            layers = [(channels_in, width, 3, stride), (width, width, 3, 1)]
        y = x
        for i, (inner_in, inner_out, kernel, inner_stride) in enumerate(layers, start=1):
            y = conv_bn(y, prefix, str(i), (inner_in, inner_out), kernel, inner_stride)
            if i < len(layers):
                y = net.relu(y, f"{prefix}relu{i}")
        y = net.sum(y, shortcut(x, prefix, (channels_in, width * expansion), stride), f"{prefix}add")
        return net.relu(y, f"{prefix}relu{len(layers)}")

    x = net.relu(conv_bn(x, "", "1", (3, 64), 7, 2), "relu")
    x = net.max_pool(x, "maxpool", 3, 2, 1)
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            x = block(x, f"layer{stage + 1}.{i}.", channels, width, stride)
            channels = width * expansion
    return net.linear(net.global_average(x), "fc", (channels, classes))


def mobilenet_v2(net: Builder, x: str, *, classes: int = CLASSES) -> str:
    """MobileNet V2 with width multiplier 1.

    Source: Sandler et al., MobileNetV2, 2018, Table 2.
    """

    def conv(x: str, prefix: str, shape: Pair, kernel: int = 1, *, stride: int = 1, groups: int = 1) -> str:
        x = net.conv(x, f"{prefix}.0", shape, kernel, stride=stride, padding=kernel // 2, groups=groups)
        return net.relu6(net.batch_norm(x, f"{prefix}.1", shape[1]), f"{prefix}.2")

    def inverted_residual(x: str, prefix: str, shape: Pair, expansion: int, stride: int) -> str:
        hidden, part, y = shape[0] * expansion, 0, x
        if expansion != 1:
            y = conv(y, f"{prefix}.conv.0", (shape[0], hidden))
            part = 1
        y = conv(y, f"{prefix}.conv.{part}", (hidden, hidden), 3, stride=stride, groups=hidden)
        y = net.conv(y, f"{prefix}.conv.{part + 1}", (hidden, shape[1]))
        y = net.batch_norm(y, f"{prefix}.conv.{part + 2}", shape[1])
        return net.sum(x, y, f"{prefix}.add") if stride == 1 and shape[0] == shape[1] else y

    x = conv(x, "features.0", (3, 32), 3, stride=2)
    channels, index = 32, 1
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, width, depth, first_stride in stages:
        for i in range(depth):
            stride = first_stride if i == 0 else 1
            x = inverted_residual(x, f"features.{index}", (channels, width), expansion, stride)
            channels, index = width, index + 1
    x = conv(x, f"features.{index}", (channels, 1280))
    x = net.dropout(net.global_average(x), "classifier.0", 0.2)
    return net.linear(x, "classifier.1", (1280, classes))
