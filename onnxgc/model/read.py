"""From any forward ONNX model to a `TrainableModel`: the passes on one page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence

import onnx

from onnxgc.errors import ModelFileError, NoParametersError, ShapeError
from onnxgc.model.core.draft import Draft, reads_of, without_dead_nodes
from onnxgc.model.core.identity_removal import without_identities
from onnxgc.model.core.ir import Node, TensorType, TrainableModel
from onnxgc.model.files.lift_weights import draft_of
from onnxgc.model.files.load import load_proto
from onnxgc.model.opset.recurrent import with_unrolled_recurrence
from onnxgc.model.opset.target import at_target_opset, check_supported
from onnxgc.model.static_shapes.contrib_ops import with_layer_normalization
from onnxgc.model.static_shapes.control_flow import as_one_graph
from onnxgc.model.static_shapes.shape_walk import check_static, resolved, with_input_shapes
from onnxgc.model.training_mode.counter_based_random import with_counted_draws
from onnxgc.model.training_mode.explicit_padding import with_explicit_pads, with_floor_pooling
from onnxgc.model.training_mode.loss import LossChoice, choose_loss, with_loss
from onnxgc.model.training_mode.mode import (
    in_current_form,
    with_batch_statistics,
    with_dropout_on,
    with_masked_softmax,
    with_own_statistics,
    with_seeded_random,
    with_stopped_gradients,
)
from onnxgc.model.training_mode.reject_quantized import check_not_quantized
from onnxgc.model.training_mode.runtime_safe_forms import without_runtime_faults
from onnxgc.model.weight_roles.classify import ParameterDecision, Role, classify_weights, parameter_notes
from onnxgc.model.weight_roles.tying import twin_notes, untied


def read_model(
    source: str | os.PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    loss: str = "auto",
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    untie: bool = False,
    counted_draws: bool = False,
) -> TrainableModel:
    """The model as a static forward graph in training mode that ends in a scalar loss.

    `input_shapes` replaces the shapes of inputs by name. `loss` is `auto`, `cross-entropy`, `mse`,
    `bce`, `l1` or the name of a scalar output. `trainable` and `freeze` are globs of weight names
    that overrule what is found by use. With `freeze_bn` BatchNormalization keeps the running statistics
    of the file; with `untie` nodes that share a parameter in the same role get one each; with
    `counted_draws` random numbers depend on the number of the run, which is fed. Of weights' contents no
    more is read than tells equal ones.

    Raises:
        ModelFileError: the file is missing, is not ONNX, or is not valid.
        ShapeError: a tensor has no static shape, or a given shape does not fit.
        LossError: the loss does not fit the model's outputs.
        NoParametersError: a glob matches nothing, or no parameter reaches the loss.
    """
    proto, folder = load_proto(source)
    check_is_forward(proto)
    draft, decisions = classified(proto, folder, trainable=trainable, freeze=freeze, untie=untie)
    draft = draft.with_notes(*twin_notes(draft, decisions))
    draft, file = with_input_shapes(draft, input_shapes)
    draft = in_current_form(resolved(draft, file))

    trained = {decision.name for decision in decisions if decision.role is Role.PARAMETER}
    draft, choice = choose_loss(draft, loss, trained)
    if choice.output in draft.problems:
        raise ShapeError(draft.problems[choice.output])
    draft = _ending_in(draft, choice)
    check_static(draft)

    draft = resolved(at_target_opset(draft))
    draft = resolved(with_unrolled_recurrence(with_layer_normalization(draft)))
    draft = without_identities(with_dropout_on(draft))
    draft, draw = with_counted_draws(draft) if counted_draws else (draft, "")
    draft = with_masked_softmax(with_seeded_random(draft))
    draft, statistics = with_batch_statistics(with_stopped_gradients(draft), freeze_bn=freeze_bn)
    draft, roles = with_loss(draft, choice)
    draft = with_floor_pooling(resolved(with_explicit_pads(draft)))
    draft = resolved(without_runtime_faults(draft))
    check_static(draft)

    draft = without_dead_nodes(draft, [roles["loss"], *(statistic.updated for statistic in statistics)])
    parameters = _parameters(draft, decisions, roles["loss"])
    types = _types(draft)
    drawn = {"draw": draw} if draw else {}
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
        loss_kind=choice.kind,
        notes=(
            *draft.notes,
            *parameter_notes(d for d in decisions if d.name in parameters or d.role is Role.CONSTANT),
        ),
        domains=draft.other_domains,
        metadata={**draft.metadata, "onnxgc.names": json.dumps(roles | drawn, sort_keys=True)},
        draw=draw,
    )


def check_is_forward(proto: onnx.ModelProto) -> None:
    """Refuses what `optimize` has written.

    Raises:
        ModelFileError: it is a training file.
    """
    if any(entry.key == "onnxgc.schema" for entry in proto.metadata_props):
        raise ModelFileError(
            f"the model '{proto.graph.name}' is a training file already; give the forward model that it was "
            "made of"
        )


def classified(
    proto: onnx.ModelProto,
    folder: str,
    *,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    untie: bool = False,
) -> tuple[Draft, tuple[ParameterDecision, ...]]:
    """A checked model as a draft, still without shapes, and what each of its weights is taken for.

    Raises:
        ModelFileError, NoParametersError, UnsupportedOperatorError: as `read_model`.
    """
    draft = draft_of(proto, folder)
    check_supported(draft)
    draft = with_own_statistics(in_current_form(without_dead_nodes(draft, draft.outputs)))
    decisions = classify_weights(as_one_graph(draft), trainable, freeze)
    if untie:
        draft = untied(draft, decisions)
        decisions = classify_weights(as_one_graph(draft), trainable, freeze)
    check_not_quantized(as_one_graph(draft), (d.name for d in decisions if d.role is Role.PARAMETER))
    return _with_roles(draft, decisions), decisions


def explain_weights(
    source: str | os.PathLike[str] | onnx.ModelProto,
    *,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
) -> tuple[ParameterDecision, ...]:
    """What each weight of a model is taken for, and why; needs no shapes and no loss."""
    draft = draft_of(*load_proto(source))
    draft = with_own_statistics(without_dead_nodes(draft, draft.outputs))
    return classify_weights(as_one_graph(draft), trainable, freeze)


def _with_roles(draft: Draft, decisions: Iterable[ParameterDecision]) -> Draft:
    fixed = (decision.name for decision in decisions if decision.role is not Role.CONSTANT)
    return draft.with_changes(fixed=frozenset(fixed))


def _ending_in(draft: Draft, choice: LossChoice) -> Draft:
    """The draft up to the tensor that the loss is taken of, with a note of what else went."""
    outputs = tuple(choice.of if name == choice.output else name for name in draft.outputs)
    kept = without_dead_nodes(draft, [choice.of])
    computed = {output for node in kept.nodes for output in node.outputs}
    dropped = [name for name in outputs if name not in computed]
    read = {name for node in kept.nodes for name in reads_of(node)} | {choice.of}
    unread = [name for name in draft.inputs if name not in read]
    notes = [f"output '{name}' does not reach the loss and is left out" for name in dropped]
    notes += [f"input '{name}' does not reach the loss and is left out" for name in unread]
    return kept.with_changes(
        outputs=tuple(dict.fromkeys(name for name in outputs if name in computed)),
        inputs=tuple(name for name in draft.inputs if name in read),
    ).with_notes(*notes)


def _parameters(draft: Draft, decisions: Sequence[ParameterDecision], loss: str) -> tuple[str, ...]:
    """The parameters that the loss depends on, in the order of the file."""
    reaching = without_dead_nodes(draft, [loss]).weights
    found = tuple(d.name for d in decisions if d.role is Role.PARAMETER and d.name in reaching)
    if found:
        return found
    frozen = sum(1 for decision in decisions if decision.role is Role.FROZEN)
    reason = (
        f"all {frozen} are frozen; pass a narrower --freeze"
        if frozen
        else ("the model has no weight that looks like one; pass --trainable GLOB")
    )
    raise NoParametersError(f"no trainable parameter reaches the loss '{loss}': {reason}")


def _types(draft: Draft) -> dict[str, TensorType]:
    """The types of inputs, of weights and of what the nodes compute."""
    computed = [output for node in draft.nodes for output in _named(node)]
    types = {name: draft.types[name] for name in (*draft.inputs, *computed)}
    return types | {name: weight.type for name, weight in draft.weights.items()}


def _named(node: Node) -> tuple[str, ...]:
    return tuple(filter(None, node.outputs))
