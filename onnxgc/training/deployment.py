"""Trained weights written back into the file of a forward model."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper
from safetensors import SafetensorError

from onnxgc.emission.atomic_files import check_model_writable, data_file, write_model
from onnxgc.emission.contract import contract_in
from onnxgc.emission.state_file import one_line, read_arrays
from onnxgc.errors import OutputFileError, TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.model.files.evaluation_file import EvaluationFile
from onnxgc.model.files.load import load_proto, model_files, source_of
from onnxgc.model.read import draft_with_roles
from onnxgc.model.weight_roles.roles import Role

Model = str | os.PathLike[str] | onnx.ModelProto


def export_state(
    model: Any, state: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> onnx.ModelProto:
    """The forward model with the weights of a state, for deployment; written if `output` is given.

    `state` is a state file of `optimize --state inputs`, as any program left it, or the state of a run.

    Raises:
        OutputFileError: the file cannot be written, or belongs to the model.
        TrainingError: the state cannot be read, or belongs to another model.
    """
    source = source_of(model)
    if output is not None:
        check_model_writable(output)
        check_apart(source, output)
    weights = _weights_of(state)
    proto = deployed(source, weights, {}, where=f"the state '{os.fspath(state)}'")
    if output is not None:
        write_model(proto, output, external_data=has_external_data(source))
    return proto


def _weights_of(state: str | os.PathLike[str]) -> dict[str, Array]:
    """The parameters and running statistics in a state."""
    name = os.fspath(state)
    try:
        arrays, metadata = read_arrays(name)
        inputs = contract_in(metadata)["inputs"]
        roles = {key: str(about["role"]) for key, about in inputs.items()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(
            f"'{name}' is not a state with a contract: {one_line(error)}; give a state file of `optimize --state "
            "inputs`, or the state of a run without accumulation"
        ) from error
    wanted = [key for key, role in roles.items() if role in ("parameter", "statistic")]
    if not wanted:
        raise TrainingError(f"the contract of the state '{name}' names no parameter; give a complete state file")
    for key in wanted:
        if key not in arrays:
            raise TrainingError(f"the state '{name}' lacks '{key}', which its contract names; write it completely")
        if not np.isfinite(arrays[key]).all():
            raise TrainingError(f"'{key}' is not finite in the state '{name}'; give an earlier state")
    return {key: arrays[key] for key in wanted}


def deployed(
    model: Model,
    trained: Mapping[str, Array],
    drawn: Mapping[str, Array],
    *,
    trainable: tuple[str, ...] = (),
    freeze: tuple[str, ...] = (),
    where: str = "the training file",
) -> onnx.ModelProto:
    """The model's file with `trained` weights; names, opset and metadata are unchanged.

    `drawn` are values of weights that the file does not store. Messages call the source of weights `where`.

    Raises:
        TrainingError: the file lacks a weight, or has it in another shape.
    """
    proto, folder = load_proto(model)
    draft, decisions = draft_with_roles(proto, folder, trainable=trainable, freeze=freeze)
    types = {decision.name: draft.weights[decision.name].type for decision in decisions}
    for name, value in trained.items():
        # A file may store a parameter in another floating type than it trains in.
        if name not in types or types[name].shape != value.shape or value.dtype.kind in "iub":
            what = f"no weight '{name}'" if name not in types else f"'{name}' in another shape or type"
            raise TrainingError(f"the model has {what}; give the model from which {where} was created")
    stored = {
        decision.name: types[decision.name].dtype
        for decision in decisions
        if decision.name in trained or (decision.role is not Role.CONSTANT and decision.name in drawn)
    }

    def value_of(name: str, dtype: int) -> Array:
        value = trained[name] if name in trained else drawn[name]
        return np.asarray(value, helper.tensor_dtype_to_np_dtype(dtype))

    return EvaluationFile(proto, folder, draft.nodes, draft.weights, stored).filled(value_of)


def check_apart(model: Model | None, path: str | os.PathLike[str]) -> None:
    """Prevents overwriting the model or a file with its weights.

    Raises:
        OutputFileError: the path, or the external data file next to it, is one of these.
    """
    if model is None or isinstance(model, onnx.ModelProto):
        return
    read = [file for file in model_files(model) if os.path.exists(file)]
    for written in (path, data_file(path)):
        if os.path.exists(written) and any(os.path.samefile(written, file) for file in read):
            raise OutputFileError(f"'{written}' belongs to the source model; give the trained model another name")


def has_external_data(model: Model | None) -> bool:
    """Whether the model's weights are in an external data file."""
    if model is None or isinstance(model, onnx.ModelProto):
        return False
    stored = load_proto(model)[0].graph.initializer
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in stored)
