"""Chooses what to minimise, and appends it as plain standard operators.

Choosing comes before the opset is raised: the converter would turn a trailing Softmax over four
dimensions into several nodes, and the Softmax is taken into the loss.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from onnxgc.errors import LossError, ShapeError
from onnxgc.model.core.draft import Draft, NameSource, reads_of
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.stored_weights import ArrayWeight

CROSS_ENTROPY, MSE, L1, BCE, OUTPUT = "cross-entropy", "mse", "l1", "bce", "output"
LOSS_KINDS = (CROSS_ENTROPY, MSE, BCE, L1)
# The label that is left out of the mean, as in torch.
IGNORED_LABEL = -100
_REARRANGING = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"])
_FEATURES_LAST = frozenset(["MatMul", "Gemm", "Einsum"])


@dataclass(frozen=True, slots=True)
class LossChoice:
    """What is minimised: `kind` of the tensor `of`, which stands for the model's output `output`.

    `class_axis` is the axis of the classes in `of` for cross-entropy.
    """

    kind: str
    output: str
    of: str
    class_axis: int = 1


def choose_loss(draft: Draft, requested: str, trained: Collection[str] = ()) -> tuple[Draft, LossChoice]:
    """The loss that was asked for, and the draft with a note of what was chosen.

    Outputs that depend on a weight that is `trained` come before others.

    Raises:
        LossError: no output fits, or the named output does not exist or is no float scalar.
        ShapeError: the output that the loss needs has no static shape.
    """
    if requested != "auto" and requested not in LOSS_KINDS:
        return draft, _named_output(draft, requested)
    if requested == "auto":
        for output in _computed_outputs(draft, trained):
            if _is_scalar_float(draft.type_of(output)):
                return draft.with_notes(f"loss: the model's own output '{output}'"), LossChoice(
                    OUTPUT, output, output
                )
    output = _first_floating(draft, trained)
    choice = _automatic(draft, output) if requested == "auto" else _explicit(draft, output, requested)
    return draft.with_notes(_told(draft, choice)), choice


def with_loss(draft: Draft, choice: LossChoice) -> tuple[Draft, dict[str, str]]:
    """The draft with its loss appended, and the names of `loss` and of `labels` or `target`."""
    draft = draft.without_stale_types()
    head = _Head(
        draft, choice, NameSource(draft.tensor_names()), NameSource(node.name for node in draft.nodes)
    )
    _BUILDERS[choice.kind](head)
    added = draft.with_changes(
        nodes=(*draft.nodes, *head.nodes),
        weights={**draft.weights, **head.constants},
        inputs=(*draft.inputs, *head.targets),
        types={**draft.types, **head.targets},
    )
    return added, head.roles


def _named_output(draft: Draft, name: str) -> LossChoice:
    if name not in draft.outputs:
        close = difflib.get_close_matches(name, (*LOSS_KINDS, *draft.outputs), n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        known = ", ".join(f"'{output}'" for output in draft.outputs)
        raise LossError(
            f"--loss '{name}' is neither one of auto, {', '.join(LOSS_KINDS)} nor an output of the "
            f"model{hint}; its outputs are: {known}"
        )
    kind = draft.type_of(name)
    if kind is None:
        raise ShapeError(draft.problems[name])
    if not kind.is_floating or kind.element_count != 1:
        raise LossError(
            f"--loss '{name}' must be a single floating-point number, but the output has shape "
            f"{list(kind.shape)}{'' if kind.is_floating else ' and is not floating-point'}; "
            f"choose one of {', '.join(LOSS_KINDS)}"
        )
    return LossChoice(OUTPUT, name, name)


def _computed_outputs(draft: Draft, trained: Collection[str]) -> list[str]:
    """Outputs that are neither weights nor inputs, and of these those that training changes, if any."""
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
        f"none of the outputs ({names}) is a floating-point tensor that the model computes, so there is "
        "nothing to train on; export the model with the scores or the loss as an output"
    )


def _automatic(draft: Draft, output: str) -> LossChoice:
    softmax = _behind(draft, output, ("Softmax", "LogSoftmax"))
    axis = None if softmax is None else _class_axis(draft, softmax)
    if softmax is not None and axis is not None:
        return LossChoice(CROSS_ENTROPY, output, softmax.inputs[0], axis)
    shape = _shape(draft, output)
    if len(shape) >= 2 and shape[1] > 1 and all(size == 1 for size in shape[2:]):
        return LossChoice(CROSS_ENTROPY, output, output)
    return LossChoice(MSE, output, output)


def _explicit(draft: Draft, output: str, kind: str) -> LossChoice:
    if kind == CROSS_ENTROPY:
        softmax = _behind(draft, output, ("Softmax", "LogSoftmax"))
        axis = None if softmax is None else _class_axis(draft, softmax)
        if softmax is not None and axis is not None:
            return LossChoice(kind, output, softmax.inputs[0], axis)
        shape = _shape(draft, output)
        if len(shape) < 2:
            raise LossError(
                f"--loss cross-entropy needs an output [N, C, ...], but '{output}' has shape {list(shape)}; "
                "choose mse, bce or l1"
            )
        return LossChoice(kind, output, output, _axis_by_producer(draft, output, len(shape)))
    if kind == BCE:
        sigmoid = _behind(draft, output, ("Sigmoid",))
        if sigmoid is not None:
            return LossChoice(kind, output, sigmoid.inputs[0])
    return LossChoice(kind, output, output)


def _behind(draft: Draft, output: str, wanted: tuple[str, ...]) -> Node | None:
    """The operator that an output ends in, before it was only rearranged."""
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
    """The one axis that a Softmax sums over, or None where it sums over several."""
    shape = _shape(draft, softmax.inputs[0])
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


# Scales, biases and caps of logits.
_KEEPING_AXES = ("Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub", "Tanh", "Where")


def _axis_by_producer(draft: Draft, output: str, rank: int) -> int:
    """Where the classes are: last behind a matrix product (language models), else second."""
    producers = draft.producers()
    node = producers.get(output)
    while node is not None and node.op in _KEEPING_AXES:
        node = next((producers[name] for name in node.inputs if name in producers), None)
    return rank - 1 if node is not None and node.op in _FEATURES_LAST else 1


def _told(draft: Draft, choice: LossChoice) -> str:
    shape = list(_shape(draft, choice.of))
    taken = "" if choice.of == choice.output else f", taken before its final activation from '{choice.of}'"
    axis = f", classes on axis {choice.class_axis}" if choice.kind == CROSS_ENTROPY and len(shape) > 2 else ""
    others = [output for output in draft.outputs if output != choice.output]
    among = (
        f"; the other outputs ({', '.join(repr(name) for name in others)}) have no part in it"
        if others
        else ""
    )
    return f"loss: {choice.kind} of output '{choice.output}' {shape}{taken}{axis}{among}"


def _is_scalar_float(kind: TensorType | None) -> bool:
    return kind is not None and kind.is_floating and kind.shape == ()


def _shape(draft: Draft, name: str) -> tuple[int, ...]:
    kind = draft.type_of(name)
    if kind is None:
        raise ShapeError(draft.problems.get(name, f"tensor '{name}' has no static shape"))
    return kind.shape


@dataclass(slots=True)
class _Head:
    """Collects the nodes of a loss."""

    draft: Draft
    choice: LossChoice
    tensors: NameSource
    node_names: NameSource
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, ArrayWeight] = field(default_factory=dict)
    targets: dict[str, TensorType] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)

    @property
    def type(self) -> TensorType:
        kind = self.draft.type_of(self.choice.of)
        if kind is None:
            raise ShapeError(self.draft.problems[self.choice.of])
        return kind

    def add(self, op: str, *inputs: str, named: str = "", **attributes: Any) -> str:
        output = self.tensors.fresh(named or f"loss_{op.lower()}")
        name = self.node_names.fresh(f"{op}_{output}")
        self.nodes.append(Node(op, inputs, (output,), attributes, name=name, origin="loss", rule=op))
        return output

    def constant(self, name: str, value: Array) -> str:
        unique = self.tensors.fresh(name)
        self.constants[unique] = ArrayWeight(value)
        return unique

    def target(self, role: str, kind: TensorType) -> str:
        name = self.tensors.fresh(role)
        self.targets[name] = kind
        self.roles[role] = name
        return name

    def in_float32(self, name: str) -> str:
        """The tensor at float32 or wider, as a mean over a batch needs it."""
        if self.type.dtype in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            return name
        return self.add("Cast", name, named=f"{name}_float32", to=onnx.TensorProto.FLOAT)

    def finish(self, op: str, *inputs: str, **attributes: Any) -> None:
        """Ends in the float32 scalar `loss`."""
        if self.type.dtype != onnx.TensorProto.DOUBLE:
            self.roles["loss"] = self.add(op, *inputs, named="loss", **attributes)
            return
        wide = self.add(op, *inputs, **attributes)
        self.roles["loss"] = self.add("Cast", wide, named="loss", to=onnx.TensorProto.FLOAT)


def _cross_entropy(head: _Head) -> None:
    """Mean over labels that are not ignored of `-log_softmax(logits)[label]`."""
    shape, axis = head.type.shape, head.choice.class_axis
    logits = head.in_float32(head.choice.of)
    if len(shape) > 2 and all(size == 1 for position, size in enumerate(shape) if position not in (0, axis)):
        shape, axis = (shape[0], shape[axis]), 1
        logits = head.add("Reshape", logits, head.constant("loss_shape", np.asarray(shape, np.int64)))
    dtype = np.float64 if head.type.dtype == onnx.TensorProto.DOUBLE else np.float32
    labels = head.target("labels", TensorType(onnx.TensorProto.INT64, shape[:axis] + shape[axis + 1 :]))
    axes = head.constant("loss_class_axis", np.asarray([axis], np.int64))

    ignored = head.add(
        "Equal", labels, head.constant("loss_ignored_label", np.asarray(IGNORED_LABEL, np.int64))
    )
    counted = head.add("Not", ignored)
    weight = head.add("Cast", counted, to=int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))
    # An ignored label is no valid index, so it points at class 0 and its weight of 0 removes it.
    index = head.add("Where", ignored, head.constant("loss_class_0", np.asarray(0, np.int64)), labels)
    column = head.add("Unsqueeze", index, axes)

    log_probability = head.add("LogSoftmax", logits, axis=axis)
    picked = head.add("GatherElements", log_probability, column, axis=axis)
    negative = head.add("Neg", head.add("Squeeze", picked, axes))
    total = head.add("ReduceSum", head.add("Mul", negative, weight), keepdims=0)
    # At least 1, so that a batch without any label has loss 0 and not NaN.
    count = head.add(
        "Max", head.add("ReduceSum", weight, keepdims=0), head.constant("loss_one", np.asarray(1, dtype))
    )
    head.finish("Div", total, count)


def _difference(head: _Head) -> str:
    target = head.in_float32(head.target("target", head.type))
    return head.add("Sub", head.in_float32(head.choice.of), target)


def _mean_squared_error(head: _Head) -> None:
    difference = _difference(head)
    head.finish("ReduceMean", head.add("Mul", difference, difference), keepdims=0)


def _mean_absolute_error(head: _Head) -> None:
    head.finish("ReduceMean", head.add("Abs", _difference(head)), keepdims=0)


def _binary_cross_entropy(head: _Head) -> None:
    """Mean of `softplus(x) - x t`, which is -t log s(x) - (1 - t) log(1 - s(x)) without overflow."""
    logits = head.in_float32(head.choice.of)
    target = head.in_float32(head.target("target", head.type))
    terms = head.add("Sub", head.add("Softplus", logits), head.add("Mul", logits, target))
    head.finish("ReduceMean", terms, keepdims=0)


def _own_output(head: _Head) -> None:
    """The model's own scalar, made a float32 of rank 0 where it is not."""
    name, is_float32 = head.choice.of, head.type.dtype == onnx.TensorProto.FLOAT
    if head.type.shape != ():
        scalar = head.constant("loss_shape", np.zeros((0,), np.int64))
        name = head.add("Reshape", name, scalar, named="loss" if is_float32 else "loss_scalar")
    head.roles["loss"] = (
        name if is_float32 else head.add("Cast", name, named="loss", to=onnx.TensorProto.FLOAT)
    )


_BUILDERS: Mapping[str, Callable[[_Head], None]] = {
    CROSS_ENTROPY: _cross_entropy,
    MSE: _mean_squared_error,
    L1: _mean_absolute_error,
    BCE: _binary_cross_entropy,
    OUTPUT: _own_output,
}
