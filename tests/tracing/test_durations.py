from dataclasses import replace

import numpy as np
import pytest

from onnxgc.errors import DurationError
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from onnxgc.tracing.devices import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, DEVICES, Device, device
from onnxgc.tracing.durations import Work, backward_works, durations_ns, forward_works
from onnxgc.tracing.step_graph import TrainingStep, trace
from tests.model.model_helpers import model_of, normal

# 10 operations per byte.
ROOFLINE = Device("test", {"float32": 1e10, "float16": 2e10}, 1e9, 1e-6, "none")
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def step_of(body: str, **weights: Array) -> TrainingStep:
    """The traced step; all weights, whose names have one letter, train, scalars included."""
    model = model_of(body, **weights)
    return trace(read_model(model, trainable=["?"]), seed="loss_scale")


def work(kind: str = "Add", *, flops: int = 0, moved_bytes: int = 0, dtype: str = "float32") -> Work:
    return Work("node", "node", kind, dtype, flops, moved_bytes)


def roofline_ns(flops: int, moved_bytes: int, *, rate: float = 1e10) -> float:
    computing = flops / (COMPUTE_EFFICIENCY * rate)
    return 1e9 * (max(computing, moved_bytes / (BANDWIDTH_EFFICIENCY * 1e9)) + 1e-6)


@pytest.mark.parametrize("flops, moved_bytes", [(10**9, 10**3), (10**3, 10**9)])
def test_the_duration_is_the_longer_of_computing_and_transfer(flops: int, moved_bytes: int):
    found = ROOFLINE.duration_ns(work(flops=flops, moved_bytes=moved_bytes))
    assert found == pytest.approx(roofline_ns(flops, moved_bytes), abs=1)


def test_the_element_type_determines_the_rate():
    def duration(dtype: str) -> int:
        return ROOFLINE.duration_ns(work(flops=10**9, moved_bytes=1, dtype=dtype))

    assert duration("float16") == pytest.approx(roofline_ns(10**9, 1, rate=2e10), abs=1)
    assert duration("int64") == duration("float32") > duration("float16")
    assert ROOFLINE.duration_ns(work("Reshape")) == 0, "it moves no data"


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_rates_and_a_source(name: str):
    found = device(name)
    assert found.source
    assert 0 < found.flops_per_second["float64"] < found.flops_per_second["float32"]
    assert found.duration_ns(work(flops=10**9, moved_bytes=10**6)) > 1e9 * found.launch_seconds


@pytest.mark.parametrize("name", ["rtx4090", "RTX-4090", "NVIDIA GeForce RTX 4090"])
def test_a_device_has_several_names(name: str):
    assert device(name) is DEVICES["rtx4090"]


@pytest.mark.parametrize("name, hint", [("h1000", "did you mean 'h100'"), ("abacus", "known: a10, a100,")])
def test_an_unknown_device_raises_one_line(name: str, hint: str):
    with pytest.raises(DurationError, match=hint) as caught:
        device(name)
    assert "\n" not in str(caught.value)


def test_every_operator_has_a_duration_and_inner_views_have_none():
    step = step_of(
        """(float[4, 3, 8, 8] x) => (float[4, 6] y) <int64[2] flat = {4, 24}> {
            a = Conv <pads = [1, 1, 1, 1], strides = [1, 1]> (x, k)
            b = Relu(a)
            c = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (b)
            d = Reshape(c, flat)
            y = Gemm(d, w)
        }""",
        k=normal(6, 3, 3, 3),
        w=normal(24, 6),
    )
    found = durations_ns(step, ROOFLINE)
    operators = (*step.graph.forward, *(operator for chunk in step.graph.chunks for operator in chunk))
    assert list(found) == [operator.name for operator in operators]
    free = {operator.name for operator in operators if found[operator.name] == 0}
    assert free == {o.name for o in operators if o.is_view and o.outputs[0] not in step.graph.outputs}
    assert len(free) > 1


