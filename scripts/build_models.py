"""Build the light ONNX graphs in `models/`.

A light graph holds a network's structure without its weights: every parameter is a
ConstantOfShape node whose output carries the parameter's name, as in the light models of the
`onnx` package. Parameters have the names of the published torchvision models, so trained
weights can be put in by name. The batch is symbolic, and so files stay small and byte-for-byte
reproducible.

    python scripts/build_models.py           write models/*.onnx
    python scripts/build_models.py --check   exit with 1 if a file differs from what is built here
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODELS_DIRECTORY = Path(__file__).resolve().parent.parent / "models"
OPSET = 17
IR_VERSION = 9
CLASSES = 1000
BATCH_NORM_MOMENTUM = 0.9
"""ONNX's momentum is the share of the old value: torch's 0.1."""

Pair = tuple[int, int]


class Builder:
    """Collects nodes. A tensor is named after the module that made it: `layer1.0.conv1`."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.parameters: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def parameter(self, name: str, shape: Sequence[int], value: float = 0.0) -> str:
        """A parameter filled with one value; equal shapes share one shape tensor."""
        shape_name = "shape_" + "x".join(map(str, shape))
        self.constant(shape_name, np.array(shape, dtype=np.int64))
        fill = helper.make_tensor("", TensorProto.FLOAT, [1], [value])
        self.parameters.append(helper.make_node("ConstantOfShape", [shape_name], [name], value=fill))
        return name

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        node_name = "/" + name.replace(".", "/")
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=node_name, **attributes))
        return name

    def conv(
        self,
        x: str,
        name: str,
        shape: Pair,
        kernel: int | Pair = 1,
        *,
        stride: int = 1,
        padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> str:
        """Conv with `shape` = (channels in, channels out)."""
        channels_in, channels_out = shape
        height, width = _pair(kernel)
        weight_shape = (channels_out, channels_in // groups, height, width)
        # 1 / fan-in: a layer of equal weights averages, so the light graph's values stay finite.
        inputs = [x, self.parameter(f"{name}.weight", weight_shape, 1 / math.prod(weight_shape[1:]))]
        if bias:
            inputs.append(self.parameter(f"{name}.bias", (channels_out,)))
        return self.add(
            "Conv",
            inputs,
            name,
            kernel_shape=[height, width],
            strides=[stride, stride],
            pads=[*_pair(padding), *_pair(padding)],
            group=groups,
        )

    def batch_norm(self, x: str, name: str, channels: int, epsilon: float = 1e-5) -> str:
        inputs = [
            x,
            self.parameter(f"{name}.weight", (channels,), 1.0),
            self.parameter(f"{name}.bias", (channels,)),
            self.parameter(f"{name}.running_mean", (channels,)),
            self.parameter(f"{name}.running_var", (channels,), 1.0),
        ]
        return self.add("BatchNormalization", inputs, name, epsilon=epsilon, momentum=BATCH_NORM_MOMENTUM)

    def linear(self, x: str, name: str, shape: Pair) -> str:
        features_in, features_out = shape
        weight = self.parameter(f"{name}.weight", (features_out, features_in), 1 / features_in)
        return self.add("Gemm", [x, weight, self.parameter(f"{name}.bias", (features_out,))], name, transB=1)

    def relu(self, x: str, name: str) -> str:
        return self.add("Relu", [x], name)

    def relu6(self, x: str, name: str) -> str:
        low = self.constant("relu6_min", np.array(0, dtype=np.float32))
        high = self.constant("relu6_max", np.array(6, dtype=np.float32))
        return self.add("Clip", [x, low, high], name)

    def dropout(self, x: str, name: str, ratio: float) -> str:
        ratio_name = self.constant(f"dropout_ratio_{ratio}", np.array(ratio, dtype=np.float32))
        return self.add("Dropout", [x, ratio_name], name)

    def max_pool(self, x: str, name: str, kernel: int, stride: int, padding: int = 0) -> str:
        return self.add(
            "MaxPool",
            [x],
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[padding] * 4,
        )

    def average_pool(self, x: str, name: str, kernel: int, stride: int, padding: int = 0) -> str:
        return self.add(
            "AveragePool",
            [x],
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[padding] * 4,
            count_include_pad=1,
        )

    def global_average(self, x: str) -> str:
        """[N, C, H, W] to [N, C]."""
        return self.flatten(self.add("GlobalAveragePool", [x], "avgpool"))

    def flatten(self, x: str) -> str:
        return self.add("Flatten", [x], "flatten", axis=1)

    def concat(self, tensors: Sequence[str], name: str) -> str:
        return self.add("Concat", tensors, name, axis=1)


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def resnet(net: Builder, x: str, depths: Sequence[int], *, bottleneck: bool) -> str:
    """Residual network; a bottleneck strides in its 3x3 convolution, as torchvision does.

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
        y = net.add("Add", [y, shortcut(x, prefix, (channels_in, width * expansion), stride)], f"{prefix}add")
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
    return net.linear(net.global_average(x), "fc", (channels, CLASSES))


def resnet18(net: Builder, x: str) -> str:
    return resnet(net, x, (2, 2, 2, 2), bottleneck=False)


def resnet50(net: Builder, x: str) -> str:
    return resnet(net, x, (3, 4, 6, 3), bottleneck=True)


def resnet152(net: Builder, x: str) -> str:
    return resnet(net, x, (3, 8, 36, 3), bottleneck=True)


def densenet121(net: Builder, x: str) -> str:
    """Each layer reads the concatenation of all earlier outputs of its block.

    Source: Huang et al., Densely Connected Convolutional Networks, 2016, Table 1.
    """
    growth, bottleneck_width = 32, 128

    def norm_relu(x: str, prefix: str, part: str, channels: int) -> str:
        return net.relu(net.batch_norm(x, f"{prefix}norm{part}", channels), f"{prefix}relu{part}")

    x = net.conv(x, "features.conv0", (3, 64), 7, stride=2, padding=3)
    x = net.max_pool(norm_relu(x, "features.", "0", 64), "features.pool0", 3, 2, 1)
    channels = 64
    for block, depth in enumerate((6, 12, 24, 16), start=1):
        tensors = [x]
        for layer in range(1, depth + 1):
            prefix = f"features.denseblock{block}.denselayer{layer}."
            y = net.concat(tensors, f"{prefix}concat") if len(tensors) > 1 else x
            y = norm_relu(y, prefix, "1", channels)
            y = net.conv(y, f"{prefix}conv1", (channels, bottleneck_width))
            y = norm_relu(y, prefix, "2", bottleneck_width)
            tensors.append(net.conv(y, f"{prefix}conv2", (bottleneck_width, growth), 3, padding=1))
            channels += growth
        x = net.concat(tensors, f"features.denseblock{block}.concat")
        if block < 4:
            prefix = f"features.transition{block}."
            x = net.conv(norm_relu(x, prefix, "", channels), f"{prefix}conv", (channels, channels // 2))
            x = net.average_pool(x, f"{prefix}pool", 2, 2)
            channels //= 2
    x = net.relu(net.batch_norm(x, "features.norm5", channels), "relu")
    return net.linear(net.global_average(x), "classifier", (channels, CLASSES))


def inception_v3(net: Builder, x: str) -> str:
    """Inception v3 without the auxiliary classifier.

    Source: Szegedy et al., Rethinking the Inception Architecture, 2015, Table 1 and Figures
    5 to 7, 10; widths of the branches and BatchNormalization epsilon as in torchvision.
    """

    def conv(
        x: str, name: str, shape: Pair, kernel: int | Pair = 1, *, stride: int = 1, padded: bool = True
    ) -> str:
        height, width = _pair(kernel)
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


def vgg16(net: Builder, x: str) -> str:
    """Configuration D. Takes 224 to 255 pixels: torchvision's adaptive pooling is left out.

    Source: Simonyan and Zisserman, Very Deep Convolutional Networks, 2014, Table 1.
    """
    index, channels = 0, 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
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
    """The one-tower AlexNet. Takes 224 pixels: torchvision's adaptive pooling is left out.

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


def mobilenet_v2(net: Builder, x: str) -> str:
    """Inverted residuals of width 1.

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
        return net.add("Add", [x, y], f"{prefix}.add") if stride == 1 and shape[0] == shape[1] else y

    x = conv(x, "features.0", (3, 32), 3, stride=2)
    channels, index = 32, 1
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, width, depth, first_stride in stages:
        for i in range(depth):
            stride = first_stride if i == 0 else 1
            x = inverted_residual(x, f"features.{index}", (channels, width), expansion, stride)
            channels, index = width, index + 1
    x = conv(x, f"features.{index}", (channels, 1280))
    x = net.dropout(net.global_average(x), "classifier.0", 0.2)
    return net.linear(x, "classifier.1", (1280, CLASSES))


NETWORKS: dict[str, tuple[Callable[[Builder, str], str], int]] = {
    "alexnet": (alexnet, 224),
    "densenet121": (densenet121, 224),
    "inception_v3": (inception_v3, 299),
    "mobilenet_v2": (mobilenet_v2, 224),
    "resnet18": (resnet18, 224),
    "resnet50": (resnet50, 224),
    "resnet152": (resnet152, 224),
    "vgg16": (vgg16, 224),
}
"""Each network with the pixels of its published input."""


def build(name: str) -> onnx.ModelProto:
    """The light graph of a network: `x` [N, 3, H, W] to `logits` [N, 1000]."""
    define, pixels = NETWORKS[name]
    net = Builder()
    result = define(net, "x")
    net.nodes[-1].output[0] = "logits"
    assert result not in {i for node in net.nodes for i in node.input}, "the last node gives the output"
    graph = helper.make_graph(
        net.parameters + net.nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, pixels, pixels])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        initializer=list(net.initializers.values()),
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, producer_name="onnxgc", ir_version=IR_VERSION, opset_imports=[opset])


def serialize(model: onnx.ModelProto) -> bytes:
    """The same bytes on every run and platform."""
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the light ONNX graphs in models/.")
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 if a file differs")
    check = parser.parse_args(arguments).check
    stale = []
    for name in NETWORKS:
        path = MODELS_DIRECTORY / f"{name}.onnx"
        content = serialize(build(name))
        if path.is_file() and path.read_bytes() == content:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if not stale:
        print("models/ is up to date")
        return 0
    print(f"{'differs' if check else 'wrote'}: {', '.join(stale)}")
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
