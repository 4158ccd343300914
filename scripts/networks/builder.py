"""Builder of the light graphs."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

CLASSES = 1000
"""ImageNet's."""
DEFAULT_EPSILON = 1e-5
"""BatchNormalization's, in ONNX and in torch."""

Pair = tuple[int, int]
Padding = int | Pair | Literal["same"]
"""Padding of both sides of each axis. "same", as in TensorFlow: ceil(size / stride) outputs, odd padding
last."""


class Builder:
    """Collects nodes; each output has the name of its module, such as `layer1.0.conv1`.

    Attributes with ONNX's default are omitted, since names and attributes determine the size of a light
    graph.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.parameters: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def parameter(self, name: str, shape: Sequence[int], value: float = 0.0) -> str:
        """A parameter filled with `value`; parameters of equal shape share a shape tensor."""
        shape_name = "x".join(map(str, shape))
        self.constant(shape_name, np.array(shape, dtype=np.int64))
        fill = {"value": numpy_helper.from_array(np.array([value], dtype=np.float32))} if value else {}
        self.parameters.append(helper.make_node("ConstantOfShape", [shape_name], [name], **fill))
        return name

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def conv(
        self,
        x: str,
        name: str,
        shape: Pair,
        kernel: int | Pair = 1,
        *,
        stride: int | Pair = 1,
        padding: Padding = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> str:
        """Conv with `shape` = (channels in, channels out)."""
        channels_in, channels_out = shape
        weight_shape = (channels_out, channels_in // groups, *as_pair(kernel))
        # 1 / fan-in: each layer averages, so that values of the light graph stay finite.
        inputs = [x, self.parameter(f"{name}.weight", weight_shape, 1 / math.prod(weight_shape[1:]))]
        if bias:
            inputs.append(self.parameter(f"{name}.bias", (channels_out,)))
        attributes: dict[str, Any] = _window(stride, padding)
        if dilation != 1:
            attributes["dilations"] = [dilation, dilation]
        if groups != 1:
            attributes["group"] = groups
        return self.add("Conv", inputs, name, **attributes)

    def batch_norm(self, x: str, name: str, channels: int, epsilon: float = DEFAULT_EPSILON) -> str:
        """BatchNormalization with ONNX's default momentum 0.9, which is 0.1 in PyTorch's definition."""
        inputs = [
            x,
            self.parameter(f"{name}.weight", (channels,), 1.0),
            self.parameter(f"{name}.bias", (channels,)),
            self.parameter(f"{name}.running_mean", (channels,)),
            self.parameter(f"{name}.running_var", (channels,), 1.0),
        ]
        attributes = {} if epsilon == DEFAULT_EPSILON else {"epsilon": epsilon}
        return self.add("BatchNormalization", inputs, name, **attributes)

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

    def max_pool(self, x: str, name: str, kernel: int, stride: int, padding: Padding = 0) -> str:
        return self.add("MaxPool", [x], name, kernel_shape=[kernel, kernel], **_window(stride, padding))

    def average_pool(
        self, x: str, name: str, kernel: int, stride: int, padding: Padding = 0, *, count_padding: bool = True
    ) -> str:
        """Average over each window; with `count_padding`, padded zeros count as elements."""
        attributes = _window(stride, padding)
        if padding != 0 and count_padding:
            attributes["count_include_pad"] = 1
        return self.add("AveragePool", [x], name, kernel_shape=[kernel, kernel], **attributes)

    def global_average(self, x: str) -> str:
        """[N, C, H, W] to [N, C]."""
        return self.flatten(self.add("GlobalAveragePool", [x], "avgpool"))

    def flatten(self, x: str) -> str:
        return self.add("Flatten", [x], "flatten")

    def concat(self, tensors: Sequence[str], name: str) -> str:
        return self.add("Concat", tensors, name, axis=1)

    def sum(self, left: str, right: str, name: str) -> str:
        return self.add("Add", [left, right], name)


def as_pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _window(stride: int | Pair, padding: Padding) -> dict[str, Any]:
    """The attributes of a sliding window that differ from ONNX's defaults."""
    attributes: dict[str, Any] = {}
    if as_pair(stride) != (1, 1):
        attributes["strides"] = list(as_pair(stride))
    if padding == "same":
        attributes["auto_pad"] = "SAME_UPPER"
    elif as_pair(padding) != (0, 0):
        attributes["pads"] = [*as_pair(padding), *as_pair(padding)]
    return attributes