def test_a_view_that_is_an_output_is_a_copy():
    """If two parameters share one gradient, the second's is a copy of the first's."""
    step = step_of("(float[4, 6] x) => (float[4, 6] y) { a = Add(x, b) y = Add(a, c) }", b=normal(4, 6), c=normal(4, 6))
    outputs = set(step.graph.outputs)
    copies = [
        found
        for found, operator in zip(backward_works(step), (o for chunk in step.graph.chunks for o in chunk), strict=True)
        if operator.is_view and operator.outputs[0] in outputs
    ]
    assert [found.moved_bytes for found in copies] == [2 * 4 * 6 * 4]


@pytest.mark.parametrize(
    "body, moved",
    [
        ("y = Add(x, x)", 2 * 400),
        ("y = Mul(x, w)", 3 * 400),
        ("y = Gather(x, rows)", 2 * 2 * 40 + 2 * 8),
        ("y = Slice(x, one, three)", 2 * 2 * 40 + 2 * 8),
        ("y = Concat <axis = 0> (x, w)", 2 * 800),
    ],
)
def test_moved_bytes_are_those_read_and_written(body: str, moved: int):
    """x and w: [10, 10] in float32. An operator that selects rows reads no others."""
    step = step_of(
        f"""(float[10, 10] x) => (float[p, q] z)
        <int64[2] rows = {{3, 3}}, int64[1] one = {{1}}, int64[1] three = {{3}}>
        {{ {body} z = Mul(y, v) }}""",
        w=normal(10, 10),
        v=normal(1, 10),
    )
    (found,) = (found for found in forward_works(step) if step.nodes[found.name].outputs == ("y",))
    assert found.moved_bytes == moved


PRODUCT_CASES = {
    "MatMul, batched": ("y = MatMul(x, w)", (2, 5, 7), (2, 7, 3)),
    "Gemm, transposed": ("y = Gemm <transA = 1, transB = 1> (x, w)", (7, 5), (3, 7)),
    "Conv": ("y = Conv <pads = [1, 1, 1, 1]> (x, w)", (2, 8, 9, 9), (4, 8, 3, 3)),
    "Conv, strided": ("y = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w)", (2, 8, 9, 9), (4, 8, 3, 3)),
    "Conv, stem": ("y = Conv <strides = [2, 2], pads = [2, 2, 2, 2]> (x, w)", (2, 3, 9, 9), (4, 3, 5, 5)),
    "Conv, grouped": ("y = Conv <group = 2> (x, w)", (2, 8, 9, 9), (4, 4, 3, 3)),
    "ConvTranspose": ("y = ConvTranspose <strides = [2, 2]> (x, w)", (2, 8, 5, 5), (8, 4, 2, 2)),
    "ConvTranspose, grouped": ("y = ConvTranspose <group = 2> (x, w)", (2, 8, 5, 5), (8, 2, 3, 3)),
}


@pytest.mark.parametrize("case", PRODUCT_CASES)
def test_each_gradient_of_a_product_has_as_many_operations_as_the_product(case: str):
    """In every form: one product, one for each offset of a kernel, or operands exchanged."""
    body, shape, weight = PRODUCT_CASES[case]
    sizes, outputs = ", ".join(map(str, shape)), ", ".join("pqrs"[: len(shape)])
    step = step_of(
        f"(float[{sizes}] a) => (float[{outputs}] y) {{ x = Mul(a, s) {body} }}",
        s=normal(*(1 for _ in shape)),
        w=normal(*weight),
    )
    (forward,) = (found.flops for found in forward_works(step) if found.kind in PRODUCTS)
    backward = sum(found.flops for found in backward_works(step) if found.kind in PRODUCTS)
    assert backward == 2 * forward > 0


def test_half_precision_moves_half_the_bytes():
    body = "(float[8, 8] x) => (float[8, 8] y) { y = MatMul(x, w) }"
    whole = step_of(body, w=normal(8, 8))
    step = step_of(body.replace("float[", "float16["), w=normal(8, 8).astype(np.float16))

    def product(of: TrainingStep) -> Work:
        (found,) = (found for found in forward_works(of) if found.kind == "MatMul")
        return found

    expected = replace(product(whole), dtype="float16", moved_bytes=product(whole).moved_bytes // 2)
    assert product(step) == expected
