"""A forward model without a loss, static and flat, for runtimes that differentiate it themselves.

Unlike `onnxgc.model.read` it keeps BatchNormalization and Dropout, which a runtime can switch between
training and evaluation.
"""

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from onnxgc.errors import OnnxgcError
from onnxgc.model.core.draft import Draft, NameSource, without_dead_nodes
from onnxgc.model.core.export_marks import EVALUATED
from onnxgc.model.core.identity_removal import without_identities
from onnxgc.model.core.ir import EMPTY_ATTRIBUTES, Array, Node, Statistic, TensorType, Weight
from onnxgc.model.core.stored_weights import ArrayWeight
from onnxgc.model.files.load import load_proto
from onnxgc.model.opset.convert_opset import in_known_operators
from onnxgc.model.opset.recurrent import with_unrolled_recurrence
from onnxgc.model.read import draft_with_roles
from onnxgc.model.static_shapes.contrib_ops import with_layer_normalization
from onnxgc.model.static_shapes.input_shapes import with_input_shapes
from onnxgc.model.static_shapes.shape_walk import infer_shapes, require_static_shapes
from onnxgc.model.training_mode.explicit_padding import with_explicit_pads
from onnxgc.model.training_mode.training_operators import in_current_form, with_masked_softmax
from onnxgc.model.weight_roles.roles import Role

# Reading for several batches shows which constants depend on the batch. A batch of 1 would show nothing:
# a size of 1 also results from broadcasting.
_BATCHES = (2, 3, 5)


@dataclass(frozen=True, slots=True)
class LinearInBatch:
    """A constant of integers that depend on the batch: `per_sample * batch + offset`."""

    per_sample: Array
    offset: Array


@dataclass(frozen=True, slots=True)
class PerSampleConstant:
    """A constant with one slice for each sample along an axis; its weight contains the first.

    Each slice is the previous one plus the weight `step`, or a copy if that is empty.
    """

    axis: int
    step: str = ""


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """A forward graph that computes the model's own outputs.

    `roles` contains the role of each weight of the file; weights without a role were computed while reading.
    `batched` are the inputs whose first dimension may be any batch, `batch_dependent` the constants that
    depend on it; all other shapes are fixed. `proto` and `folder` are the source file.
    """

    proto: onnx.ModelProto
    folder: str
    opset: int
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight]
    roles: Mapping[str, Role]
    statistics: tuple[Statistic, ...]
    batched: tuple[str, ...] = ()
    batch_dependent: Mapping[str, LinearInBatch | PerSampleConstant] = field(default_factory=lambda: EMPTY_ATTRIBUTES)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name in self.weights if self.roles.get(name) is Role.PARAMETER)


def read_forward(
    source: str | os.PathLike[str] | onnx.ModelProto,
    *,
    known: Container[str],
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
) -> ForwardModel:
    """The model in `known` operators, if ONNX defines the others by these.

    If the first dimension of an input is symbolic and the dependence of all constants on it is recognised,
    the model accepts any batch; otherwise it has the given batch, or 1.

    Raises:
        ModelFileError, ShapeError, NoParametersError, UnsupportedOperatorError: as `read_model`.
    """
    proto, folder = load_proto(source)
    draft, decisions = draft_with_roles(proto, folder, trainable=trainable, freeze=freeze)
    shapes = dict(input_shapes or {})

    def read(given: Mapping[str, tuple[int, ...]]) -> ForwardModel:
        static = _static(draft, given, known, freeze_bn=freeze_bn)
        return ForwardModel(
            proto=proto,
            folder=folder,
            opset=static.opset,
            nodes=static.nodes,
            types=static.types,
            inputs=static.inputs,
            outputs=static.outputs,
            weights=static.weights,
            roles={decision.name: decision.role for decision in decisions if decision.name in static.weights},
            statistics=() if freeze_bn else _statistics(static),
        )

    batched = _batched_inputs(draft, shapes)
    if batched:
        try:
            models = [read(shapes | _of_batch(draft, batched, shapes, batch)) for batch in _BATCHES]
        except OnnxgcError:
            # Some batches may be impossible. If the requested one is, reading for it raises the error.
            models = []
        model = _for_any_batch(models, batched) if models else None
        if model is not None:
            return model
    return read(shapes)


