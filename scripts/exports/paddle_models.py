"""PaddlePaddle models and their exports by paddle2onnx.

    python scripts/exports/paddle_models.py FOLDER

Runs in a separate environment with paddlepaddle and paddle2onnx.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from scripts.exports.export_all import export_all, output_folder

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


def main(arguments: Sequence[str] | None = None) -> int:
    return export_all(_exports(output_folder(arguments, __doc__)))


def _exports(folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    paddle: Any = import_module("paddle")
    paddle.seed(0)
    for name in MODELS:
        for mode in ("eval", "train"):
            path = folder / f"{name}-{mode}.onnx"
            yield path.stem, partial(_export, paddle, name, mode, path)


def _export(paddle: Any, name: str, mode: str, path: Path) -> Path:
    build, (shape, dtype) = MODELS[name]
    network = build(paddle.nn)
    getattr(network, mode)()
    spec = [paddle.static.InputSpec(shape, dtype, "x")]
    paddle.onnx.export(network, str(path.with_suffix("")), input_spec=spec, opset_version=13)
    return path


if __name__ == "__main__":
    sys.exit(main())
