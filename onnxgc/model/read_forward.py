"""A forward model as it is: static, flat and without a loss, for runtimes that differentiate it themselves.

Unlike `onnxgc.model.read` this leaves BatchNormalization and Dropout as they are, so that a runtime can
switch them between training and evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from onnxgc.errors import OnnxgcError
from onnxgc.model.core.draft import Draft, NameSource, without_dead_nodes
from onnxgc.model.core.identity_removal import without_identities
from onnxgc.model.core.ir import EMPTY_ATTRIBUTES, Array, Node, Statistic, TensorType, Weight
from onnxgc.model.core.marks import EVALUATED
from onnxgc.model.core.stored_weights import ArrayWeight
from onnxgc.model.files.load import load_proto
from onnxgc.model.opset.recurrent import with_unrolled_recurrence
from onnxgc.model.opset.target import in_known_operators
from onnxgc.model.read import classified
from onnxgc.model.static_shapes.contrib_ops import with_layer_normalization
from onnxgc.model.static_shapes.shape_walk import check_static, resolved, with_input_shapes
from onnxgc.model.training_mode.explicit_padding import with_explicit_pads
from onnxgc.model.training_mode.mode import in_current_form, with_masked_softmax
from onnxgc.model.weight_roles.classify import ParameterDecision, Role

# Read for several batches, a model shows what of it depends on the batch. One is left out: it is as
# many as nothing at all.
_BATCHES = (2, 3, 5)


@dataclass(frozen=True, slots=True)
class OfBatch:
    """Integers that depend on the batch: `per_sample * batch + offset`."""

    per_sample: Array
    offset: Array


@dataclass(frozen=True, slots=True)
class OfEachSample:
    """A constant with a part for each sample along an axis; its weight holds the first.

    Each part is the one before it plus the weight `step`, or a copy where that is empty.
    """

    axis: int
    step: str = ""


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """A forward graph that computes the model's own outputs.

    `roles` says what each weight of the file is; weights without a role were computed while reading.
    `batched` are the inputs whose first dimension may be any batch, and `growing` says how constants
    follow it; all other shapes are fixed. `proto` and `folder` are what was read.
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
    growing: Mapping[str, OfBatch | OfEachSample] = field(default_factory=lambda: EMPTY_ATTRIBUTES)

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
    """The model in operators that are `known`, wherever ONNX defines the others by these.

    Where the file keeps the first dimension of an input symbolic, the model is read for any batch if all
    that depends on it can be told; else for the batch given, or 1.

    Raises:
        ModelFileError, ShapeError, NoParametersError, UnsupportedOperatorError: as `read_model`.
    """
    proto, folder = load_proto(source)
    draft, decisions = classified(proto, folder, trainable=trainable, freeze=freeze)
    shapes = dict(input_shapes or {})

    def read(given: Mapping[str, tuple[int, ...]]) -> ForwardModel:
        static = _static(draft, given, known, freeze_bn=freeze_bn)
        return _model(static, proto, folder, decisions, () if freeze_bn else _statistics(static))

    batched = _batched_inputs(draft, shapes)
    if batched:
        try:
            models = [read(shapes | _of_batch(draft, batched, shapes, batch)) for batch in _BATCHES]
        except OnnxgcError:
            # Some batches may be impossible; the one that is asked for decides what to tell.
            models = []
        growing = _growing(models) if models else None
        if growing is not None:
            return _for_any_batch(models[0], batched, growing)
    return read(shapes)


def _static(
    draft: Draft, shapes: Mapping[str, tuple[int, ...]], known: Container[str], *, freeze_bn: bool
) -> Draft:
    draft, file = with_input_shapes(draft, shapes)
    draft = in_current_form(resolved(draft, file))
    check_static(draft)
    draft = resolved(in_known_operators(draft, known))
    draft = resolved(with_unrolled_recurrence(with_layer_normalization(draft)))
    draft = resolved(with_explicit_pads(with_masked_softmax(without_identities(draft))))
    check_static(draft)
    if freeze_bn:
        draft = draft.with_changes(nodes=tuple(_evaluated(node) for node in draft.nodes))
    return without_dead_nodes(draft, draft.outputs)


def _evaluated(node: Node) -> Node:
    if node.op != "BatchNormalization" or node.domain:
        return node
    return node.with_changes(attributes={**node.attributes, EVALUATED: 1})


def _statistics(draft: Draft) -> tuple[Statistic, ...]:
    """Running statistics of the nodes that train."""
    found: dict[str, None] = {}
    for node in draft.nodes:
        if node.op == "BatchNormalization" and not node.domain and not node.attribute(EVALUATED):
            found.update(dict.fromkeys(name for name in node.inputs[3:5] if name in draft.weights))
    return tuple(Statistic(name, "") for name in found)


