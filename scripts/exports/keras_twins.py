"""Twin networks by the exporters of Keras and tf2onnx.

    python -m scripts.exports.keras_twins FOLDER

Runs in the environment of `keras_models.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from scripts.exports.export_all import main
from scripts.exports.keras_models import exports_of
from scripts.exports.twins import BOTTLENECKS, CLASSES, ENCODER, EPSILON, PIXELS, value_of
from scripts.networks.residual import mobilenet_v2, resnet


class _Layers:
    """Keras in place of `scripts.networks.builder.Builder`, with PyTorch's padding."""

    def __init__(self, keras: Any) -> None:
        self._layers = keras.layers

    def conv(
        self, x: Any, name: str, shape: tuple[int, int], kernel: int = 1, *,
        stride: int = 1, padding: int = 0, groups: int = 1,
    ) -> Any:  # fmt: skip
        if padding:
            x = self._layers.ZeroPadding2D(padding)(x)
        if groups > 1:
            return self._layers.DepthwiseConv2D(kernel, stride, use_bias=False, name=name)(x)
        return self._layers.Conv2D(shape[1], kernel, stride, use_bias=False, name=name)(x)

    def batch_norm(self, x: Any, name: str, channels: int) -> Any:
        return self._layers.BatchNormalization(epsilon=EPSILON, name=name)(x)

    def relu(self, x: Any, name: str) -> Any:
        return self._layers.ReLU()(x)

    def relu6(self, x: Any, name: str) -> Any:
        return self._layers.ReLU(6.0)(x)

    def max_pool(self, x: Any, name: str, kernel: int, stride: int, padding: int) -> Any:
        return self._layers.MaxPooling2D(kernel, stride)(self._layers.ZeroPadding2D(padding)(x))

    def sum(self, left: Any, right: Any, name: str) -> Any:
        return self._layers.Add()([left, right])

    def global_average(self, x: Any) -> Any:
        return self._layers.GlobalAveragePooling2D()(x)

    def dropout(self, x: Any, name: str, ratio: float) -> Any:
        return self._layers.Dropout(ratio)(x)

    def linear(self, x: Any, name: str, shape: tuple[int, int]) -> Any:
        return self._layers.Dense(shape[1], name=name)(x)


def _vision(define: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        image = keras.Input((PIXELS, PIXELS, 3))
        return keras.Model(image, define(_Layers(keras), image, classes=CLASSES, **options))

    return build


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
    "resnet50": _vision(resnet, depths=BOTTLENECKS, bottleneck=True),
    "mobilenet_v2": _vision(mobilenet_v2),
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


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    keras: Any = import_module("keras")
    for name, build in NETWORKS.items():
        model = build(keras)
        for layer in model.layers:
            _assign_weights(layer)
        yield from exports_of(f"{name}-keras", model)


if __name__ == "__main__":
    main(exports)
