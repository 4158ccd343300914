"""Chooses the loss, and appends it as standard operators.

The choice precedes opset conversion: the converter would split a trailing Softmax over four dimensions into
several nodes, but the loss absorbs that Softmax.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxgc.errors import LossError, ShapeError
from onnxgc.model.core.draft import Draft, reads_of
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node, TensorType

CROSS_ENTROPY, MSE, L1, BCE, OUTPUT = "cross-entropy", "mse", "l1", "bce", "output"
LOSS_KINDS = (CROSS_ENTROPY, MSE, BCE, L1)
IGNORED_LABEL = -100
"""The mean leaves out samples with this label, as in torch."""
_REARRANGING = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"])
_FEATURES_LAST = frozenset(["MatMul", "Gemm", "Einsum"])


@dataclass(frozen=True, slots=True)
class LossChoice:
    """The loss `kind` of a tensor, from which the model computes its output `output`.

    `class_axis` is the axis of the tensor's classes for cross-entropy.
    """

    kind: str
    output: str
    tensor: str
    class_axis: int = 1


def choose_loss(draft: Draft, requested: str, trained: Collection[str] = ()) -> tuple[Draft, LossChoice]:
    """The draft with a note on the loss, and the loss: a kind, an output of the model, or `auto`.

    `auto` takes a scalar output, else cross-entropy for class scores, else mean squared error. Outputs that
    depend on a `trained` weight precede others.

    Raises:
        LossError: no output fits, or the named output does not exist or is no float scalar.
        ShapeError: the output that the loss needs has no static shape.
    """
    if requested != "auto" and requested not in LOSS_KINDS:
        return draft, _named_output(draft, requested)
    if requested == "auto":
        for output in _computed_outputs(draft, trained):
            kind = draft.type_of(output)
            if kind is not None and kind.is_floating and kind.shape == ():
                choice = LossChoice(OUTPUT, output, output)
                return draft.with_notes(f"loss: the model's own output '{output}'"), choice
    output = _first_floating(draft, trained)
    choice = _automatic(draft, output) if requested == "auto" else _explicit(draft, output, requested)
    return draft.with_notes(_choice_note(draft, choice)), choice


def with_loss(draft: Draft, choice: LossChoice) -> tuple[Draft, dict[str, str]]:
    """The draft with its loss appended, and the names of `loss` and of `labels` or `target`."""
    builder = _LossBuilder(draft.without_stale_types(), choice)
    _BUILDERS[choice.kind](builder)
    return builder.result(), builder.roles


def _named_output(draft: Draft, name: str) -> LossChoice:
    if name not in draft.outputs:
        close = difflib.get_close_matches(name, (*LOSS_KINDS, *draft.outputs), n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        known = ", ".join(f"'{output}'" for output in draft.outputs)
        raise LossError(
            f"--loss '{name}' is neither one of auto, {', '.join(LOSS_KINDS)} nor an output of the "
            f"model{hint}; its outputs are: {known}"
        )
    kind = draft.required_type(name)
    if not kind.is_floating or kind.element_count != 1:
        raise LossError(
            f"--loss '{name}' must be a single floating-point number, but the output has shape "
            f"{list(kind.shape)}{'' if kind.is_floating else ' and is not floating-point'}; "
            f"choose one of {', '.join(LOSS_KINDS)}"
        )
    return LossChoice(OUTPUT, name, name)


def _computed_outputs(draft: Draft, trained: Collection[str]) -> list[str]:
    """Outputs that are neither weights nor inputs; only those that training changes, if there are any."""
    computed = [name for name in draft.outputs if name not in draft.weights and name not in draft.inputs]
    changed = set(trained)
    for node in draft.nodes:
        if not changed.isdisjoint(reads_of(node)):
            changed.update(node.outputs)
    return [name for name in computed if name in changed] or computed


def _first_floating(draft: Draft, trained: Collection[str]) -> str:
    for output in _computed_outputs(draft, trained):
        kind = draft.type_of(output)
        if kind is not None and kind.is_floating:
            return output
    for output in draft.outputs:
        if output in draft.problems:
            raise ShapeError(draft.problems[output])
    names = ", ".join(f"'{output}'" for output in draft.outputs)
    raise LossError(
        f"no output ({names}) is a floating-point tensor that the model computes, so there is no loss; "
        "export the model with the scores or the loss as an output"
    )


def _automatic(draft: Draft, output: str) -> LossChoice:
    before_softmax = _before_softmax(draft, output)
    if before_softmax is not None:
        return before_softmax
    shape = draft.required_type(output).shape
    is_scores = len(shape) >= 2 and shape[1] > 1 and all(size == 1 for size in shape[2:])
    return LossChoice(CROSS_ENTROPY if is_scores else MSE, output, output)


def _explicit(draft: Draft, output: str, kind: str) -> LossChoice:
    if kind == CROSS_ENTROPY:
        before_softmax = _before_softmax(draft, output)
        if before_softmax is not None:
            return before_softmax
        shape = draft.required_type(output).shape
        if len(shape) < 2:
            raise LossError(
                f"--loss cross-entropy needs an output [N, C, ...], but '{output}' has shape {list(shape)}; "
                "choose mse, bce or l1"
            )
        return LossChoice(kind, output, output, _axis_by_producer(draft, output, len(shape)))
    sigmoid = _final_operator(draft, output, ("Sigmoid",)) if kind == BCE else None
    return LossChoice(kind, output, output if sigmoid is None else sigmoid.inputs[0])


def _before_softmax(draft: Draft, output: str) -> LossChoice | None:
    """Cross-entropy of the logits of a final Softmax over classes, if the output has one."""
    softmax = _final_operator(draft, output, ("Softmax", "LogSoftmax"))
    axis = None if softmax is None else _class_axis(draft, softmax)
    if softmax is None or axis is None:
        return None
    return LossChoice(CROSS_ENTROPY, output, softmax.inputs[0], axis)


def _final_operator(draft: Draft, output: str, wanted: tuple[str, ...]) -> Node | None:
    """The last operator before an output that does more than rearrange, if it is one of `wanted`."""
    producers = draft.producers()
    node = producers.get(output)
    while node is not None and not node.domain:
        if node.op in wanted:
            return node
        if node.op not in _REARRANGING:
            return None
        node = producers.get(node.inputs[0])
    return None


def _class_axis(draft: Draft, softmax: Node) -> int | None:
    """The axis that a Softmax sums over; None if it sums over several, or over samples."""
    shape = draft.required_type(softmax.inputs[0]).shape
    rank = len(shape)
    if rank < 2:
        return None
    axis = int(softmax.attribute("axis", -1 if draft.opset >= 13 else 1)) % rank
    if draft.opset < 13:
        # Up to opset 12 Softmax flattens all dimensions from `axis` on.
        wide = [position for position in range(axis, rank) if shape[position] > 1]
        if len(wide) > 1:
            return None
        axis = wide[0] if wide else axis
    return axis if axis > 0 else None


_LOGIT_ADJUSTMENTS = ("Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub", "Tanh", "Where")
"""Scales, biases and caps of logits; they do not move axes."""


def _axis_by_producer(draft: Draft, output: str, rank: int) -> int:
    """The axis of the classes: the last after a matrix product (language models), else the second."""
    producers = draft.producers()
    node = producers.get(output)
    while node is not None and node.op in _LOGIT_ADJUSTMENTS:
        node = next((producers[name] for name in node.inputs if name in producers), None)
    return rank - 1 if node is not None and node.op in _FEATURES_LAST else 1


def _choice_note(draft: Draft, choice: LossChoice) -> str:
    shape = list(draft.required_type(choice.tensor).shape)
    is_inner = choice.tensor != choice.output
    source = f", computed from '{choice.tensor}' before the final activation" if is_inner else ""
    axis = f", classes on axis {choice.class_axis}" if choice.kind == CROSS_ENTROPY and len(shape) > 2 else ""
    others = [output for output in draft.outputs if output != choice.output]
    listed = ", ".join(repr(name) for name in others)
    unused = f"; the loss does not use the other outputs ({listed})" if others else ""
    return f"loss: {choice.kind} of output '{choice.output}' {shape}{source}{axis}{unused}"


class _LossBuilder(GraphWriter):
    """Appends the operators, constants and inputs of a loss.

    Attributes:
        type: the type of the tensor on which the loss is computed.
        roles: the names of `loss` and of `labels` or `target`.
    """

    def __init__(self, draft: Draft, choice: LossChoice) -> None:
        super().__init__(draft)
        self.nodes += draft.nodes
        self.choice = choice
        self.type = draft.required_type(choice.tensor)
        self.roles: dict[str, str] = {}

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = self.names.fresh(output or f"loss_{op.lower()}")
        name = self.node_names.fresh(f"{op}_{output}")
        self.nodes.append(Node(op, inputs, (output,), attributes, name=name, origin="loss", rule=op))
        return output

    def target(self, role: str, kind: TensorType) -> str:
        name = self.roles[role] = self.names.fresh(role)
        self.draft = self.draft.with_changes(inputs=(*self.draft.inputs, name), types={**self.draft.types, name: kind})
        return name

    def in_float32(self, name: str) -> str:
        """The tensor in float32 or float64, for the mean over a batch."""
        if self.type.dtype in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            return name
        return self.add("Cast", name, output=f"{name}_float32", to=onnx.TensorProto.FLOAT)

    def finish(self, op: str, *inputs: str, **attributes: Any) -> None:
        """Adds the last operator, whose float32 scalar is the loss."""
        if self.type.dtype != onnx.TensorProto.DOUBLE:
            self.roles["loss"] = self.add(op, *inputs, output="loss", **attributes)
            return
        wide = self.add(op, *inputs, **attributes)
        self.roles["loss"] = self.add("Cast", wide, output="loss", to=onnx.TensorProto.FLOAT)


def _cross_entropy(loss: _LossBuilder) -> None:
    """Mean of `-log_softmax(logits)[label]` over the labels that are not ignored."""
    shape, axis = loss.type.shape, loss.choice.class_axis
    logits = loss.in_float32(loss.choice.tensor)
    if len(shape) > 2 and all(size == 1 for position, size in enumerate(shape) if position not in (0, axis)):
        shape, axis = (shape[0], shape[axis]), 1
        logits = loss.add("Reshape", logits, loss.int_constant("loss_shape", shape))
    is_double = loss.type.dtype == onnx.TensorProto.DOUBLE
    labels = loss.target("labels", TensorType(onnx.TensorProto.INT64, shape[:axis] + shape[axis + 1 :]))
    axes = loss.int_constant("loss_class_axis", [axis])

    ignored = loss.add("Equal", labels, loss.int_constant("loss_ignored_label", IGNORED_LABEL))
    valid = loss.add("Not", ignored)
    weight = loss.add("Cast", valid, to=onnx.TensorProto.DOUBLE if is_double else onnx.TensorProto.FLOAT)
    # An ignored label is no valid index: class 0 replaces it, with weight 0.
    index = loss.add("Where", ignored, loss.int_constant("loss_class_0", 0), labels)
    column = loss.add("Unsqueeze", index, axes)

    log_probability = loss.add("LogSoftmax", logits, axis=axis)
    picked = loss.add("GatherElements", log_probability, column, axis=axis)
    negative = loss.add("Neg", loss.add("Squeeze", picked, axes))
    total = loss.add("ReduceSum", loss.add("Mul", negative, weight), keepdims=0)
    # At least 1, so that the loss of a batch without labels is 0, not NaN.
    one = np.asarray(1, np.float64 if is_double else np.float32)
    count = loss.add("Max", loss.add("ReduceSum", weight, keepdims=0), loss.constant("loss_one", one))
    loss.finish("Div", total, count)


def _difference(loss: _LossBuilder) -> str:
    target = loss.in_float32(loss.target("target", loss.type))
    return loss.add("Sub", loss.in_float32(loss.choice.tensor), target)


def _mean_squared_error(loss: _LossBuilder) -> None:
    difference = _difference(loss)
    loss.finish("ReduceMean", loss.add("Mul", difference, difference), keepdims=0)


def _mean_absolute_error(loss: _LossBuilder) -> None:
    loss.finish("ReduceMean", loss.add("Abs", _difference(loss)), keepdims=0)


def _binary_cross_entropy(loss: _LossBuilder) -> None:
    """Mean of `softplus(x) - x t`, which is -t log s(x) - (1 - t) log(1 - s(x)) without overflow."""
    logits = loss.in_float32(loss.choice.tensor)
    target = loss.in_float32(loss.target("target", loss.type))
    terms = loss.add("Sub", loss.add("Softplus", logits), loss.add("Mul", logits, target))
    loss.finish("ReduceMean", terms, keepdims=0)


def _model_output(loss: _LossBuilder) -> None:
    """The model's scalar output, as a float32 of rank 0."""
    name, is_float32 = loss.choice.tensor, loss.type.dtype == onnx.TensorProto.FLOAT
    if loss.type.shape != ():
        scalar = loss.int_constant("loss_shape", [])
        name = loss.add("Reshape", name, scalar, output="loss" if is_float32 else "loss_scalar")
    if not is_float32:
        name = loss.add("Cast", name, output="loss", to=onnx.TensorProto.FLOAT)
    loss.roles["loss"] = name


_BUILDERS: Mapping[str, Callable[[_LossBuilder], None]] = {
    CROSS_ENTROPY: _cross_entropy,
    MSE: _mean_squared_error,
    L1: _mean_absolute_error,
    BCE: _binary_cross_entropy,
    OUTPUT: _model_output,
}
