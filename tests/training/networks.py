"""Small networks to train, and a real data set."""

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser


def digits_network(batch: int | str = "N", dropout: float = 0.2, width: int = 16) -> onnx.ModelProto:
    """Two convolutions with BatchNormalization, Dropout, and a linear layer, over images of 8x8."""
    model = parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 17], producer_name: "somebody",
         metadata_props: ["kind": "digits"]>
        digits (float[{batch}, 1, 8, 8] image) => (float[{batch}, 10] scores) {{
            c1 = Conv <pads = [1, 1, 1, 1]> (image, conv1_weight)
            n1 = BatchNormalization (c1, bn1_weight, bn1_bias, bn1_mean, bn1_variance)
            r1 = Relu (n1)
            c2 = Conv <pads = [1, 1, 1, 1]> (r1, conv2_weight)
            n2 = BatchNormalization (c2, bn2_weight, bn2_bias, bn2_mean, bn2_variance)
            r2 = Relu (n2)
            p2 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r2)
            d2 = Dropout (p2, ratio)
            flat = Flatten (d2)
            scores = Gemm <transB = 1> (flat, head_weight, head_bias)
        }}""")
    # The parser takes no dots.
    for node in model.graph.node:
        node.input[:] = [name.replace("_", ".") for name in node.input]
    draw = np.random.default_rng(3)

    def add(name: str, value: Any) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))

    def kernel(name: str, *shape: int) -> None:
        fan_in = np.prod(shape[1:])
        add(name, draw.standard_normal(shape) * np.sqrt(2 / fan_in))

    kernel("conv1.weight", width, 1, 3, 3)
    kernel("conv2.weight", 2 * width, width, 3, 3)
    kernel("head.weight", 10, 32 * width)
    add("head.bias", np.zeros(10))
    add("ratio", dropout)
    for name, size in (("bn1", width), ("bn2", 2 * width)):
        add(f"{name}.weight", np.ones(size))
        add(f"{name}.bias", np.zeros(size))
        add(f"{name}.mean", np.zeros(size))
        add(f"{name}.variance", np.ones(size))
    return model


def digits() -> tuple[dict[str, Any], dict[str, Any]]:
    """scikit-learn's images of digits, four fifths to train with and one to test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16).astype(np.float32)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    split = len(images) // 5
    parts = order[split:], order[:split]
    train, test = ({"image": images[part], "labels": found.target[part]} for part in parts)
    return train, test
