"""A model's source file with the weights of a module."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import torch
from onnx import helper

from onnxgc.model.core.ir import Array
from onnxgc.model.files.evaluation_file import EvaluationFile
from onnxgc.model.read_forward import ForwardModel
from onnxgc.torch.function_calls import DTYPES


def evaluation_file_of(model: ForwardModel, stored: Mapping[str, int]) -> EvaluationFile:
    """The source file without the module's weights; `stored` has their element types in the file."""
    return EvaluationFile(model.proto, model.folder, model.nodes, model.roles, stored)


def file_with_weights(file: EvaluationFile, values: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """The file with these values.

    Raises:
        UnsupportedOperatorError: a weight is inside of control flow.
    """

    def value_of(name: str, dtype: int) -> Array:
        value = values[name]
        contents = value.detach().to("cpu", DTYPES[dtype]).contiguous().reshape(-1).view(torch.uint8)
        found: Array = contents.numpy().view(helper.tensor_dtype_to_np_dtype(dtype)).reshape(value.shape)
        return found

    return file.filled(value_of)
