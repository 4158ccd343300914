"""Small forward models that show a known fault of ONNX Runtime, each ending in a scalar loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from tests.model.model_helpers import model_of, normal

_LOSS = "l = Mul(y, y) loss = ReduceSum<keepdims=0>(l)"
_NORM = "m = ReduceMean(x, last) {sub} p = Pow(d, k) v = ReduceMean(p, last) {add} s = Sqrt(a) {div}"


@dataclass(frozen=True, slots=True)
class FaultCase:
    """`shown` is the name of the fault in the table; `trains` says whether the model has a loss."""

    shown: str
    name: str
    body: str
    weights: Mapping[str, Array]
    feeds: Mapping[str, Array]
    threads: int = 1
    trains: bool = True
    opset: int = field(default=18)

    def model(self) -> onnx.ModelProto:
        inputs = ", ".join(f"{_type(value)} {name}" for name, value in self.feeds.items())
        output = "float[] loss" if self.trains else "float[2,2] y"
        ending = _LOSS if self.trains else ""
        text = f"({inputs}) => ({output}) {{ {self.body} {ending} }}"
        return model_of(text, opset=self.opset, **self.weights)


def _type(value: Array) -> str:
    kind = "int64" if value.dtype == np.int64 else "float"
    return f"{kind}[{','.join(map(str, value.shape))}]"


def _vector(name: str, body: str, *shape: int, length: int) -> FaultCase:
    weights: dict[str, Array] = {"w": normal(*shape), "u": normal(length, seed=1)}
    return FaultCase("vector product", name, body, weights, {"x": normal(*shape, seed=2)})


def _norm(name: str, **parts: str) -> FaultCase:
    exponent = float(parts.pop("k", "2"))
    usual = {"sub": "d = Sub(x, m)", "add": "a = Add(v, e)", "div": "n = Div(d, s)"}
    body = _NORM.format(**{**usual, **parts}) + " o = Mul(n, w) y = Add(o, b)"
    shape = (4, 1) if name == "epsilon of a row" else ()
    weights = {
        "w": normal(6),
        "b": normal(6, seed=1),
        "k": np.asarray(exponent, np.float32),
        "e": np.asarray(np.abs(normal(*shape)) + 0.5, np.float32),
        "last": np.asarray([-1]),
    }
    return FaultCase("mistaken normalisation", name, body, weights, {"x": normal(4, 6)})


def _pool(name: str, pool: str, *pads: int) -> FaultCase:
    weights: dict[str, Array] = {"w": np.abs(normal(1, 2, 1, 1)), "p": np.asarray(pads)}
    body = f"h = Mul(x, w) q = Pad(h, p) y = {pool}(q)"
    # Where all is negative, the zeros of the padding are the maximum.
    feeds: dict[str, Array] = {"x": -np.abs(normal(1, 2, 7, 6))}
    return FaultCase("Pad into a pool", name, body, weights, feeds)


def _scatter(reduction: str) -> FaultCase:
    weights: dict[str, Array] = {
        "w": np.ones((1, 128), np.float32),
        "d": np.ones((2, 128), np.float32),
        "i": np.asarray(np.random.default_rng(0).integers(-2, 2, (16384, 1))),
    }
    body = f'h = Mul(x, w) y = ScatterND<reduction="{reduction}">(d, i, h)'
    feeds = {"x": 1 + np.float32(1e-4) * normal(16384, 128)}
    return FaultCase("sums by ScatterND", reduction, body, weights, feeds, threads=2)


CASES: tuple[FaultCase, ...] = (
    _vector("plain", "h = Mul(x, w) t = Transpose<perm=[1,0]>(h) y = MatMul(t, u)", 4, 6, length=4),
    _vector("batched", "h = Mul(x, w) t = Transpose<perm=[0,2,1]>(h) y = MatMul(t, u)", 2, 4, 6, length=4),
    _vector("square", "h = Mul(x, w) t = Transpose<perm=[1,0]>(h) y = MatMul(t, u)", 4, 4, length=4),
    _vector(
        "past a cast",
        "h = Mul(x, w) t = Transpose<perm=[1,0]>(h) f = Cast<to=11>(t) g = Cast<to=11>(u) "
        "q = MatMul(f, g) y = Cast<to=1>(q)",
        4,
        6,
        length=4,
    ),
    FaultCase(
        "shape of a Reshape",
        "fed",
        "s = Reshape(z, one) y = Reshape(x, s)",
        {"one": np.asarray([2])},
        {"x": normal(1, 4), "z": np.asarray([[2, 2]])},
        trains=False,
    ),
    FaultCase(
        "emptying Expand",
        "of rows",
        "h = Mul(x, w) q = Expand(h, e) f = ReduceSum<keepdims=0>(q) y = Add(h, f)",
        {"w": normal(3, 1), "e": np.asarray([3, 0])},
        {"x": normal(3, 1)},
    ),
    _pool("largest", "MaxPool<kernel_shape=[3,3]>", 0, 0, 1, 1, 0, 0, 1, 1),
    _pool("beyond the kernel", "MaxPool<kernel_shape=[3,3]>", 0, 0, 3, 3, 0, 0, 3, 3),
    _pool("beyond the mean", "AveragePool<kernel_shape=[3,3]>", 0, 0, 3, 3, 0, 0, 3, 3),
    FaultCase(
        "attribute on an activation",
        "Relu",
        "h = Gemm(x, w) y = Relu<__again=1>(h)",
        {"w": normal(3, 4)},
        {"x": normal(2, 3)},
    ),
    _scatter("add"),
    _scatter("mul"),
    _norm("fourth power", k="4"),
    _norm("difference exchanged", sub="d = Sub(m, x)"),
    _norm("quotient exchanged", div="n = Div(s, d)"),
    _norm("epsilon first", add="a = Add(e, v)"),
    _norm("epsilon of a row"),
)
