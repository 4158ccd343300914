"""From any forward ONNX model to a `TrainableModel`: all passes on one page."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx

from onnxgc.errors import ModelFileError, NoParametersError, ShapeError
from onnxgc.model.core.draft import Draft, reads_of, without_dead_nodes
from onnxgc.model.core.identity_removal import without_identities
from onnxgc.model.core.ir import Statistic, TensorType, TrainableModel
from onnxgc.model.files.load import Loaded, load_proto
from onnxgc.model.files.loss_model import with_loss_model
from onnxgc.model.files.module_paths import with_modules_of
from onnxgc.model.files.proto_to_draft import draft_of
from onnxgc.model.opset.convert_opset import at_target_opset, check_supported
from onnxgc.model.opset.recurrent import with_unrolled_recurrence
from onnxgc.model.static_shapes.contrib_ops import with_layer_normalization
from onnxgc.model.static_shapes.input_shapes import with_input_shapes
from onnxgc.model.static_shapes.shape_walk import infer_shapes, require_static_shapes
from onnxgc.model.training_mode.batch_statistics import with_batch_statistics, with_separate_statistics
from onnxgc.model.training_mode.counter_based_random import with_counter_based_random
from onnxgc.model.training_mode.explicit_padding import with_explicit_pads, with_floor_pooling
from onnxgc.model.training_mode.loss import LossChoice, choose_loss
from onnxgc.model.training_mode.loss_formulas import with_loss
from onnxgc.model.training_mode.reject_quantized import check_not_quantized
from onnxgc.model.training_mode.runtime_safe_forms import without_runtime_faults
from onnxgc.model.training_mode.training_operators import (
    in_current_form,
    with_dropout_on,
    with_masked_softmax,
    with_seeded_random,
    with_stopped_gradients,
)
from onnxgc.model.weight_roles.classify import classify_weights
from onnxgc.model.weight_roles.flat_bodies import with_flat_bodies
from onnxgc.model.weight_roles.role_notes import parameter_notes
from onnxgc.model.weight_roles.roles import ParameterDecision, Role
from onnxgc.model.weight_roles.tying import duplicate_notes, with_untied_parameters

Pass = Callable[[Draft], Draft]

# Into ONNX's own operators at the target opset.
_STANDARD_OPERATORS: tuple[Pass, ...] = (
    at_target_opset,
    infer_shapes,
    with_layer_normalization,
    with_unrolled_recurrence,
    infer_shapes,
    with_dropout_on,
    without_identities,
)
# Random numbers and gradients as in training.
_TRAINING_MODE: tuple[Pass, ...] = (with_seeded_random, with_masked_softmax, with_stopped_gradients)
# Into forms that runtimes compute correctly.
_RUNTIME_FORMS: tuple[Pass, ...] = (
    with_explicit_pads,
    infer_shapes,
    with_floor_pooling,
    without_runtime_faults,
    infer_shapes,
)


def apply_passes(draft: Draft, passes: Sequence[Pass]) -> Draft:
    for apply in passes:
        draft = apply(draft)
    return draft


def read_model(
    source: str | os.PathLike[str] | onnx.ModelProto | Loaded,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    loss: str = "auto",
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    untie: bool = False,
    counted_draws: bool = False,
    provider: str = "cpu",
    loss_model: onnx.ModelProto | None = None,
    given: tuple[Draft, tuple[ParameterDecision, ...]] | None = None,
) -> TrainableModel:
    """The model as a static forward graph in training mode that ends in a scalar loss.

    `input_shapes` replaces the shapes of inputs by name. `loss` is `auto`, a kind with or
    without settings, or the name of a scalar output. `trainable` and `freeze` are globs of weight names
    that override inferred roles. With `freeze_bn` BatchNormalization keeps the running statistics
    of the file; with `untie` nodes that share a parameter in the same role get one each; with
    `counted_draws` random numbers depend on the number of the run, an input. `provider` is the execution
    provider, `cpu` or `cuda`, for which forms of gradients and statistics are chosen. `loss_model` computes
    the loss from the model's outputs, in place of `loss`. `given` is the result of `draft_with_roles` for
    the model, if known. Weights' contents are read only as far as detecting
    equal weights needs.

    Raises:
        ModelFileError: the file is missing, is not ONNX, or is not valid.
        ShapeError: a tensor has no static shape, or a given shape does not fit.
        LossError: the loss does not fit the model's outputs.
        NoParametersError: a glob matches nothing, or no parameter reaches the loss.
        UnsupportedOperatorError: an operator has no form that can be trained.
    """
    proto, folder = load_proto(source)
    check_is_forward(proto)
    if loss_model is not None:
        proto, loss = with_loss_model(proto, loss_model)
    if given is None:
        given = draft_with_roles(proto, folder, trainable=trainable, freeze=freeze, untie=untie)
    source_draft, decisions = given
    draft = source_draft.with_notes(*duplicate_notes(source_draft, decisions))
    draft, file = with_input_shapes(draft, input_shapes)
    draft, choice = _with_chosen_loss(in_current_form(infer_shapes(draft, file)), loss, decisions)
    draft = apply_passes(draft, _STANDARD_OPERATORS)
    draft, draw = with_counter_based_random(draft) if counted_draws else (draft, "")
    draft = apply_passes(draft, _TRAINING_MODE)
    draft, statistics = with_batch_statistics(draft, freeze_bn=freeze_bn, provider=provider)
    draft, roles = with_loss(draft, choice)
    draft = apply_passes(draft, _RUNTIME_FORMS)
    require_static_shapes(draft)
    draft = with_modules_of(draft, source_draft)
    return replace(_trainable_model(draft, decisions, roles, statistics, choice.kind, draw), provider=provider)


def _with_chosen_loss(draft: Draft, loss: str, decisions: Sequence[ParameterDecision]) -> tuple[Draft, LossChoice]:
    """The draft up to the tensor on which the loss is computed, static, and the choice of loss."""
    trained = {decision.name for decision in decisions if decision.role is Role.PARAMETER}
    draft, choice = choose_loss(draft, loss, trained)
    if choice.output in draft.problems:
        raise ShapeError(draft.problems[choice.output])
    draft = _up_to_loss(draft, choice)
    require_static_shapes(draft)
    return draft, choice


def _trainable_model(
    draft: Draft,
    decisions: Sequence[ParameterDecision],
    roles: Mapping[str, str],
    statistics: tuple[Statistic, ...],
    loss_kind: str,
    draw: str,
) -> TrainableModel:
    draft = without_dead_nodes(draft, [roles["loss"], *(statistic.updated for statistic in statistics)])
    parameters = _parameters(draft, decisions, roles["loss"])
    trained = set(parameters)
    types = _types(draft)
    named_tensors = {**roles, "draw": draw} if draw else roles
    return TrainableModel(
        name=draft.name,
        opset=draft.opset,
        ir_version=draft.ir_version,
        nodes=draft.nodes,
        types=types,
        inputs=tuple(name for name in draft.inputs if name not in {*roles.values(), draw}),
        targets=tuple(name for role, name in roles.items() if role != "loss"),
        outputs=tuple(name for name in draft.outputs if name in types),
        weights=draft.weights,
        parameters=parameters,
        statistics=statistics,
        loss=roles["loss"],
        loss_kind=loss_kind,
        notes=(*draft.notes, *parameter_notes(d for d in decisions if d.name in trained or d.role is Role.CONSTANT)),
        domains=draft.other_domains,
        metadata={**draft.metadata, "onnxgc.names": json.dumps(named_tensors, sort_keys=True)},
        draw=draw,
    )


def is_written_by_optimize(proto: onnx.ModelProto) -> bool:
    return any(entry.key == "onnxgc.schema" for entry in proto.metadata_props)


def check_is_forward(proto: onnx.ModelProto) -> None:
    """Refuses training files.

    Raises:
        ModelFileError: `proto` is a training file.
    """
    if is_written_by_optimize(proto):
        raise ModelFileError(
            f"the model '{proto.graph.name}' is already a training file; give the forward model from which it was made"
        )


def draft_with_roles(
    proto: onnx.ModelProto,
    folder: str,
    *,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    untie: bool = False,
) -> tuple[Draft, tuple[ParameterDecision, ...]]:
    """A checked model as a draft without static shapes, and the role of each weight.

    Raises:
        ModelFileError, NoParametersError, UnsupportedOperatorError: as `read_model`.
    """
    draft = draft_of(proto, folder)
    check_supported(draft)
    draft = with_separate_statistics(in_current_form(without_dead_nodes(draft, draft.outputs)))
    decisions = classify_weights(with_flat_bodies(draft), trainable, freeze)
    if untie:
        draft = with_untied_parameters(draft, decisions)
        decisions = classify_weights(with_flat_bodies(draft), trainable, freeze)
    check_not_quantized(with_flat_bodies(draft), (d.name for d in decisions if d.role is Role.PARAMETER))
    fixed = frozenset(decision.name for decision in decisions if decision.role is not Role.CONSTANT)
    return draft.with_changes(fixed=fixed), decisions


def explain_weights(
    source: str | os.PathLike[str] | onnx.ModelProto | Loaded,
    *,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
) -> tuple[ParameterDecision, ...]:
    """The role of each weight of a model, with the reason; needs no shapes and no loss."""
    draft = draft_of(*load_proto(source))
    draft = with_separate_statistics(without_dead_nodes(draft, draft.outputs))
    return classify_weights(with_flat_bodies(draft), trainable, freeze)


def _up_to_loss(draft: Draft, choice: LossChoice) -> Draft:
    """The draft up to the tensor on which the loss is computed, with notes on omitted inputs and outputs."""
    outputs = dict.fromkeys(choice.tensor if name == choice.output else name for name in draft.outputs)
    kept = without_dead_nodes(draft, [choice.tensor])
    computed = {output for node in kept.nodes for output in node.outputs}
    read = {name for node in kept.nodes for name in reads_of(node)} | {choice.tensor}
    notes = [f"output '{name}' does not reach the loss and is left out" for name in outputs if name not in computed]
    notes += [f"input '{name}' does not reach the loss and is left out" for name in draft.inputs if name not in read]
    return kept.with_changes(
        outputs=tuple(name for name in outputs if name in computed),
        inputs=tuple(name for name in draft.inputs if name in read),
    ).with_notes(*notes)


def _parameters(draft: Draft, decisions: Sequence[ParameterDecision], loss: str) -> tuple[str, ...]:
    """The parameters on which the loss depends, in the order of the file."""
    reaching = without_dead_nodes(draft, [loss]).weights
    parameters = tuple(d.name for d in decisions if d.role is Role.PARAMETER and d.name in reaching)
    if parameters:
        return parameters
    frozen = sum(decision.role is Role.FROZEN for decision in decisions)
    reason = (
        f"all {frozen} are frozen; pass a narrower --freeze"
        if frozen
        else "no weight of the model looks like a parameter; pass --trainable GLOB"
    )
    raise NoParametersError(f"no trainable parameter reaches the loss '{loss}': {reason}")


def _types(draft: Draft) -> dict[str, TensorType]:
    computed = [output for node in draft.nodes for output in node.outputs if output]
    types = {name: draft.types[name] for name in (*draft.inputs, *computed)}
    return types | {name: weight.type for name, weight in draft.weights.items()}
