"""Weights of a file: initializers, Constant nodes and ConstantOfShape nodes."""

import errno
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxgc.errors import ModelFileError
from onnxgc.model.core.ir import MAX_RANK, MAX_TENSOR_BYTES, Array, Node, TensorType, Weight

MIN_EXTERNAL_BYTES = 1024
"""Smaller weights stay in the model's file: runtimes need shapes and axes for shape inference."""
_PIECE_BYTES = 1 << 24


class ExportedAs(StrEnum):
    """A weight's role as the exporter states it; NAMED is a parameter or a buffer."""

    UNKNOWN = ""
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    NAMED = "named"


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A tensor of the file; external data is read from `folder` on demand.

    `is_initializer` is False for the value of a Constant node.
    """

    tensor: onnx.TensorProto
    folder: str = ""
    is_initializer: bool = False
    exported_as: ExportedAs = ExportedAs.UNKNOWN

    @property
    def type(self) -> TensorType:
        return TensorType(self.tensor.data_type, tuple(self.tensor.dims))

    @property
    def is_external(self) -> bool:
        return self.tensor.data_location == onnx.TensorProto.EXTERNAL

    @property
    def external_data(self) -> dict[str, str]:
        return {entry.key: entry.value for entry in self.tensor.external_data}

    def load(self) -> Array:
        try:
            return numpy_helper.to_array(self.tensor, self.folder)
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelFileError(
                f"the contents of tensor '{self.tensor.name}' cannot be read: {reason}; "
                "export the model again, with its external data in the same folder"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class FilledWeight:
    """A tensor of one repeated value, without memory until it is loaded."""

    value: float | int | bool
    type: TensorType

    def load(self) -> Array:
        return np.full(self.type.shape, self.value, helper.tensor_dtype_to_np_dtype(self.type.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class ArrayWeight:
    """A tensor computed while reading."""

    array: Array

    @property
    def type(self) -> TensorType:
        return TensorType(helper.np_dtype_to_tensor_dtype(self.array.dtype), self.array.shape)

    def load(self) -> Array:
        return self.array


def is_external(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.is_external


def peek(weight: Weight) -> Array | None:
    """The weight's value, memory-mapped if it is external; None if mapping fails."""
    file = external_file(weight)
    if file is None or not isinstance(weight, StoredWeight):
        return weight.load()
    dtype = helper.tensor_dtype_to_np_dtype(weight.tensor.data_type)
    try:
        offset = int(weight.external_data.get("offset", 0))
        return np.memmap(file, dtype, "r", offset, weight.type.shape)
    except (OSError, ValueError):
        return None


def write_weight(weight: Weight, name: str, target: onnx.TensorProto) -> None:
    """Writes a weight into a tensor of a model, in its stored encoding where possible."""
    if isinstance(weight, StoredWeight) and not weight.is_external:
        target.CopyFrom(weight.tensor)
        target.name = name
    else:
        target.CopyFrom(numpy_helper.from_array(weight.load(), name))


def write_contents(weight: Weight, stream: BinaryIO) -> int:
    """Appends a weight's contents to a file by pieces; holes of external files stay holes. Returns the bytes."""
    size = weight.type.size_bytes
    file = external_file(weight)
    if file is not None and isinstance(weight, StoredWeight):
        with open(file, "rb") as source:
            _copy_range(source.fileno(), int(weight.external_data.get("offset", 0)), size, stream)
    elif isinstance(weight, FilledWeight) and size > _PIECE_BYTES:
        unit = FilledWeight(weight.value, TensorType(weight.type.dtype, (8,))).load().tobytes()
        piece = unit * (_PIECE_BYTES // len(unit))
        for start in range(0, size, len(piece)):
            stream.write(piece[: size - start])
    else:
        stream.write(weight.load().tobytes())
    return size


def _copy_range(source: int, offset: int, size: int, stream: BinaryIO) -> None:
    """Copies a range of a file to the end of another, which may end in a hole."""
    shift, end = stream.tell() - offset, offset + size
    while offset < end:
        try:
            start = min(os.lseek(source, offset, os.SEEK_DATA), end)
            stop = min(os.lseek(source, start, os.SEEK_HOLE), end) if start < end else end
        except (OSError, AttributeError) as error:
            # After the last data; or the system knows no holes.
            start, stop = (end if getattr(error, "errno", 0) == errno.ENXIO else offset), end
        stream.seek(start + shift)
        for at in range(start, stop, _PIECE_BYTES):
            stream.write(os.pread(source, min(_PIECE_BYTES, stop - at), at))
        offset = stop
    stream.flush()
    stream.truncate(end + shift)
    stream.seek(end + shift)


def external_file(weight: Weight) -> str | None:
    """The external file that contains a weight; None for a weight in the model's own file."""
    if not isinstance(weight, StoredWeight) or not weight.is_external:
        return None
    return os.path.join(weight.folder, weight.external_data.get("location", ""))


def initializers(graph: onnx.GraphProto, folder: str) -> dict[str, Weight]:
    """The graph's initializers by name.

    Raises:
        ModelFileError: an initializer is sparse.
    """
    if graph.sparse_initializer:
        raise _sparse(graph.sparse_initializer[0].values.name)
    return {tensor.name: StoredWeight(tensor, folder, is_initializer=True) for tensor in graph.initializer}


def constant_value(node: onnx.NodeProto, folder: str) -> Weight:
    """The value of a Constant node, from any of its attributes.

    Raises:
        ModelFileError: the value is sparse or missing.
    """
    for attribute in node.attribute:
        if attribute.name == "value":
            return StoredWeight(_named(attribute.t, node.output[0]), folder)
        if attribute.name == "sparse_value":
            raise _sparse(node.output[0])
        if attribute.name in _VALUE_DTYPES:
            value = helper.get_attribute_value(attribute)
            return ArrayWeight(np.asarray(value, dtype=_VALUE_DTYPES[attribute.name]))
    raise ModelFileError(f"the Constant node of tensor '{node.output[0]}' has no value; export the model again")


def filled_value(node: Node, weights: Mapping[str, Weight]) -> FilledWeight | None:
    """The value of a ConstantOfShape node; None if its shape is computed or fed."""
    shape = weights.get(node.inputs[0])
    if shape is None or is_external(shape):
        return None
    value: Any = node.attribute("value")
    location = f"node {node.location} of tensor '{node.outputs[0]}'"
    if shape.type.dtype != onnx.TensorProto.INT64 or len(shape.type.shape) != 1 or shape.type.element_count > MAX_RANK:
        raise ModelFileError(f"{location} has no valid shape; export the model again")
    dimensions = tuple(int(size) for size in shape.load())
    array = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    if array.size != 1 or array.dtype.kind in "OUS":
        raise ModelFileError(f"{location} has no number as its value; export the model again")
    kind = TensorType(onnx.TensorProto.FLOAT if value is None else value.data_type, dimensions)
    if any(size < 0 for size in dimensions) or kind.size_bytes > MAX_TENSOR_BYTES:
        raise ModelFileError(
            f"{location} has the shape {list(dimensions)}, which is negative or over {MAX_TENSOR_BYTES} bytes; "
            "export the model again"
        )
    return FilledWeight(array.item(), kind)


_VALUE_DTYPES: Mapping[str, Any] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_string": np.object_,
    "value_strings": np.object_,
}


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    if tensor.name == name:
        return tensor
    named = deepcopy(tensor)
    named.name = name
    return named


def _sparse(name: str) -> ModelFileError:
    return ModelFileError(
        f"tensor '{name}' is stored as a sparse tensor, which is not supported; store it as a dense one"
    )
