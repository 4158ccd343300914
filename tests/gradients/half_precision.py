"""Cases of float16 and bfloat16, derived from those of float32."""

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case

# float16 has eleven significant bits and bfloat16 eight; sums and slopes at rounded values lose some of them.
FLOAT16_TOLERANCE = 2e-2
BFLOAT16_TOLERANCE = 1e-1
# Operators in the bodies of cases that choose a type themselves.
_TYPED_OPERATORS = ("Cast<", "CastLike", "RandomUniformLike")


def is_in_one_type(case: Case) -> bool:
    """Whether every floating tensor of a case is float32 without the body naming the type."""
    drawn = all(draw.dtype is np.float32 for draw in case.operands.values())
    return (
        drawn and case.change is None and case.loss == "mse" and not any(name in case.body for name in _TYPED_OPERATORS)
    )


def stored_in_float16(case: Case) -> Case:
    return replace(
        case,
        name=f"{case.name}, float16",
        operands={name: replace(draw, dtype=np.float16) for name, draw in case.operands.items()},
        constants={name: _rounded(value) for name, value in case.constants.items()},
        tolerance=FLOAT16_TOLERANCE,
        output_type=TensorProto.FLOAT16,
    )


def _rounded(value: Array) -> Array:
    return value.astype(np.float16) if value.dtype == np.float32 else value


def computed_in_float16(case: Case) -> Case:
    return replace(
        case, name=f"{case.name}, cast to float16", tolerance=FLOAT16_TOLERANCE, compute_type=TensorProto.FLOAT16
    )


def computed_in_bfloat16(case: Case) -> Case:
    return replace(
        case, name=f"{case.name}, cast to bfloat16", tolerance=BFLOAT16_TOLERANCE, compute_type=TensorProto.BFLOAT16
    )