def _static(draft: Draft, shapes: Mapping[str, tuple[int, ...]], known: Container[str], *, freeze_bn: bool) -> Draft:
    draft, file = with_input_shapes(draft, shapes)
    draft = in_current_form(infer_shapes(draft, file))
    require_static_shapes(draft)
    draft = infer_shapes(in_known_operators(draft, known))
    draft = infer_shapes(with_unrolled_recurrence(with_layer_normalization(draft)))
    draft = infer_shapes(with_explicit_pads(with_masked_softmax(without_identities(draft))))
    require_static_shapes(draft)
    if freeze_bn:
        nodes = (
            node.with_changes(attributes={**node.attributes, EVALUATED: 1})
            if node.op == "BatchNormalization" and not node.domain
            else node
            for node in draft.nodes
        )
        draft = draft.with_changes(nodes=tuple(nodes))
    return without_dead_nodes(draft, draft.outputs)


def _statistics(draft: Draft) -> tuple[Statistic, ...]:
    """Running statistics of nodes in training mode."""
    names = (
        name
        for node in draft.nodes
        if node.op == "BatchNormalization" and not node.domain and not node.attribute(EVALUATED)
        for name in node.inputs[3:5]
        if name in draft.weights
    )
    return tuple(Statistic(name, "") for name in dict.fromkeys(names))


def _batched_inputs(draft: Draft, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The inputs whose symbolic first dimension has the name of the first such dimension."""
    symbols = {
        name: dimension.dim_param
        for name in draft.inputs
        for dimension in draft.declared[name].tensor_type.shape.dim[:1]
        if not dimension.HasField("dim_value")
    }
    first = next(iter(symbols.values()), None)
    return tuple(name for name, symbol in symbols.items() if symbol == first)


def _of_batch(
    draft: Draft, inputs: Sequence[str], shapes: Mapping[str, tuple[int, ...]], batch: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs for a batch; other symbolic dimensions have their given size, or 1."""
    draft, _ = with_input_shapes(draft, shapes)
    return {name: (batch, *draft.types[name].shape[1:]) for name in inputs}


def _for_any_batch(models: Sequence[ForwardModel], batched: tuple[str, ...]) -> ForwardModel | None:
    """The model with the constants that depend on the batch; None if other parts of it depend on it too."""
    first = models[0]
    if any(other.nodes != first.nodes or other.weights.keys() != first.weights.keys() for other in models):
        return None
    weights = dict(first.weights)
    names = NameSource(weights)
    dependent: dict[str, LinearInBatch | PerSampleConstant] = {}
    for name in first.weights:
        versions = [model.weights[name] for model in models]
        if all(version is versions[0] for version in versions):
            continue
        values = [np.asarray(version.load()) for version in versions]
        if all(_are_equal(values[0], value) for value in values):
            continue
        if (linear := _linear_in_batch(values)) is not None:
            dependent[name] = linear
            continue
        slices = _slice_steps(values)
        if slices is None:
            return None
        axis, step = slices
        weights[name] = ArrayWeight(np.take(values[0], [0], axis))
        step_name = "" if step is None else names.fresh(f"{name}/step")
        if step is not None:
            weights[step_name] = ArrayWeight(step)
        dependent[name] = PerSampleConstant(axis, step_name)
    return replace(first, weights=weights, batched=batched, batch_dependent=dependent)


def _are_equal(one: Array, other: Array) -> bool:
    # Bytes are compared so that NaN equals itself.
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _linear_in_batch(values: Sequence[Array]) -> LinearInBatch | None:
    """Integers that are linear in the batch."""
    if values[0].dtype.kind != "i" or len({value.shape for value in values}) > 1:
        return None
    steps = (values[1] - values[0]) // (_BATCHES[1] - _BATCHES[0])
    offset = values[0] - steps * _BATCHES[0]
    is_linear = all(np.array_equal(steps * batch + offset, v) for batch, v in zip(_BATCHES, values, strict=True))
    return LinearInBatch(steps, offset) if is_linear else None


def _slice_steps(values: Sequence[Array]) -> tuple[int, Array | None] | None:
    """The axis of slices that are equal in every batch, and the step between two, None if it is zero."""
    for axis in range(values[0].ndim):
        if any(value.shape[axis] != batch for batch, value in zip(_BATCHES, values, strict=True)):
            continue
        longest = np.moveaxis(values[-1], axis, 0)
        if not all(_are_equal(np.moveaxis(v, axis, 0), longest[: v.shape[axis]]) for v in values):
            continue
        if all(_are_equal(part, longest[0]) for part in longest):
            return axis, None
        if longest.dtype.kind == "i" and not np.diff(longest, n=2, axis=0).any():
            return axis, np.take(values[-1], [1], axis) - np.take(values[-1], [0], axis)
    return None
