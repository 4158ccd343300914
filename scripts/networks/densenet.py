"""DenseNet."""

from collections.abc import Sequence

from scripts.networks.builder import CLASSES, Builder


def densenet(net: Builder, x: str, depths: Sequence[int], *, growth: int = 32, nested: bool = False) -> str:
    """Densely connected blocks: each layer reads the concatenation of all earlier outputs of its block.

    With `nested`, a concatenation reads the preceding concatenation and the newest output in place of all
    outputs. The values are equal, but later layers then read a single tensor, which can be a checkpoint
    within the block. Feng and Huang's graphs have this form.

    Source: Huang et al., Densely Connected Convolutional Networks, 2016, Table 1; Feng and Huang,
    Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs, 2021, Table 1.
    """
    bottleneck_width = 4 * growth
    channels = 2 * growth

    def norm_relu(x: str, prefix: str, part: str, channels: int) -> str:
        return net.relu(net.batch_norm(x, f"{prefix}norm{part}", channels), f"{prefix}relu{part}")

    x = net.conv(x, "features.conv0", (3, channels), 7, stride=2, padding=3)
    x = net.max_pool(norm_relu(x, "features.", "0", channels), "features.pool0", 3, 2, 1)
    for block, depth in enumerate(depths, start=1):
        tensors = [x]
        for layer in range(1, depth + 1):
            prefix = f"features.denseblock{block}.denselayer{layer}."
            if len(tensors) > 1:
                x = net.concat(tensors, f"{prefix}concat")
            if nested:
                tensors = [x]
            y = norm_relu(x, prefix, "1", channels)
            y = net.conv(y, f"{prefix}conv1", (channels, bottleneck_width))
            y = norm_relu(y, prefix, "2", bottleneck_width)
            tensors.append(net.conv(y, f"{prefix}conv2", (bottleneck_width, growth), 3, padding=1))
            channels += growth
        x = net.concat(tensors, f"features.denseblock{block}.concat")
        if block < len(depths):
            prefix = f"features.transition{block}."
            x = net.conv(norm_relu(x, prefix, "", channels), f"{prefix}conv", (channels, channels // 2))
            x = net.average_pool(x, f"{prefix}pool", 2, 2)
            channels //= 2
    x = net.relu(net.batch_norm(x, "features.norm5", channels), "relu")
    return net.linear(net.global_average(x), "classifier", (channels, CLASSES))
