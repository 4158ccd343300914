import pytest
from onnx import TensorProto

from onnxgc.model.core.ir import Node, TensorType
from onnxgc.runtime.cuda_kernels import left_to_the_cpu

FLOAT = TensorType(TensorProto.FLOAT, (2, 3))


@pytest.mark.parametrize(
    "op, opset, dtype, runs_on_cuda",
    [
        ("Relu", 18, TensorProto.FLOAT, True),
        ("Tan", 18, TensorProto.FLOAT, False),
        # Registered for Flatten 13 to 20, and Flatten changed at 21, 23 and 24.
        ("Flatten", 18, TensorProto.FLOAT, True),
        ("Elu", 21, TensorProto.FLOAT, True),
        ("Elu", 22, TensorProto.FLOAT, False),
        ("HardSigmoid", 18, TensorProto.FLOAT, True),
        ("HardSigmoid", 18, TensorProto.BFLOAT16, False),
    ],
)
def test_nodes_without_a_kernel_are_counted(op: str, opset: int, dtype: int, runs_on_cuda: bool) -> None:
    kind = TensorType(dtype, (2, 3))
    found = left_to_the_cpu([Node(op, ("x",), ("y",))], {"x": kind, "y": kind}, opset)
    assert found == ({} if runs_on_cuda else {op: 1})


def test_the_type_is_not_that_of_a_condition() -> None:
    types = {"c": TensorType(TensorProto.BOOL, (2, 3)), "x": FLOAT, "y": FLOAT}
    assert left_to_the_cpu([Node("Where", ("c", "x", "x"), ("y",))], types, 18) == {}
