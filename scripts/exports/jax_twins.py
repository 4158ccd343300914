"""Twin networks in flax by jax2onnx.

    python scripts/exports/jax_twins.py FOLDER

Runs in the environment of `jax_models.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from scripts.exports.twins import BATCH, BOTTLENECKS, CLASSES, ENCODER, EPSILON, INVERTED, PIXELS, value_of

Apply = Callable[[Any], Any]


class _Layers:
    """Creates layers of flax with weights that follow from their names."""

    def __init__(self) -> None:
        self.nnx: Any = import_module("flax.nnx")
        self.jnp: Any = import_module("jax.numpy")
        self._rngs = self.nnx.Rngs(0)

    def convolution(
        self,
        names: tuple[str, str],
        channels: tuple[int, int],
        kernel: int,
        stride: int = 1,
        is_depthwise: bool = False,
    ) -> Apply:
        nnx, (before, after) = self.nnx, channels
        conv = nnx.Conv(
            before,
            after,
            (kernel, kernel),
            strides=(stride, stride),
            padding=((kernel // 2,) * 2,) * 2,
            feature_group_count=before if is_depthwise else 1,
            use_bias=False,
            rngs=self._rngs,
        )
        shape = (after, 1 if is_depthwise else before, kernel, kernel)
        conv.kernel = nnx.Param(self.jnp.asarray(value_of(f"{names[0]}.weight", shape).transpose(2, 3, 1, 0)))
        norm = nnx.BatchNorm(after, use_running_average=True, epsilon=EPSILON, rngs=self._rngs)
        for part, last in (("scale", "weight"), ("bias", "bias")):
            setattr(norm, part, nnx.Param(self._vector(f"{names[1]}.{last}", after)))
        for part, last in (("mean", "running_mean"), ("var", "running_var")):
            setattr(norm, part, nnx.BatchStat(self._vector(f"{names[1]}.{last}", after)))
        return lambda x: norm(conv(x))

    def linear(self, name: str, before: int, after: int) -> Any:
        layer = self.nnx.Linear(before, after, rngs=self._rngs)
        layer.kernel = self.nnx.Param(self.jnp.asarray(value_of(f"{name}.weight", (after, before)).T))
        layer.bias = self.nnx.Param(self._vector(f"{name}.bias", after))
        return layer

    def norm(self, name: str) -> Any:
        layer = self.nnx.LayerNorm(ENCODER.width, epsilon=EPSILON, rngs=self._rngs)
        layer.scale = self.nnx.Param(self._vector(f"{name}.weight", ENCODER.width))
        layer.bias = self.nnx.Param(self._vector(f"{name}.bias", ENCODER.width))
        return layer

    def attention(self, name: str) -> Any:
        nnx, width, heads = self.nnx, ENCODER.width, ENCODER.heads
        layer = nnx.MultiHeadAttention(heads, width, decode=False, rngs=self._rngs)
        for part in ("query", "key", "value", "out"):
            linear = getattr(layer, part)
            for kind in ("kernel", "bias"):
                shape = getattr(linear, kind).shape
                last = "weight" if kind == "kernel" else "bias"
                value = value_of(f"{name}.{part}.{last}", (width, width) if kind == "kernel" else (width,))
                setattr(linear, kind, nnx.Param(self.jnp.asarray(value.T.reshape(shape))))
        return layer

    def table(self, name: str, rows: int) -> Any:
        return self.jnp.asarray(value_of(name, (rows, ENCODER.width)))

    def _vector(self, name: str, size: int) -> Any:
        return self.jnp.asarray(value_of(name, (size,)))


def _resnet50(layers: _Layers) -> Apply:
    nnx = layers.nnx
    stem = layers.convolution(("conv1", "bn1"), (3, 64), 7, 2)
    stages: list[tuple[list[Apply], Apply | None]] = []
    before = 64
    for stage, (blocks, width) in enumerate(BOTTLENECKS, 1):
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", 2 if block == 0 and stage > 1 else 1
            convolutions = [
                layers.convolution((f"{name}.conv1", f"{name}.bn1"), (before, width), 1),
                layers.convolution((f"{name}.conv2", f"{name}.bn2"), (width, width), 3, stride),
                layers.convolution((f"{name}.conv3", f"{name}.bn3"), (width, 4 * width), 1),
            ]
            names = (f"{name}.downsample.0", f"{name}.downsample.1")
            shortcut = layers.convolution(names, (before, 4 * width), 1, stride) if block == 0 else None
            stages.append((convolutions, shortcut))
            before = 4 * width
    head = layers.linear("fc", before, CLASSES)

    def run(x: Any) -> Any:
        x = nnx.relu(stem(x))
        # jax2onnx drops the padding of a pool. After a ReLU, zeros are equivalent.
        x = layers.jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        x = nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2))
        for (first, second, third), shortcut in stages:
            y = third(nnx.relu(second(nnx.relu(first(x)))))
            x = nnx.relu(y + (x if shortcut is None else shortcut(x)))
        return head(x.mean(axis=(1, 2)))

    return run


def _mobilenet_v2(layers: _Layers) -> Apply:
    nnx = layers.nnx
    stem = layers.convolution(("features.0.0", "features.0.1"), (3, 32), 3, 2)
    stages: list[tuple[list[Apply], Apply, bool]] = []
    before, index = 32, 0
    for expansion, channels, blocks, first in INVERTED:
        for block in range(blocks):
            index += 1
            name, stride = f"features.{index}.conv", first if block == 0 else 1
            inner, layer, convolutions = before * expansion, 0, list[Apply]()
            if expansion > 1:
                names = (f"{name}.0.0", f"{name}.0.1")
                convolutions.append(layers.convolution(names, (before, inner), 1))
                layer = 1
            names = (f"{name}.{layer}.0", f"{name}.{layer}.1")
            convolutions.append(layers.convolution(names, (inner, inner), 3, stride, is_depthwise=True))
            names = (f"{name}.{layer + 1}", f"{name}.{layer + 2}")
            last = layers.convolution(names, (inner, channels), 1)
            stages.append((convolutions, last, stride == 1 and channels == before))
            before = channels
    top = layers.convolution(("features.18.0", "features.18.1"), (before, 1280), 1)
    head = layers.linear("classifier.1", 1280, CLASSES)

    def run(x: Any) -> Any:
        x = nnx.relu6(stem(x))
        for convolutions, last, is_residual in stages:
            y = x
            for convolution in convolutions:
                y = nnx.relu6(convolution(y))
            x = x + last(y) if is_residual else last(y)
        return head(nnx.relu6(top(x)).mean(axis=(1, 2)))

    return run


def _encoder(layers: _Layers) -> Apply:
    nnx, jnp, width = layers.nnx, layers.jnp, ENCODER.width
    words, position = layers.table("word.weight", ENCODER.words), layers.table("position", ENCODER.length)
    norm, head = layers.norm("norm"), layers.linear("head", width, CLASSES)
    blocks = [
        (
            layers.attention(f"block.{index}"),
            layers.norm(f"block.{index}.first"),
            layers.linear(f"block.{index}.inner", width, ENCODER.inner),
            layers.linear(f"block.{index}.outer", ENCODER.inner, width),
            layers.norm(f"block.{index}.second"),
        )
        for index in range(ENCODER.blocks)
    ]

    def run(tokens: Any) -> Any:
        x = norm(jnp.take(words, tokens, axis=0) + position)
        for attention, first, inner, outer, second in blocks:
            x = first(x + attention(x))
            x = second(x + outer(nnx.gelu(inner(x), approximate=False)))
        return head(x.mean(axis=1))

    return run


NETWORKS: Mapping[str, tuple[Callable[[_Layers], Apply], tuple[int, ...], str]] = {
    "resnet50": (_resnet50, (BATCH, PIXELS, PIXELS, 3), "float32"),
    "mobilenet_v2": (_mobilenet_v2, (BATCH, PIXELS, PIXELS, 3), "float32"),
    "encoder": (_encoder, (BATCH, ENCODER.length), "int32"),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    jax: Any = import_module("jax")
    to_onnx: Any = import_module("jax2onnx").to_onnx
    for name, (build, shape, kind) in NETWORKS.items():
        path = folder / f"{name}-jax.onnx"
        inputs = [jax.ShapeDtypeStruct(shape, kind)]
        to_onnx(build(_Layers()), inputs, return_mode="file", output_path=str(path))
        print(path, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
