"""Twin networks by paddle2onnx.

    python -m scripts.exports.paddle_twins FOLDER

Runs in the environment of `paddle_models.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.exports.export_all import main
from scripts.exports.paddle_models import exports_of
from scripts.exports.twins import BATCH, CLASSES, ENCODER, EPSILON, PIXELS, value_of

_RENAMED = {"_mean": "running_mean", "_variance": "running_var"}
# Names in Paddle's encoder layer.
_PARTS = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.out_proj": "out",
    "linear1": "inner",
    "linear2": "outer",
    "norm1": "first",
    "norm2": "second",
}


def _encoder(paddle: Any) -> Any:
    nn: Any = paddle.nn

    class Network(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.word = nn.Embedding(ENCODER.words, ENCODER.width)
            self.position = self.create_parameter([ENCODER.length, ENCODER.width])
            self.norm = nn.LayerNorm(ENCODER.width, epsilon=EPSILON)
            self.block = nn.LayerList(
                [
                    nn.TransformerEncoderLayer(
                        ENCODER.width, ENCODER.heads, ENCODER.inner, dropout=0.0, activation="gelu"
                    )
                    for _ in range(ENCODER.blocks)
                ]
            )
            self.head = nn.Linear(ENCODER.width, CLASSES)

        def forward(self, tokens: Any) -> Any:
            x = self.norm(self.word(tokens) + self.position)
            for block in self.block:
                x = block(x)
            return self.head(x.mean(axis=1))

    return Network()


def _vision(name: str) -> Callable[[Any], Any]:
    return lambda paddle: getattr(import_module("paddle.vision.models"), name)(num_classes=CLASSES)


_IMAGE = ([BATCH, 3, PIXELS, PIXELS], "float32")
NETWORKS: Mapping[str, tuple[Callable[[Any], Any], tuple[list[int], str]]] = {
    "resnet50": (_vision("resnet50"), _IMAGE),
    "mobilenet_v2": (_vision("mobilenet_v2"), _IMAGE),
    "encoder": (_encoder, ([BATCH, ENCODER.length], "int64")),
}


def _torch_name(key: str) -> str:
    start, _, last = key.rpartition(".")
    for part, name in _PARTS.items():
        start = start.replace(part, name)
    return f"{start}.{_RENAMED.get(last, last)}" if start else last


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    paddle: Any = import_module("paddle")
    for name, (build, spec) in NETWORKS.items():
        network = build(paddle)
        for key, tensor in network.state_dict().items():
            torch_name = _torch_name(key)
            sizes = tuple(tensor.shape)
            is_linear = len(sizes) == 2 and not torch_name.startswith(("word", "position"))
            value = value_of(torch_name, sizes[::-1] if is_linear else sizes)
            tensor.set_value(paddle.to_tensor((value.T if is_linear else value).copy()))
        yield from exports_of(paddle, f"{name}-paddle", network, spec)


if __name__ == "__main__":
    main(exports)
