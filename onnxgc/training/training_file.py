"""Training files without the values of their parameters, so that a session stores these only once."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxgc.emission.plan_files import METADATA_KEY, plan_from_json
from onnxgc.emission.state_file import read_first_values, state_file
from onnxgc.errors import ModelFileError
from onnxgc.model.core.ir import Array, TensorType
from onnxgc.model.core.stored_weights import StoredWeight
from onnxgc.model.files.load import load_proto
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.tracing.gradient_types import type_of_array
from onnxgc.tracing.optimizers import KEEP, LEARNING_RATE, STEP, Accumulation, Optimizer, optimizer_from_json
from onnxgc.training.labels import Labels, axis_of, labels_of

DRAW, LOSS_SCALE = "draw", "loss_scale"


@dataclass(frozen=True, slots=True)
class TrainingFile:
    """One step as a graph whose parameters, states and statistics are inputs without values.

    Attributes:
        fed: the inputs of a batch, in order.
        target: the input that the loss compares with, or "".
        parameters, states, statistics: inputs, mapped to the outputs that replace them.
        scalars: learning_rate, step, keep, draw and loss_scale, mapped to their inputs.
        initial: values of parameters, of statistics and of external weights; states begin as zeros.
        options: the options of reading the model, as JSON.
        held: names of the inputs of a step other than the batch and scalars.
        classes: number of classes of the target along `class_axis` of the scores, or None.
        labels: inputs that contain classes: the target, or inputs of the model.
        with_barriers: makes the same file with barriers, for runtimes that would not keep the order.
    """

    graph: onnx.ModelProto
    types: Mapping[str, TensorType]
    fed: tuple[str, ...]
    target: str
    loss: str
    loss_kind: str
    parameters: Mapping[str, str]
    states: Mapping[str, str]
    states_of: Mapping[str, tuple[str, ...]]
    statistics: Mapping[str, str]
    scalars: Mapping[str, str]
    initial: dict[str, Array]
    optimizer: Optimizer | None
    options: str
    plan: CheckpointPlan
    simulated_peak_bytes: int
    held: tuple[str, ...] = ()
    norm: str = ""
    classes: int | None = None
    class_axis: int = 1
    labels: Mapping[str, Labels] = field(default_factory=dict)
    with_barriers: "Callable[[], TrainingFile] | None" = None

    @property
    def has_barriers(self) -> bool:
        return bool(json.loads(self.options).get("has_barriers", True))

    @property
    def sample_input(self) -> str:
        """An input with samples along its first dimension: the target, or the first such input."""
        first = self.fed[0]
        candidates = (*filter(None, [self.target]), *self.fed)
        return next((name for name in candidates if self.types[name].shape), first)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        shape = self.types[self.sample_input].shape
        return shape[0] if shape else 1

    def counts_samples(self, name: str) -> bool:
        """Whether an input has samples along its first dimension."""
        return self.types[name].shape[:1] == (self.batch,)

    @classmethod
    def read(cls, source: str | os.PathLike[str] | onnx.ModelProto, *, with_values: bool = True) -> "TrainingFile":
        """Reads a training file; a model in memory is modified.

        Without values `initial` is empty.

        Raises:
            ModelFileError: the file is not a training file.
        """
        if isinstance(source, onnx.ModelProto):
            name, proto, folder = source.graph.name, source, ""
        else:
            name, (proto, folder) = os.fspath(source), load_proto(source)
        properties = {entry.key: entry.value for entry in proto.metadata_props}
        try:
            names, options, optimizer, plan, peak, loss_kind = _metadata(properties, name)
        except (KeyError, ValueError, TypeError) as error:
            raise ModelFileError(
                f"'{name}' is not a training file ({error} is missing or wrong in its metadata); "
                "create one with `onnxgc optimize`"
            ) from error
        types = {value.name: _type(value) for value in (*proto.graph.input, *proto.graph.output)}
        parameters, states = names.get("parameters", {}), names.get("states", {})
        trained = {*parameters, *names["gradients"], *names.get("states_of", {})}
        # The runtime does not bind inputs with a value, and the scale of sums changes in each run.
        scale = {names["loss_scale"]} if isinstance(optimizer, Accumulation) else set()
        initial = _without_values(proto, folder, {*trained, *names["statistics"], *scale})
        for key in scale:
            initial.pop(key, None)
        if json.loads(options).get("state") == "inputs":
            held_in_state_file = [*trained, *names["statistics"]]
            initial |= _first_values(source, [name for name in held_in_state_file if name in types], types)
        held = (*initial, *states)
        # The original keeps the memory of removed values.
        graph = onnx.ModelProto()
        graph.CopyFrom(proto)
        scalars = {key: names[key] for key in (LEARNING_RATE, STEP, KEEP, DRAW, LOSS_SCALE) if key in names}
        other = {*trained, *states, *names["statistics"], *scalars.values(), *held}
        other |= {tensor.name for tensor in proto.graph.initializer}
        fed = tuple(value.name for value in proto.graph.input if value.name not in other)
        return cls(
            graph,
            types,
            fed,
            names.get("labels", names.get("target", "")),
            proto.graph.output[0].name,
            loss_kind,
            parameters,
            states,
            {key: tuple(value) for key, value in names.get("states_of", {}).items()},
            names["statistics"],
            scalars,
            initial if with_values else {},
            optimizer,
            options,
            plan,
            peak,
            held,
            names.get("gradient_norm", ""),
            *_classes(proto),
            labels_of(graph.graph, [name for name in fed if _is_whole(types[name])], _shapes(proto)),
        )


def _metadata(
    properties: Mapping[str, str], name: str
) -> tuple[dict[str, Any], str, Optimizer | None, CheckpointPlan, int, str]:
    """Names of inputs and outputs, options, optimizer, plan, simulated peak and kind of loss."""
    options = properties["onnxgc.options"]
    return (
        json.loads(properties["onnxgc.names"]),
        options,
        optimizer_from_json(json.loads(options).get("optimizer")),
        plan_from_json(json.loads(properties[METADATA_KEY]), f"'{name}'"),
        int(properties["onnxgc.simulated_peak_bytes"]),
        properties["onnxgc.loss"],
    )


def is_training_file(proto: onnx.ModelProto) -> bool:
    """Whether a model is a training file."""
    return {"onnxgc.names", METADATA_KEY} <= {entry.key for entry in proto.metadata_props}


def _first_values(
    source: str | os.PathLike[str] | onnx.ModelProto, names: Sequence[str], types: Mapping[str, TensorType]
) -> dict[str, Array]:
    """The values of parameters and statistics from the state file of a training file."""
    if isinstance(source, onnx.ModelProto):
        raise ModelFileError(
            f"the training file '{source.graph.name}' has no first values, which are in its state file; give its path"
        )
    values = read_first_values(source)
    for name in names:
        if name not in values or type_of_array(values[name]) != types[name]:
            raise ModelFileError(
                f"the state file '{state_file(source)}' does not belong to '{os.fspath(source)}': '{name}' is missing "
                "or has another type or shape; write both again with `onnxgc optimize`"
            )
    return {name: values[name] for name in names}


def _type(value: onnx.ValueInfoProto) -> TensorType:
    tensor = value.type.tensor_type
    return TensorType(tensor.elem_type, tuple(dim.dim_value for dim in tensor.shape.dim))


def _is_whole(kind: TensorType) -> bool:
    return np.issubdtype(helper.tensor_dtype_to_np_dtype(kind.dtype), np.integer)


def _shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    return {value.name: _type(value).shape for value in proto.graph.value_info}


def _classes(proto: onnx.ModelProto) -> tuple[int | None, int]:
    """The number and the axis of the classes of a cross-entropy loss, or (None, 1)."""
    shapes = _shapes(proto)
    for node in proto.graph.node:
        notes = {entry.key: entry.value for entry in node.metadata_props}
        if node.op_type == "LogSoftmax" and notes.get("onnxgc.node") == "loss":
            axis, shape = axis_of(node, -1), shapes.get(node.output[0])
            return (None, 1) if shape is None else (shape[axis], axis % len(shape))
    return None, 1


def _without_values(proto: onnx.ModelProto, folder: str, names: set[str]) -> dict[str, Array]:
    """Removes the values of these inputs and of external weights from a model, and returns them."""
    taken: dict[str, Array] = {}
    kept = []
    inputs = {value.name for value in proto.graph.input}
    for tensor in proto.graph.initializer:
        weight = StoredWeight(tensor, folder)
        if tensor.name in names or weight.is_external:
            # A copy, since it is updated in place.
            taken[tensor.name] = np.array(weight.load())
            if tensor.name not in inputs:
                proto.graph.input.append(
                    helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        else:
            kept.append(tensor)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    return taken
