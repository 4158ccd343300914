"""Counter-based random numbers: a function of the step's number, and statistically random."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from onnxgc.runtime.ort import make_session
from tests.model.model_helpers import model_of, normal, read, text_model, with_weights

SHAPES = [(2, 4, 64, 64), (7,), (3, 1, 5)]
MAX_DEVIATION = 5.0
"""In standard deviations: random numbers exceed it in one of two million cases."""


def counted(
    nodes: str, shape: tuple[int, ...], outputs: str = "", kind: str = "float", **values: Any
) -> TrainableModel:
    """A model that computes z = x w and then `nodes`, which compute y from z."""
    size = ",".join(map(str, shape))
    body = f"({kind}[{size}] x) => ({kind}[{size}] y{outputs}) {{ z = Mul(x, w)  {nodes} }}"
    weight = np.ones(shape, np.float16 if kind == "float16" else np.float32)
    return read(model_of(body, w=weight, **values), counted_draws=True)


class Draws:
    def __init__(self, model: TrainableModel, *tensors: str) -> None:
        proto = to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        known = {value.name for value in proto.graph.output}
        added = [value for value in proto.graph.value_info if value.name in tensors and value.name not in known]
        proto.graph.output.extend(added)
        self.session = make_session(proto, threads=1)
        self.model, self.tensors = model, list(tensors)

    def __call__(self, number: int, x: Array | None = None) -> list[Array]:
        kind = self.model.types["x"]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.dtype)
        x = np.ones(kind.shape, dtype) if x is None else x
        feeds = {"x": x, "target": np.zeros(kind.shape, dtype), self.model.draw: np.asarray(number, np.int64)}
        return list(self.session.run(self.tensors, feeds))


def deviations(numbers: Array) -> Iterator[tuple[str, float]]:
    """Distances of averages of standardised numbers [step, ..., column] from 0, in standard deviations."""

    def of(products: Array) -> float:
        return float(abs(products.mean()) * math.sqrt(products.size)) if products.size else 0.0

    runs = numbers.reshape(len(numbers), -1)
    rows = numbers.reshape(len(numbers), -1, numbers.shape[-1])
    yield "mean", of(runs)
    for lag in (1, 2, 16):
        yield f"runs {lag} apart", of(runs[lag:] * runs[:-lag])
        yield f"neighbours {lag} apart", of(runs[:, lag:] * runs[:, :-lag])
        yield f"rows {lag} apart", of(rows[:, lag:] * rows[:, :-lag])
    corners = rows[:, 1:, 1:] * rows[:, :-1, 1:] * rows[:, 1:, :-1] * rows[:, :-1, :-1]
    yield "squares", of(corners)
    kurtosis = float((runs**4).mean())
    for name, averages, count in (
        ("runs", runs.mean(1), runs.shape[1]),
        ("rows", rows.mean(2), rows.shape[2]),
        ("columns", rows.mean(1), rows.shape[1]),
        ("elements", runs.mean(0), len(runs)),
    ):
        if count == 1:
            continue
        # Chi-square: the averages have the variance of averages of independent numbers.
        spread = math.sqrt((2 + (kurtosis - 3) / count) / averages.size)
        yield f"variance of {name}", abs(float((averages**2).mean()) * count - 1) / spread


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_masks_are_statistically_random(shape: tuple[int, ...], ratio: float):
    size = ",".join(map(str, shape))
    model = counted("a, m = Dropout(z, r)  y, n = Dropout(a, r)", shape, f", bool[{size}] m, bool[{size}] n", r=ratio)
    draws = Draws(model, "m", "n")
    runs = 64 if math.prod(shape) > 1000 else 1024
    masks = np.stack([np.stack(draws(number)) for number in range(runs)], axis=1)
    assert masks.dtype == np.bool_
    numbers = (masks - (1 - ratio)) / math.sqrt(ratio * (1 - ratio))
    for layer in numbers:
        assert [(name, far) for name, far in deviations(layer) if far > MAX_DEVIATION] == []
    assert abs((numbers[0] * numbers[1]).mean()) * math.sqrt(numbers[0].size) < MAX_DEVIATION
    if math.prod(shape) > 1000:
        # A pattern of rows and columns would exceed the largest singular value of independent numbers.
        matrix = numbers[0][0].reshape(-1, shape[-1])
        limit = sum(map(math.sqrt, matrix.shape))
        assert np.linalg.svd(matrix, compute_uv=False)[0] < 1.1 * limit


def test_the_number_determines_the_draws():
    """Two sessions draw the same with the same number, and differ for all others, also large ones."""
    model = counted("a = Dropout(z)  y = Dropout(a)", (8, 16))
    one, two = Draws(model, "y"), Draws(model, "y")
    numbers = [0, 1, 2, 2**16, 2**31, 2**31 + 1, -1]
    found = [one(number)[0] for number in numbers]
    for number, value in reversed(list(zip(numbers, found, strict=True))):
        np.testing.assert_array_equal(two(number)[0], value)
    assert len({value.tobytes() for value in found}) == len(numbers)


def test_draws_never_change():
    """A later version must be able to resume training."""
    (mask,) = Draws(counted("y, m = Dropout(z)", (4, 16), ", bool[4,16] m"), "m")(7)
    assert np.packbits(mask).tobytes().hex() == "b0f97c517dd93d5a"


@pytest.mark.parametrize("kind, ratio", [("float", 0.1), ("float", 1.0), ("float16", 0.5)])
def test_kept_elements_are_scaled(kind: str, ratio: float):
    model = counted("y, m = Dropout(z, r)", (5, 6), ", bool[5,6] m", kind, r=ratio)
    x = normal(5, 6).astype(np.float16 if kind == "float16" else np.float32)
    y, mask = Draws(model, "y", "m")(3, x)
    assert y.dtype == x.dtype
    scale = 1 / (1 - ratio) if ratio < 1 else 1
    np.testing.assert_allclose(
        y, np.where(mask, x * np.asarray(scale, x.dtype), 0), rtol=2e-3 if kind == "float16" else 1e-6
    )
    assert mask.any() == (ratio < 1)


def test_only_small_vectors_are_computed_once():
    model = counted("a = Dropout(z)  y = Dropout(a)", (2, 4, 64, 64))
    once = [node for node in model.nodes if node.once]
    sizes = {name: model.types[name].element_count for node in once for name in node.outputs}
    assert max(sizes.values()) == 2 * (2 * 64 + 4 * 64)
    assert all(node.op != "Dropout" and not node.domain for node in model.nodes)
    assert {model.types[name].shape for node in once for name in node.outputs if node.op == "Reshape"} == {
        (2, 1, 64, 1),
        (1, 4, 1, 64),
    }


@pytest.mark.parametrize(
    "node, mean, deviation, least, most",
    [
        ("RandomUniformLike <low = -3.0, high = 1.0> (z)", -1, 4 * 12**-0.5, -3, 1),
        ("RandomNormal <shape = [64,64], mean = 2.0, scale = 0.5> ()", 2, 0.5, -1, 5),
        ("Bernoulli (p)", 0.3, 0.21**0.5, 0, 1),
    ],
)
def test_distributions_of_other_operators(node: str, mean: float, deviation: float, least: float, most: float):
    probabilities = np.full((64, 64), 0.3, np.float32)
    model = counted(f"e = {node}  f = Cast <to = 1> (e)  y = Mul(z, f)", (64, 64), p=probabilities)
    draws = Draws(model, "y")
    found = np.stack([draws(number)[0] for number in range(64)]).astype(np.float64)
    assert found.min() >= least
    assert found.max() <= most
    standard = (found - mean) / deviation
    assert [(name, far) for name, far in deviations(standard) if far > MAX_DEVIATION] == []
    if deviation == 1 or "Normal" in node:
        assert abs((standard**4).mean() - 3) < 0.1
    elif "Uniform" in node:
        counts = np.histogram(found, 100, (least, most))[0]
        expected = found.size / 100
        assert abs(((counts - expected) ** 2 / expected).sum() - 99) < MAX_DEVIATION * math.sqrt(2 * 99)


def test_probabilities_0_and_1_are_certain():
    p = np.repeat(np.asarray([0, 1], np.float32), 512).reshape(2, 512)
    model = counted("e = Bernoulli <dtype = 9> (p)  f = Cast <to = 1> (e)  y = Mul(z, f)", (2, 512), p=p)
    np.testing.assert_array_equal(Draws(model, "f")(1)[0], p)


def test_a_note_names_operators_with_the_runtime_s_generator():
    nodes = """e = Softmax(z)  k = Multinomial <sample_size = 3> (e)  f = Cast <to = 1> (k)
        s = ReduceMean <keepdims = 0> (f)  c = Sigmoid(s)
        a = Dropout(z, c, on)  b = Mul(a, s)  y = Dropout(b)"""
    model = counted(nodes, (4, 3), on=np.asarray(True))
    notes = [note for note in model.notes if "another session draws other numbers" in note]
    assert [note.split()[0] for note in notes] == ["Multinomial", "Dropout"]
    assert [node.op for node in model.nodes if node.op in ("Multinomial", "Dropout")] == ["Multinomial", "Dropout"]


def test_the_input_exists_only_if_numbers_are_drawn():
    assert counted("draw = Tanh(z)  y = Dropout(draw)", (2, 3)).draw == "draw_2"
    assert counted("y = Dropout(z, r)", (2, 3), r=0.0).draw == ""
    body = text_model("(float[2,3] x) => (float[2,3] y) { z = Mul(x, w)  y = Dropout(z) }")
    model = read(with_weights(body, w=normal(3)))
    assert (model.draw, [node.op for node in model.nodes][:2]) == ("", ["Mul", "Dropout"])
