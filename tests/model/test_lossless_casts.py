import itertools

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgc.model.core.ir import Array
from onnxgc.model.core.lossless_casts import keeps_all_values
from tests.model.model_helpers import assert_same_output, model_of, normal, read

TYPES = (
    *(TensorProto.BOOL, TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
    *(TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE),
)


def numbers(dtype: int) -> Array:
    """Extreme values of a type, and values that need all its bits."""
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
    if kind.kind == "b":
        return np.asarray([False, True])
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return np.asarray([limits.min, limits.min + 1, 3, limits.max - 1, limits.max], kind)
    info = ml_dtypes.finfo(kind)
    one = np.asarray(1, kind)
    return np.asarray([info.max, info.min, info.smallest_normal, one + info.eps, 0.5], kind)


def exactly(values: Array) -> list[float]:
    """The values as Python numbers, which compare without rounding."""
    return [int(value) if values.dtype.kind in "biu" else float(value) for value in values]


@pytest.mark.parametrize("source, target", list(itertools.product(TYPES, TYPES)))
def test_keeps_all_values_agrees_with_numpy(source: int, target: int):
    values = numbers(source)
    with np.errstate(all="ignore"):
        cast = values.astype(helper.tensor_dtype_to_np_dtype(target))
    assert keeps_all_values(source, target) == (exactly(values) == exactly(cast))


@pytest.mark.parametrize(
    "chain, kept",
    [
        (["INT64", "FLOAT"], ["FLOAT"]),
        (["INT32", "INT64", "FLOAT"], ["FLOAT"]),
        (["FLOAT16", "FLOAT"], ["FLOAT"]),
        (["FLOAT", "BOOL", "FLOAT"], ["FLOAT"]),
    ],
)
def test_chains_of_a_boolean_become_one_cast(chain: list[str], kept: list[str]):
    assert casts("c = Greater(z, zero)", chain) == kept


@pytest.mark.parametrize("kind", ["INT64", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_only_round_trips_that_round_stay(kind: str):
    assert casts("c = Identity(z)", [kind, "FLOAT"]) == ([] if kind == "DOUBLE" else [kind, "FLOAT"])


def casts(start: str, chain: list[str]) -> list[str]:
    """The types of the remaining casts of a chain; asserts that the output keeps its values."""
    names = ["c", *(f"c{number}" for number in range(len(chain)))]
    steps = [
        f"{names[number + 1]} = Cast<to={TensorProto.DataType.Value(kind)}>({names[number]})"
        for number, kind in enumerate(chain)
    ]
    nodes = f"z = MatMul(x, w)  {start}  {'  '.join(steps)}  y = Mul(z, {names[-1]})"
    body = f"(float[4,6] x) => (float[4,6] y) {{ {nodes} }}"
    source = model_of(body, w=(6, 6), zero=np.zeros(()))
    model = read(source)
    assert_same_output(source, model, {"x": normal(4, 6, seed=1)}, rtol=0, atol=0)
    left = [node for node in model.nodes if node.op == "Cast"]
    return [onnx.TensorProto.DataType.Name(int(node.attribute("to"))) for node in left]
