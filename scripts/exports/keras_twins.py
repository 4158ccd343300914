"""Twin networks by the exporters of Keras and tf2onnx.

    python scripts/exports/keras_twins.py FOLDER

Runs in the environment of `keras_models.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from scripts.exports.keras_models import EXPORTERS
from scripts.exports.twins import BATCH, BOTTLENECKS, CLASSES, ENCODER, EPSILON, INVERTED, PIXELS, value_of


class _Convolutions:
    """Convolutions with a normalisation, and with PyTorch's padding."""

    def __init__(self, layers: Any) -> None:
        self._layers = layers

    def __call__(
        self, x: Any, names: tuple[str, str], channels: int, kernel: int, stride: int = 1, is_depthwise: bool = False
    ) -> Any:
        layers = self._layers
        if kernel > 1:
            x = layers.ZeroPadding2D(kernel // 2)(x)
        if is_depthwise:
            x = layers.DepthwiseConv2D(kernel, stride, use_bias=False, name=names[0])(x)
        else:
            x = layers.Conv2D(channels, kernel, stride, use_bias=False, name=names[0])(x)
        return layers.BatchNormalization(epsilon=EPSILON, name=names[1])(x)


def _resnet50(keras: Any) -> Any:
    layers = keras.layers
    convolution = _Convolutions(layers)
    image = keras.Input((PIXELS, PIXELS, 3))
    x = layers.ReLU()(convolution(image, ("conv1", "bn1"), 64, 7, 2))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for stage, (blocks, channels) in enumerate(BOTTLENECKS, 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            stride = 2 if block == 0 and stage > 1 else 1
            y = layers.ReLU()(convolution(x, (f"{name}.conv1", f"{name}.bn1"), channels, 1))
            y = layers.ReLU()(convolution(y, (f"{name}.conv2", f"{name}.bn2"), channels, 3, stride))
            y = convolution(y, (f"{name}.conv3", f"{name}.bn3"), 4 * channels, 1)
            if block == 0:
                x = convolution(x, (f"{name}.downsample.0", f"{name}.downsample.1"), 4 * channels, 1, stride)
            x = layers.ReLU()(layers.Add()([y, x]))
    return keras.Model(image, layers.Dense(CLASSES, name="fc")(layers.GlobalAveragePooling2D()(x)))


def _mobilenet_v2(keras: Any) -> Any:
    layers = keras.layers
    convolution = _Convolutions(layers)
    image = keras.Input((PIXELS, PIXELS, 3))
    x = layers.ReLU(6.0)(convolution(image, ("features.0.0", "features.0.1"), 32, 3, 2))
    index, before = 0, 32
    for expansion, channels, blocks, first in INVERTED:
        for block in range(blocks):
            index += 1
            name, stride, y, layer = f"features.{index}.conv", first if block == 0 else 1, x, 0
            if expansion > 1:
                y = convolution(y, (f"{name}.0.0", f"{name}.0.1"), before * expansion, 1)
                y, layer = layers.ReLU(6.0)(y), 1
            y = convolution(y, (f"{name}.{layer}.0", f"{name}.{layer}.1"), 0, 3, stride, is_depthwise=True)
            y = layers.ReLU(6.0)(y)
            y = convolution(y, (f"{name}.{layer + 1}", f"{name}.{layer + 2}"), channels, 1)
            x = layers.Add()([x, y]) if stride == 1 and channels == before else y
            before = channels
    x = layers.ReLU(6.0)(convolution(x, ("features.18.0", "features.18.1"), 1280, 1))
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(CLASSES, name="classifier.1")(x))


def _positions(keras: Any) -> Any:
    class Positions(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=(ENCODER.length, ENCODER.width), name="embeddings")

        def call(self, x: Any) -> Any:
            return x + self.table

    return Positions


def _encoder(keras: Any) -> Any:
    layers = keras.layers
    tokens = keras.Input((ENCODER.length,), dtype="int32")
    word = layers.Embedding(ENCODER.words, ENCODER.width, name="word")(tokens)
    x = layers.LayerNormalization(epsilon=EPSILON, name="norm")(_positions(keras)(name="position")(word))
    for block in range(ENCODER.blocks):
        name = f"block.{block}"
        attention = layers.MultiHeadAttention(ENCODER.heads, ENCODER.width // ENCODER.heads, name=f"{name}.attention")
        x = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}.first")(x + attention(x, x))
        y = layers.Dense(ENCODER.inner, name=f"{name}.inner")(x)
        # tf2onnx does not support Erfc, which the gelu of Keras uses.
        y = 0.5 * y * (1.0 + keras.ops.erf(y * float(np.sqrt(0.5))))
        y = layers.Dense(ENCODER.width, name=f"{name}.outer")(y)
        x = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}.second")(x + y)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(CLASSES, name="head")(x))


NETWORKS: Mapping[str, Callable[[Any], Any]] = {
    "resnet50": _resnet50,
    "mobilenet_v2": _mobilenet_v2,
    "encoder": _encoder,
}
_TORCH_NAMES = {
    "kernel": "weight",
    "gamma": "weight",
    "embeddings": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_PROJECTIONS = {"query": "query", "key": "key", "value": "value", "attention_output": "out"}


def _assign_weights(layer: Any) -> None:
    for weight in layer.weights:
        shape = tuple(weight.shape)
        name, last = layer.name, _TORCH_NAMES[weight.name]
        if type(layer).__name__ == "MultiHeadAttention":
            part = weight.path.split("/")[-2]
            name = f"{name.rpartition('.')[0]}.{_PROJECTIONS[part]}"
            if last == "bias":
                value = value_of(f"{name}.bias", (int(np.prod(shape)),))
            else:
                value = value_of(f"{name}.weight", (ENCODER.width, ENCODER.width)).T
            weight.assign(value.reshape(shape))
        elif len(shape) == 4:
            order = (2, 3, 0, 1) if "Depthwise" in type(layer).__name__ else (2, 3, 1, 0)
            inverse = tuple(int(axis) for axis in np.argsort(order))
            weight.assign(value_of(f"{name}.{last}", tuple(shape[axis] for axis in inverse)).transpose(order))
        elif name == "position":
            weight.assign(value_of(name, shape))
        elif len(shape) == 2 and weight.name == "kernel":
            weight.assign(value_of(f"{name}.{last}", shape[::-1]).T)
        else:
            weight.assign(value_of(f"{name}.{last}", shape))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    keras: Any = import_module("keras")
    for name, build in NETWORKS.items():
        model = build(keras)
        for layer in model.layers:
            _assign_weights(layer)
        # Keras exports a model after a call only.
        model(np.ones((BATCH, *model.inputs[0].shape[1:]), model.inputs[0].dtype))
        for exporter, export in EXPORTERS.items():
            path = folder / f"{name}-keras-{exporter}.onnx"
            export(model, path)
            print(path, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
