"""Twin networks in flax by jax2onnx.

    python -m scripts.exports.jax_twins FOLDER

Runs in the environment of `jax_models.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.exports.export_all import main
from scripts.exports.jax_models import write_onnx
from scripts.exports.twins import BATCH, BOTTLENECKS, CLASSES, ENCODER, EPSILON, PIXELS, value_of
from scripts.networks.residual import mobilenet_v2, resnet


class _Layers:
    """flax in place of `scripts.networks.builder.Builder`: layers are made once, by their names."""

    def __init__(self) -> None:
        self.nnx: Any = import_module("flax.nnx")
        self.jnp: Any = import_module("jax.numpy")
        self._rngs = self.nnx.Rngs(0)
        self._made: dict[str, Any] = {}

    def conv(
        self, x: Any, name: str, shape: tuple[int, int], kernel: int = 1, *,
        stride: int = 1, padding: int = 0, groups: int = 1,
    ) -> Any:  # fmt: skip
        def make() -> Any:
            sizes = {"kernel_size": (kernel,) * 2, "strides": (stride,) * 2, "padding": ((padding,) * 2,) * 2}
            layer = self.nnx.Conv(*shape, **sizes, feature_group_count=groups, use_bias=False, rngs=self._rngs)
            weight = value_of(f"{name}.weight", (shape[1], shape[0] // groups, kernel, kernel))
            layer.kernel = self.nnx.Param(self.jnp.asarray(weight.transpose(2, 3, 1, 0)))
            return layer

        return self._layer(name, make)(x)

    def batch_norm(self, x: Any, name: str, channels: int) -> Any:
        def make() -> Any:
            norm = self.nnx.BatchNorm(channels, use_running_average=True, epsilon=EPSILON, rngs=self._rngs)
            self._set_affine(norm, name, channels)
            for part, last in (("mean", "running_mean"), ("var", "running_var")):
                setattr(norm, part, self.nnx.BatchStat(self.table(f"{name}.{last}", channels)))
            return norm

        return self._layer(name, make)(x)

    def linear(self, x: Any, name: str, shape: tuple[int, int]) -> Any:
        def make() -> Any:
            layer = self.nnx.Linear(*shape, rngs=self._rngs)
            layer.kernel = self.nnx.Param(self.jnp.asarray(value_of(f"{name}.weight", shape[::-1]).T))
            layer.bias = self.nnx.Param(self.table(f"{name}.bias", shape[1]))
            return layer

        return self._layer(name, make)(x)

    def norm(self, x: Any, name: str) -> Any:
        def make() -> Any:
            layer = self.nnx.LayerNorm(ENCODER.width, epsilon=EPSILON, rngs=self._rngs)
            self._set_affine(layer, name, ENCODER.width)
            return layer

        return self._layer(name, make)(x)

    def attention(self, x: Any, name: str) -> Any:
        def make() -> Any:
            width = ENCODER.width
            layer = self.nnx.MultiHeadAttention(ENCODER.heads, width, decode=False, rngs=self._rngs)
            for part in ("query", "key", "value", "out"):
                linear = getattr(layer, part)
                for kind, last, shape in (("kernel", "weight", (width, width)), ("bias", "bias", (width,))):
                    value = value_of(f"{name}.{part}.{last}", shape).T.reshape(getattr(linear, kind).shape)
                    setattr(linear, kind, self.nnx.Param(self.jnp.asarray(value)))
            return layer

        return self._layer(name, make)(x)

    def relu(self, x: Any, name: str) -> Any:
        return self.nnx.relu(x)

    def relu6(self, x: Any, name: str) -> Any:
        return self.nnx.relu6(x)

    def max_pool(self, x: Any, name: str, kernel: int, stride: int, padding: int) -> Any:
        # jax2onnx drops the padding of a pool. After a ReLU, zeros are equivalent.
        x = self.jnp.pad(x, ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0)))
        return self.nnx.max_pool(x, window_shape=(kernel,) * 2, strides=(stride,) * 2)

    def sum(self, left: Any, right: Any, name: str) -> Any:
        return left + right

    def global_average(self, x: Any) -> Any:
        return x.mean(axis=(1, 2))

    def dropout(self, x: Any, name: str, ratio: float) -> Any:
        return x

    def table(self, name: str, *shape: int) -> Any:
        return self._layer(name, lambda: self.jnp.asarray(value_of(name, shape)))

    def _set_affine(self, norm: Any, name: str, size: int) -> None:
        norm.scale = self.nnx.Param(self.table(f"{name}.weight", size))
        norm.bias = self.nnx.Param(self.table(f"{name}.bias", size))

    def _layer(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _encoder(net: Any, tokens: Any, classes: int) -> Any:
    width, inner = ENCODER.width, ENCODER.inner
    x = net.jnp.take(net.table("word.weight", ENCODER.words, width), tokens, axis=0)
    x = net.norm(x + net.table("position", ENCODER.length, width), "norm")
    for block in range(ENCODER.blocks):
        name = f"block.{block}"
        x = net.norm(x + net.attention(x, name), f"{name}.first")
        y = net.nnx.gelu(net.linear(x, f"{name}.inner", (width, inner)), approximate=False)
        x = net.norm(x + net.linear(y, f"{name}.outer", (inner, width)), f"{name}.second")
    return net.linear(x.mean(axis=1), "head", (width, classes))


_IMAGE = ((BATCH, PIXELS, PIXELS, 3), "float32")
NETWORKS: Mapping[str, tuple[Callable[..., Any], tuple[tuple[int, ...], str]]] = {
    "resnet50": (partial(resnet, depths=BOTTLENECKS, bottleneck=True), _IMAGE),
    "mobilenet_v2": (mobilenet_v2, _IMAGE),
    "encoder": (_encoder, ((BATCH, ENCODER.length), "int32")),
}


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    for name in NETWORKS:
        yield f"{name}-jax", partial(_export, name)


def _export(name: str, path: Path) -> None:
    define, spec = NETWORKS[name]
    jax, net = import_module("jax"), _Layers()
    # Layers that are made while jax traces would be part of the graph.
    define(net, net.jnp.zeros(*spec), classes=CLASSES)
    write_onnx(lambda x: define(net, x, classes=CLASSES), [jax.ShapeDtypeStruct(*spec)], path)


if __name__ == "__main__":
    main(exports)
