"""Writes digits.onnx, a small convolutional network, and digits-data.safetensors, 1,792 images of 8x8 pixels.

Needs onnx, safetensors and scikit-learn: python docs/examples/make_digits.py [FOLDER]
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

NETWORK = """
<ir_version: 9, opset_import: ["" : 18]>
digits (float[batch, 1, 8, 8] x) => (float[batch, 10] scores) {
  c1 = Conv <pads = [1, 1, 1, 1]> (x, conv1_weight)
  b1 = BatchNormalization (c1, bn1_weight, bn1_bias, bn1_mean, bn1_var)
  r1 = Relu (b1)
  p1 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
  c2 = Conv <pads = [1, 1, 1, 1]> (p1, conv2_weight)
  b2 = BatchNormalization (c2, bn2_weight, bn2_bias, bn2_mean, bn2_var)
  r2 = Relu (b2)
  p2 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r2)
  features = Flatten (p2)
  ratio = Constant <value_float = 0.1> ()
  dropped = Dropout (features, ratio)
  scores = Gemm <transB = 1> (dropped, fc_weight, fc_bias)
}"""


def main(folder: Path) -> None:
    draw = np.random.default_rng(0)
    weights = {"fc_bias": np.zeros(10)}
    for name, shape in {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "fc": (10, 128)}.items():
        weights[f"{name}_weight"] = draw.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
    for name, size in {"bn1": 16, "bn2": 32}.items():
        weights |= {
            f"{name}_{part}": np.full(size, part in ("weight", "var")) for part in ("weight", "bias", "mean", "var")
        }
    model = onnx.parser.parse_model(NETWORK)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    onnx.save(model, folder / "digits.onnx")
    digits = load_digits()
    # Shuffled, since the images are in the order of their writers.
    order = draw.permutation(1792)
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order].astype(np.int64)
    data = {"x": images[:1472], "labels": labels[:1472], "x_test": images[1472:], "labels_test": labels[1472:]}
    save_file(data, folder / "digits-data.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
