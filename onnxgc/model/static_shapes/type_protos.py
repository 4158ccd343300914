"""Static types as ONNX's protos, and back."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from onnxgc.model.core.ir import TensorType


def type_proto(kind: TensorType) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind.dtype, kind.shape)


def static_type(proto: onnx.TypeProto | None) -> TensorType | None:
    """The type of a tensor whose sizes are all known; None for any other type."""
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    dimensions = proto.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dimensions):
        return None
    return TensorType(proto.tensor_type.elem_type, tuple(dim.dim_value for dim in dimensions))


def shape_text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