def _model(
    draft: Draft,
    proto: onnx.ModelProto,
    folder: str,
    decisions: Sequence[ParameterDecision],
    statistics: tuple[Statistic, ...],
) -> ForwardModel:
    return ForwardModel(
        proto=proto,
        folder=folder,
        opset=draft.opset,
        nodes=draft.nodes,
        types=dict(draft.types),
        inputs=draft.inputs,
        outputs=draft.outputs,
        weights=draft.weights,
        roles={decision.name: decision.role for decision in decisions if decision.name in draft.weights},
        statistics=statistics,
    )


def _batched_inputs(draft: Draft, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The inputs whose first dimension has the same name as that of the first one with any."""
    dimensions = {
        name: next(iter(draft.declared[name].tensor_type.shape.dim), None)
        for name in draft.inputs
        if draft.declared[name].HasField("tensor_type")
    }
    symbols = {
        name: dimension.dim_param
        for name, dimension in dimensions.items()
        if dimension is not None and not dimension.HasField("dim_value")
    }
    first = next(iter(symbols.values()), None)
    return tuple(name for name, symbol in symbols.items() if symbol == first)


def _of_batch(
    draft: Draft, inputs: Sequence[str], shapes: Mapping[str, tuple[int, ...]], batch: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs for a batch; other symbolic dimensions are as given, or 1."""
    draft, _ = with_input_shapes(draft, shapes)
    return {name: (batch, *draft.types[name].shape[1:]) for name in inputs}


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `OfEachSample` says, before its step is a weight."""

    axis: int
    step: Array | None


def _growing(models: Sequence[ForwardModel]) -> dict[str, OfBatch | _Parts] | None:
    """How the constants of one model follow the batch; None where more than constants does."""
    first = models[0]
    for other in models[1:]:
        if other.nodes != first.nodes or other.weights.keys() != first.weights.keys():
            return None
    found: dict[str, OfBatch | _Parts] = {}
    for name in first.weights:
        weights = [model.weights[name] for model in models]
        if all(weight is weights[0] for weight in weights):
            continue
        values = [np.asarray(weight.load()) for weight in weights]
        if all(_are_equal(values[0], value) for value in values):
            continue
        change = _of_batch_or_none(values) or _of_each_sample_or_none(values)
        if change is None:
            return None
        found[name] = change
    return found


def _are_equal(one: Array, other: Array) -> bool:
    is_like = one.shape == other.shape and one.dtype == other.dtype
    # Compared by their bytes: NaN equals itself here.
    return is_like and one.tobytes() == other.tobytes()


def _of_batch_or_none(values: Sequence[Array]) -> OfBatch | None:
    """Integers that lie on one line over the batches."""
    if values[0].dtype.kind != "i" or len({value.shape for value in values}) > 1:
        return None
    steps = (values[1] - values[0]) // (_BATCHES[1] - _BATCHES[0])
    offset = values[0] - steps * _BATCHES[0]
    lies = all(np.array_equal(steps * batch + offset, v) for batch, v in zip(_BATCHES, values, strict=True))
    return OfBatch(steps, offset) if lies else None


def _of_each_sample_or_none(values: Sequence[Array]) -> _Parts | None:
    """A part for each sample, the same for every batch, that moves by one step from each to the next."""
    for axis in range(values[0].ndim):
        if any(value.shape[axis] != batch for batch, value in zip(_BATCHES, values, strict=True)):
            continue
        longest = np.moveaxis(values[-1], axis, 0)
        if not all(_are_equal(np.moveaxis(v, axis, 0), longest[: v.shape[axis]]) for v in values):
            continue
        if all(_are_equal(part, longest[0]) for part in longest):
            return _Parts(axis, None)
        if longest.dtype.kind == "i" and not np.diff(longest, n=2, axis=0).any():
            return _Parts(axis, np.take(values[-1], [1], axis) - np.take(values[-1], [0], axis))
    return None


def _for_any_batch(
    model: ForwardModel, batched: tuple[str, ...], changes: Mapping[str, OfBatch | _Parts]
) -> ForwardModel:
    weights = dict(model.weights)
    names = NameSource(weights)
    growing: dict[str, OfBatch | OfEachSample] = {}
    for name, change in changes.items():
        if isinstance(change, OfBatch):
            growing[name] = change
            continue
        growing[name] = OfEachSample(change.axis)
        weights[name] = ArrayWeight(np.take(weights[name].load(), [0], axis=change.axis))
        if change.step is not None:
            step = names.fresh(f"{name}/step")
            weights[step] = ArrayWeight(change.step)
            growing[name] = OfEachSample(change.axis, step)
    return replace(model, weights=weights, batched=batched, growing=growing)
