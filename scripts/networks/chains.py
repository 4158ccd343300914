"""Chains of layers: AlexNet and VGG."""

from collections.abc import Sequence

from scripts.networks.builder import CLASSES, Builder


def vgg(net: Builder, x: str, depths: Sequence[int]) -> str:
    """VGG with `depths` convolutions in its five stages; configuration D is 2, 2, 3, 3, 3.

    Takes 224 to 255 pixels, since torchvision's adaptive pooling is omitted.

    Source: Simonyan and Zisserman, Very Deep Convolutional Networks, 2014, Table 1.
    """
    index, channels = 0, 3
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            x = net.conv(x, f"features.{index}", (channels, width), 3, padding=1, bias=True)
            x = net.relu(x, f"features.{index + 1}")
            index, channels = index + 2, width
        x = net.max_pool(x, f"features.{index}", 2, 2)
        index += 1
    x = net.flatten(x)
    for index, features_in in ((0, 512 * 7 * 7), (3, 4096)):
        x = net.relu(net.linear(x, f"classifier.{index}", (features_in, 4096)), f"classifier.{index + 1}")
        x = net.dropout(x, f"classifier.{index + 2}", 0.5)
    return net.linear(x, "classifier.6", (4096, CLASSES))


def alexnet(net: Builder, x: str) -> str:
    """The one-tower AlexNet. Takes 224 pixels, since torchvision's adaptive pooling is omitted.

    Source: Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014.
    """
    x = net.conv(x, "features.0", (3, 64), 11, stride=4, padding=2, bias=True)
    x = net.max_pool(net.relu(x, "features.1"), "features.2", 3, 2)
    x = net.conv(x, "features.3", (64, 192), 5, padding=2, bias=True)
    x = net.max_pool(net.relu(x, "features.4"), "features.5", 3, 2)
    for index, shape in ((6, (192, 384)), (8, (384, 256)), (10, (256, 256))):
        x = net.conv(x, f"features.{index}", shape, 3, padding=1, bias=True)
        x = net.relu(x, f"features.{index + 1}")
    x = net.flatten(net.max_pool(x, "features.12", 3, 2))
    for index, features_in in ((0, 256 * 6 * 6), (3, 4096)):
        x = net.dropout(x, f"classifier.{index}", 0.5)
        x = net.linear(x, f"classifier.{index + 1}", (features_in, 4096))
        x = net.relu(x, f"classifier.{index + 2}")
    return net.linear(x, "classifier.6", (4096, CLASSES))
