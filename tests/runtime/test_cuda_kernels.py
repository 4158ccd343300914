"""Which nodes have a CUDA kernel."""

from __future__ import annotations

from onnx import TensorProto

from onnxgc.model.core.ir import Node, TensorType
from onnxgc.runtime.cuda_kernels import left_to_the_cpu

FLOAT = TensorType(TensorProto.FLOAT, (2, 3))


def _left(op: str, opset: int, dtype: int = TensorProto.FLOAT) -> dict[str, int]:
    kind = TensorType(dtype, (2, 3))
    return left_to_the_cpu([Node(op, ("x",), ("y",))], {"x": kind, "y": kind}, opset)


def test_an_operator_with_a_kernel_runs_on_cuda() -> None:
    assert _left("Relu", 18) == {}


def test_an_operator_without_a_kernel_runs_on_the_cpu() -> None:
    assert _left("Tan", 18) == {"Tan": 1}


def test_an_open_range_ends_where_the_operator_changes() -> None:
    # Registered for Flatten 13 to 20, and Flatten changed at 21, 23 and 24.
    assert _left("Flatten", 18) == {}
    assert _left("Elu", 21) == {}
    assert _left("Elu", 22) == {"Elu": 1}


def test_the_type_decides() -> None:
    assert _left("HardSigmoid", 18) == {}
    assert _left("HardSigmoid", 18, TensorProto.BFLOAT16) == {"HardSigmoid": 1}


def test_the_type_is_not_that_of_a_condition() -> None:
    types = {"c": TensorType(TensorProto.BOOL, (2, 3)), "x": FLOAT, "y": FLOAT}
    assert left_to_the_cpu([Node("Where", ("c", "x", "x"), ("y",))], types, 18) == {}
