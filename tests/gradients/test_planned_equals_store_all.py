"""Recomputation changes no bit: planned training graphs against the baseline."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest

from onnxgc.api import PlannedStep, emit, optimize, plan_step, store_all_schedule
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from onnxgc.runtime.measure import executed_order
from onnxgc.runtime.ort import SessionSettings, make_session
from onnxgc.solvers.base import SolverOptions
from tests.gradients.gradient_case import Draw
from tests.model.model_helpers import model_of, normal

_IMAGES = (4, 6, 10, 9)
_CHANNELS = 6


class _Network:
    """Nodes in ONNX text on images [4, 6, 10, 9], and their weights."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.weights: dict[str, tuple[int, ...]] = {}

    def convolution(
        self, name: str, source: str, channels: tuple[int, int] = (_CHANNELS, _CHANNELS), size: int = 3
    ) -> str:
        """Conv, BatchNormalization on batch statistics, ReLU; keeps the spatial size."""
        pads = ",".join(["1" if size == 3 else "0"] * 4)
        norm = [f"{name}_{part}" for part in ("scale", "bias", "mean", "var")]
        self.lines += [
            f"{name}_c = Conv<pads=[{pads}]>({source}, {name}_w)",
            f"{name}_n = BatchNormalization({name}_c, {', '.join(norm)})",
            f"{name} = Relu({name}_n)",
        ]
        self.weights[f"{name}_w"] = (channels[1], channels[0], size, size)
        self.weights.update(dict.fromkeys(norm, (channels[1],)))
        return name

    def model(self, last: str, channels: int) -> onnx.ModelProto:
        self.lines += [f"pooled = GlobalAveragePool({last})", "flat = Flatten(pooled)", "y = Gemm(flat, fc, fc_b)"]
        self.weights |= {"fc": (channels, 5), "fc_b": (5,)}
        body = f"(float[4,6,10,9] x) => (float[4,5] y) {{ {' '.join(self.lines)} }}"
        return model_of(body, **{name: _drawn(name, *shape) for name, shape in self.weights.items()})


def _drawn(name: str, *shape: int) -> Array:
    value = Draw(shape, is_positive=len(shape) == 1).value("network", name)
    return value if len(shape) == 1 else value / np.sqrt(np.prod(shape[1:]))


def _residual() -> onnx.ModelProto:
    net, source = _Network(), "x"
    for block in range(3):
        inner = net.convolution(f"b{block}a", source)
        inner = net.convolution(f"b{block}b", inner)
        net.lines.append(f"b{block} = Add({inner}, {source})")
        source = f"b{block}"
    return net.model(source, _CHANNELS)


def _branches() -> onnx.ModelProto:
    net, source, channels = _Network(), "x", _CHANNELS
    for block in range(2):
        left = net.convolution(f"m{block}l", source, (channels, 4), size=1)
        middle = net.convolution(f"m{block}n", source, (channels, 3), size=1)
        middle = net.convolution(f"m{block}o", middle, (3, 5))
        net.lines.append(f"m{block}p = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>({source})")
        net.lines.append(f"m{block}q = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>({source})")
        right = net.convolution(f"m{block}r", f"m{block}p", (channels, 2), size=1)
        net.lines.append(f"m{block} = Concat<axis=1>({left}, {middle}, {right}, m{block}q)")
        source, channels = f"m{block}", 4 + 5 + 2 + channels
    return net.model(source, channels)


def _dropout() -> onnx.ModelProto:
    net, source = _Network(), "x"
    for block in range(4):
        inner = net.convolution(f"d{block}a", source)
        net.lines += [f"d{block}t = Tanh({inner})", f"d{block} = Dropout(d{block}t)"]
        source = f"d{block}"
    return net.model(source, _CHANNELS)


def _shifted() -> onnx.ModelProto:
    """Blocks on the image shifted by one, as in a factorised reduction, then on every second column."""
    net, source = _Network(), "x"
    net.lines += [
        "pads = Constant<value = int64[8] {0, 0, 0, 0, 0, 0, 1, 1}>()",
        "ones = Constant<value = int64[2] {1, 1}>()",
        "far = Constant<value = int64[2] {99, 99}>()",
        "spatial = Constant<value = int64[2] {2, 3}>()",
        "steps = Constant<value = int64[2] {-1, 2}>()",
        "ends = Constant<value = int64[2] {-99, 99}>()",
    ]
    for block in range(3):
        net.lines += [f"s{block}p = Pad({source}, pads)", f"s{block}q = Slice(s{block}p, ones, far, spatial)"]
        inner = net.convolution(f"s{block}a", f"s{block}q")
        net.lines.append(f"s{block} = Add({inner}, {source})")
        source = f"s{block}"
    net.lines.append(f"turned = Slice({source}, ones, ends, spatial, steps)")
    return net.model(net.convolution("last", "turned"), _CHANNELS)


