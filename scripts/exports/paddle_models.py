"""PaddlePaddle models and their exports by paddle2onnx.

    python -m scripts.exports.paddle_models FOLDER

Runs in a separate environment with paddlepaddle and paddle2onnx.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.exports.export_all import main

_CLASSES = 10


def _cnn(nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2D(3, 8, 3, padding=1),
        nn.BatchNorm2D(8),
        nn.Hardswish(),
        nn.MaxPool2D(2),
        nn.Conv2D(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2D(8),
        nn.Conv2DTranspose(8, 8, 2, stride=2),
        nn.LeakyReLU(),
        # With a scale instead of a size, paddle2onnx 2.1 terminates the process.
        nn.Upsample(size=[32, 32], mode="nearest"),
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, _CLASSES),
    )


def _transformer(nn: Any) -> Any:
    class Network(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 32)
            self.block = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu")
            self.head = nn.Linear(32, _CLASSES)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.block(self.words(tokens)).mean(axis=1))

    return Network()


def _recurrent(network: str) -> Callable[[Any], Any]:
    def build(nn: Any) -> Any:
        class Network(nn.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.words = nn.Embedding(100, 16)
                self.steps = getattr(nn, network)(16, 12, num_layers=2, direction="bidirect")
                self.head = nn.Linear(24, _CLASSES)

            def forward(self, tokens: Any) -> Any:
                steps, _ = self.steps(self.words(tokens))
                return self.head(steps[:, -1])

        return Network()

    return build


def _mobilenet(nn: Any) -> Any:
    models: Any = import_module("paddle.vision.models")
    return models.mobilenet_v3_small(num_classes=_CLASSES)


_IMAGE = ([2, 3, 16, 16], "float32")
_TOKENS = ([2, 8], "int64")
MODELS: Mapping[str, tuple[Callable[[Any], Any], tuple[list[int], str]]] = {
    "cnn": (_cnn, _IMAGE),
    "transformer": (_transformer, _TOKENS),
    "lstm": (_recurrent("LSTM"), _TOKENS),
    "gru": (_recurrent("GRU"), _TOKENS),
    "mobilenet_v3": (_mobilenet, ([2, 3, 64, 64], "float32")),
}


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    paddle: Any = import_module("paddle")
    paddle.seed(0)
    for name, (build, spec) in MODELS.items():
        yield from exports_of(paddle, name, build(paddle.nn), spec)


def exports_of(
    paddle: Any, name: str, network: Any, spec: tuple[list[int], str]
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    for mode in ("eval", "train"):
        yield f"{name}-{mode}", partial(_export, paddle, network, mode, spec)


def _export(paddle: Any, network: Any, mode: str, spec: tuple[list[int], str], path: Path) -> None:
    getattr(network, mode)()
    inputs = [paddle.static.InputSpec(*spec, "x")]
    paddle.onnx.export(network, str(path.with_suffix("")), input_spec=inputs, opset_version=13)


if __name__ == "__main__":
    main(exports)
