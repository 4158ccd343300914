"""JAX models and their exports by jax2onnx.

    python -m scripts.exports.jax_models FOLDER

Runs in a separate environment with jax, flax and jax2onnx.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.exports.export_all import main

_CLASSES = 10
_BATCH = 2


def _cnn(nnx: Any, rngs: Any) -> tuple[Any, list[Any]]:
    class Network(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.second = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
            self.drop = nnx.Dropout(0.2, deterministic=True, rngs=rngs)
            self.head = nnx.Linear(16, _CLASSES, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.relu(self.norm(self.first(x)))
            x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
            x = nnx.gelu(self.second(x))
            return self.head(self.drop(x.mean(axis=(1, 2))))

    return Network(), [(_BATCH, 16, 16, 3)]


def _mlp(nnx: Any, rngs: Any) -> tuple[Any, list[Any]]:
    network = nnx.Sequential(
        nnx.Linear(12, 32, rngs=rngs), nnx.silu, nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
    )
    return network, [(_BATCH, 12)]


def _transformer(nnx: Any, rngs: Any) -> tuple[Any, list[Any]]:
    class Block(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
            self.first, self.second = nnx.LayerNorm(32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs)
            self.inner = nnx.Linear(32, 64, rngs=rngs)
            self.outer = nnx.Linear(64, 32, rngs=rngs)
            self.head = nnx.Linear(32, _CLASSES, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.first(x))
            x = x + self.outer(nnx.gelu(self.inner(self.second(x))))
            return self.head(x.mean(axis=1))

    return Block(), [(_BATCH, 8, 32)]


def _recurrent(cell: str) -> Callable[[Any, Any], tuple[Any, list[Any]]]:
    """A scan over the steps: jax2onnx cannot trace the recurrent layers of flax."""

    def build(nnx: Any, rngs: Any) -> tuple[Any, list[Any]]:
        jax: Any = import_module("jax")
        jnp: Any = import_module("jax.numpy")
        width, hidden, gates = 8, 12, {"lstm": 4, "gru": 3}[cell]
        draw = jax.nn.initializers.lecun_normal()
        shapes = ((width, gates * hidden), (hidden, gates * hidden), (hidden, _CLASSES))
        w, r, head = (draw(rngs.params(), shape) for shape in shapes)

        def lstm(state: Any, x: Any) -> tuple[Any, Any]:
            h, c = state
            i, f, g, o = jnp.split(x @ w + h @ r, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        def gru(h: Any, x: Any) -> tuple[Any, Any]:
            (xz, xr, xn), (hz, hr, hn) = jnp.split(x @ w, 3, axis=-1), jnp.split(h @ r, 3, axis=-1)
            z = jax.nn.sigmoid(xz + hz)
            h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
            return h, h

        def run(x: Any) -> Any:
            zero = jnp.zeros((_BATCH, hidden))
            steps = jnp.swapaxes(x, 0, 1)
            _, outputs = jax.lax.scan(*((lstm, (zero, zero)) if cell == "lstm" else (gru, zero)), steps)
            return outputs[-1] @ head

        return run, [(_BATCH, 6, width)]

    return build


MODELS: Mapping[str, Callable[[Any, Any], tuple[Any, list[Any]]]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "transformer": _transformer,
    "lstm": _recurrent("lstm"),
    "gru": _recurrent("gru"),
}


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    for name in MODELS:
        yield f"{name}-jax2onnx", partial(_export, name)


def _export(name: str, path: Path) -> None:
    nnx: Any = import_module("flax.nnx")
    network, inputs = MODELS[name](nnx, nnx.Rngs(0))
    write_onnx(network, inputs, path)


def write_onnx(network: Any, inputs: Any, path: Path) -> None:
    convert: Any = import_module("jax2onnx")
    convert.to_onnx(network, inputs, return_mode="file", output_path=str(path))


if __name__ == "__main__":
    main(exports)