def _normalised() -> onnx.ModelProto:
    """Blocks of all normalisations, products by Einsum, and a transposed convolution."""
    net, source = _Network(), "x"
    for block in range(3):
        b = f"n{block}"
        net.lines += [
            f"{b}l, {b}m = LayerNormalization<axis=2>({source}, {b}_rows, {b}_shift)",
            f'{b}e = Einsum<equation="nchw,dc->ndhw">({b}l, {b}_mix)',
            f"{b}i = InstanceNormalization({b}e, {b}_scale, {b}_bias)",
            f"{b}u = ConvTranspose<strides=[2,2]>({b}i, {b}_up)",
            f"{b}p = MaxPool<kernel_shape=[2,2], strides=[2,2]>({b}u)",
            f"{b}d = Conv<group={_CHANNELS}, pads=[1,1,1,1]>({b}p, {b}_deep)",
            f"{b}g = GlobalMaxPool({b}d)",
            f"{b}s = Mul({b}d, {b}g)",
            f"{b}k = LpNormalization<axis=1>({b}s)",
            f"{b}a = Add({b}k, {b}m)",
            f"{b} = Add({b}a, {source})",
        ]
        net.weights |= {
            f"{b}_rows": _IMAGES[2:],
            f"{b}_shift": _IMAGES[2:],
            f"{b}_mix": (_CHANNELS, _CHANNELS),
            f"{b}_scale": (_CHANNELS,),
            f"{b}_bias": (_CHANNELS,),
            f"{b}_up": (_CHANNELS, _CHANNELS, 2, 2),
            f"{b}_deep": (_CHANNELS, 1, 3, 3),
        }
        source = b
    return net.model(source, _CHANNELS)


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "residual": _residual,
    "branches": _branches,
    "dropout": _dropout,
    "shifted": _shifted,
    "normalised": _normalised,
}

Choice = Callable[[Sequence[str]], Sequence[str]]

# The vertices to keep; None leaves the choice to the solver acg.
CHOICES: dict[str, Choice | None] = {
    "acg": None,
    "every third from the second": lambda vertices: vertices[1::3],
    "all but every fourth": lambda vertices: [name for i, name in enumerate(vertices) if i % 4 != 1],
}


def _planned(network: str, choice: str) -> PlannedStep:
    model = read_model(NETWORKS[network](), loss="cross-entropy")
    select = CHOICES[choice]
    if select is None:
        return plan_step(model, "acg")
    vertices = [str(vertex) for vertex in plan_step(model, "store-all").traced.problem.graph.vertices]
    return plan_step(model, "manual", SolverOptions(tuple(select(vertices))))


def _feeds(planned: PlannedStep) -> dict[str, Array]:
    labels = np.random.default_rng(0).integers(0, 5, _IMAGES[0])
    (target,) = planned.model.targets
    return {"x": Draw(_IMAGES).value("images"), target: labels}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("network", NETWORKS)
def test_planned_steps_are_bit_identical_to_the_baseline_and_run_in_file_order(network: str, choice: str):
    planned = _planned(network, choice)
    assert planned.schedule.recomputed
    feeds = _feeds(planned)
    graphs = {"planned": emit(planned), "baseline": emit(planned, schedule=store_all_schedule(planned))}
    for threads in (1, 2):
        results = {}
        for name, graph in graphs.items():
            session = make_session(graph.model, threads=threads)
            names = [output.name for output in session.get_outputs()]
            # Two steps, with other Dropout masks in each.
            for step in (1, 2):
                values = session.run(names, feeds)
                results[name, step] = dict(zip(names, values, strict=True))
        for step in (1, 2):
            expected, found = results["baseline", step], results["planned", step]
            assert list(found) == list(expected)
            assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []
            assert all(np.linalg.norm(expected[name]) > 0 for name in graphs["baseline"].gradient_of.values())
        losses = [results["planned", step][planned.model.loss] for step in (1, 2)]
        assert bool(losses[0] != losses[1]) == (network == "dropout")
    proto = graphs["planned"].model
    profile = executed_order(proto, feeds, SessionSettings(threads=1))
    assert profile.order == tuple(node.name for node in proto.graph.node)


NOISY = """(float[64,32] x) => (float[64,32] y) <float keep={0.8}> {
    h = MatMul(x, v) a = Relu(h) r = RandomUniformLike(a) c = Less(r, keep) k = Cast<to=1>(c) b = Mul(a, k)
    n = RandomNormalLike(b) d = Add(b, n) i = MatMul(d, w) j = Relu(i) l = MatMul(j, u) y = Relu(l)
}"""


def test_random_numbers_are_drawn_once_per_step():
    """Recomputed random numbers of stochastic depth and added noise would differ."""
    weights = {name: normal(32, 32, seed=number) for number, name in enumerate("vwu")}
    result = optimize(model_of(NOISY, **weights), loss="mse", solver="chen-sqrt")
    roles = {
        node.op_type: entry.value
        for node in result.training_graph.model.graph.node
        for entry in node.metadata_props
        if entry.key == "onnxgc.role" and node.op_type.startswith("Random")
    }
    assert roles == {"RandomUniformLike": "forward", "RandomNormalLike": "forward"}
    regular = emit(result.planned, schedule=store_all_schedule(result.planned))
    feeds = {"x": normal(64, 32), "target": normal(64, 32, seed=9)}
    outputs = [
        make_session(graph.model, providers=["CPUExecutionProvider"], threads=1).run(None, feeds)
        for graph in (regular, result.training_graph)
    ]
    assert all(np.array_equal(one, two) for one, two in zip(*outputs, strict=True))
