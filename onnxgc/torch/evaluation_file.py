"""The file that a model came from, with the weights of a module."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import torch
from onnx import helper

from onnxgc.model.core.ir import Array
from onnxgc.model.files.evaluation_file import Deployment
from onnxgc.model.read_forward import ForwardModel
from onnxgc.torch.torch_calls import DTYPES


def deployment_of(model: ForwardModel, held: Mapping[str, int]) -> Deployment:
    """What was read, without the weights that a module holds; these with their element types in the file."""
    return Deployment(model.proto, model.folder, model.nodes, model.roles, held)


def filled(deployment: Deployment, values: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """The file with these values.

    Raises:
        UnsupportedOperatorError: a weight lies inside of control flow.
    """

    def value_of(name: str, dtype: int) -> Array:
        value = values[name]
        contents = value.detach().to("cpu", DTYPES[dtype]).contiguous().reshape(-1).view(torch.uint8)
        found: Array = contents.numpy().view(helper.tensor_dtype_to_np_dtype(dtype)).reshape(value.shape)
        return found

    return deployment.filled(value_of)
