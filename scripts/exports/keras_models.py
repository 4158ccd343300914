"""Keras models and their exports, by Keras itself and by tf2onnx.

    python -m scripts.exports.keras_models FOLDER

Runs in a separate environment with tensorflow-cpu, keras and tf2onnx.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from scripts.exports.export_all import main

_CLASSES = 10


def _cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3, padding="same", strides=2),
            layers.BatchNormalization(),
            layers.Activation("swish"),
            layers.Conv2DTranspose(8, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.UpSampling2D(interpolation="bilinear"),
            layers.AveragePooling2D(2),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2),
            layers.Dense(_CLASSES),
        ]
    )


def _transformer(keras: Any) -> Any:
    layers = keras.layers
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(100, 32)(tokens)
    attended = layers.MultiHeadAttention(4, 8)(x, x)
    x = layers.LayerNormalization()(x + attended)
    inner = layers.Dense(32)(layers.Dense(64, activation="silu")(x))
    x = layers.LayerNormalization()(x + inner)
    return keras.Model(tokens, layers.Dense(_CLASSES)(layers.GlobalMaxPooling1D()(x)))


def _recurrent(layer: str) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((12,), dtype="int32"),
                layers.Embedding(100, 16),
                layers.Bidirectional(getattr(layers, layer)(12, return_sequences=True)),
                getattr(layers, layer)(12),
                layers.Dense(_CLASSES, activation="softmax"),
            ]
        )

    return build


def _application(name: str) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        network = getattr(keras.applications, name)
        return network(weights=None, input_shape=(64, 64, 3), classes=_CLASSES)

    return build


MODELS: Mapping[str, Callable[[Any], Any]] = {
    "cnn": _cnn,
    "transformer": _transformer,
    "lstm": _recurrent("LSTM"),
    "gru": _recurrent("GRU"),
    "mobilenet": _application("MobileNet"),
    "mobilenet_v2": _application("MobileNetV2"),
    "mobilenet_v3": _application("MobileNetV3Small"),
}


def _by_keras(model: Any, path: Path) -> None:
    model.export(str(path), format="onnx", verbose=False)


def _by_tf2onnx(model: Any, path: Path, training: bool) -> None:
    tensorflow: Any = import_module("tensorflow")
    value = model.inputs[0]
    signature = [tensorflow.TensorSpec([2, *value.shape[1:]], value.dtype, name="x")]
    run = tensorflow.function(lambda x: model(x, training=training), input_signature=signature)
    convert: Any = import_module("tf2onnx").convert
    convert.from_function(run, input_signature=signature, opset=15, output_path=str(path))


EXPORTERS: Mapping[str, Callable[[Any, Path], None]] = {
    "keras": _by_keras,
    "tf2onnx": partial(_by_tf2onnx, training=False),
    "tf2onnx-train": partial(_by_tf2onnx, training=True),
}


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    keras: Any = import_module("keras")
    keras.utils.set_random_seed(0)
    for name, build in MODELS.items():
        yield from exports_of(name, build(keras))


def exports_of(name: str, model: Any) -> Iterator[tuple[str, Callable[[Path], object]]]:
    # Keras exports a model after a call only.
    model(np.ones((2, *model.inputs[0].shape[1:]), model.inputs[0].dtype))
    for exporter, export in EXPORTERS.items():
        yield f"{name}-{exporter}", partial(export, model)


if __name__ == "__main__":
    main(exports)
