"""The formulas of losses, appended to a model as standard operators."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from onnxgc.errors import LossError
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.training_mode.loss import (
    BCE,
    COSINE,
    CROSS_ENTROPY,
    FOCAL,
    HUBER,
    L1,
    MSE,
    OUTPUT,
    SMOOTH_L1,
    LossChoice,
)


def with_loss(draft: Draft, choice: LossChoice) -> tuple[Draft, dict[str, str]]:
    """The draft with its loss appended, and the names of `loss` and of `labels` or `target`."""
    builder = _LossBuilder(draft.without_stale_types(), choice)
    _BUILDERS[choice.kind](builder)
    return builder.result(), builder.roles


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

    def number(self, value: float) -> str:
        is_double = self.type.dtype == onnx.TensorProto.DOUBLE
        return self.constant("loss_number", np.asarray(value, np.float64 if is_double else np.float32))

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
    dtype = np.float64 if is_double else np.float32
    labels = loss.target("labels", TensorType(onnx.TensorProto.INT64, shape[:axis] + shape[axis + 1 :]))
    axes = loss.int_constant("loss_class_axis", [axis])

    ignored = loss.add("Equal", labels, loss.int_constant("loss_ignored_label", loss.choice.setting("ignored")))
    valid = loss.add("Not", ignored)
    weight = loss.add("Cast", valid, to=onnx.TensorProto.DOUBLE if is_double else onnx.TensorProto.FLOAT)
    # An ignored label is no valid index: class 0 replaces it, with weight 0.
    index = loss.add("Where", ignored, loss.int_constant("loss_class_0", 0), labels)
    column = loss.add("Unsqueeze", index, axes)
    by_class = _class_weights(loss, shape, axis, dtype)
    if by_class:
        flat = loss.add("Reshape", by_class, loss.int_constant("loss_classes", [shape[axis]]))
        weight = loss.add("Mul", weight, loss.add("Gather", flat, index))

    log_probability = loss.add("LogSoftmax", logits, axis=axis)
    picked = loss.add("GatherElements", log_probability, column, axis=axis)
    negative = loss.add("Neg", loss.add("Squeeze", picked, axes))
    total = loss.add("ReduceSum", loss.add("Mul", negative, weight), keepdims=0)
    smoothing = loss.choice.setting("smoothing")
    if smoothing:
        each = loss.add("Mul", log_probability, by_class) if by_class else log_probability
        of_all = loss.add("Neg", loss.add("ReduceSum", each, axes, keepdims=0))
        counted = loss.add("Cast", valid, to=onnx.TensorProto.DOUBLE if is_double else onnx.TensorProto.FLOAT)
        spread = loss.add("ReduceSum", loss.add("Mul", of_all, counted), keepdims=0)
        share = loss.add("Mul", spread, loss.constant("loss_share", np.asarray(smoothing / shape[axis], dtype)))
        kept = loss.add("Mul", total, loss.constant("loss_kept", np.asarray(1 - smoothing, dtype)))
        total = loss.add("Add", kept, share)
    # The loss of a batch without labels is 0, not NaN.
    least = np.asarray(np.finfo(dtype).tiny if by_class else 1, dtype)
    count = loss.add("Max", loss.add("ReduceSum", weight, keepdims=0), loss.constant("loss_one", least))
    loss.finish("Div", total, count)


def _class_weights(loss: _LossBuilder, shape: tuple[int, ...], axis: int, dtype: Any) -> str:
    """The weights of classes, shaped for the logits; "" if all are equal."""
    weights = loss.choice.setting("weights")
    if not weights:
        return ""
    if len(weights) != shape[axis]:
        raise LossError(f"--loss cross-entropy has {len(weights)} weights, and the output has {shape[axis]} classes")
    extents = [shape[axis] if position == axis else 1 for position in range(len(shape))]
    return loss.constant("loss_class_weights", np.asarray(weights, dtype).reshape(extents))


def _difference(loss: _LossBuilder) -> str:
    target = loss.in_float32(loss.target("target", loss.type))
    return loss.add("Sub", loss.in_float32(loss.choice.tensor), target)


def _mean_squared_error(loss: _LossBuilder) -> None:
    difference = _difference(loss)
    loss.finish("ReduceMean", loss.add("Mul", difference, difference), keepdims=0)


def _mean_absolute_error(loss: _LossBuilder) -> None:
    loss.finish("ReduceMean", loss.add("Abs", _difference(loss)), keepdims=0)


def _quadratic_up_to(loss: _LossBuilder, limit: float, factor: float) -> None:
    """Mean of `factor c (|d| - c / 2)` with `c = min(|d|, limit)`: quadratic in small differences, linear in others."""
    size = loss.add("Abs", _difference(loss))
    capped = loss.add("Min", size, loss.number(limit))
    rest = loss.add("Sub", size, loss.add("Mul", capped, loss.number(0.5)))
    loss.finish("ReduceMean", loss.add("Mul", loss.add("Mul", capped, rest), loss.number(factor)), keepdims=0)


def _huber(loss: _LossBuilder) -> None:
    _quadratic_up_to(loss, loss.choice.setting("delta"), 1.0)


def _smooth_l1(loss: _LossBuilder) -> None:
    beta = loss.choice.setting("beta")
    _quadratic_up_to(loss, beta, 1 / beta)


def _binary_cross_entropy(loss: _LossBuilder) -> None:
    """Mean of `softplus(x) - x t`, which is -t log s(x) - (1 - t) log(1 - s(x)) without overflow.

    A weight w of positives adds `(w - 1) t softplus(-x)`.
    """
    logits = loss.in_float32(loss.choice.tensor)
    target = loss.in_float32(loss.target("target", loss.type))
    terms = _binary_terms(loss, logits, target)
    positive = loss.choice.setting("positive")
    if positive != 1:
        missed = loss.add("Mul", loss.add("Softplus", loss.add("Neg", logits)), target)
        terms = loss.add("Add", terms, loss.add("Mul", missed, loss.number(positive - 1)))
    loss.finish("ReduceMean", terms, keepdims=0)


def _binary_terms(loss: _LossBuilder, logits: str, target: str) -> str:
    return loss.add("Sub", loss.add("Softplus", logits), loss.add("Mul", logits, target))


def _focal(loss: _LossBuilder) -> None:
    """Mean of `a (1 - p)^gamma bce`, with p the probability of the target and a = alpha t + (1 - alpha) (1 - t).

    Source: Lin et al., Focal Loss for Dense Object Detection, 2017; torchvision.ops.sigmoid_focal_loss.
    """
    gamma, alpha = loss.choice.setting("gamma"), loss.choice.setting("alpha")
    logits = loss.in_float32(loss.choice.tensor)
    target = loss.in_float32(loss.target("target", loss.type))
    one = loss.number(1)
    probability, other = loss.add("Sigmoid", logits), loss.add("Sub", one, target)
    missed = loss.add("Mul", loss.add("Sub", one, probability), target)
    wrong = loss.add("Add", missed, loss.add("Mul", probability, other))
    scale = loss.add("Add", loss.number(1 - alpha), loss.add("Mul", target, loss.number(2 * alpha - 1)))
    weight = loss.add("Mul", scale, loss.add("Pow", wrong, loss.number(gamma)))
    loss.finish("ReduceMean", loss.add("Mul", weight, _binary_terms(loss, logits, target)), keepdims=0)


_COSINE_EPSILON = 1e-12
"""PyTorch's `cosine_embedding_loss` adds this to both squared lengths."""


def _cosine(loss: _LossBuilder) -> None:
    """Mean of 1 - cos(x, t) over vectors along the last axis."""
    if not loss.type.shape:
        raise LossError(f"--loss cosine needs vectors, but the output '{loss.choice.output}' is a scalar")
    x = loss.in_float32(loss.choice.tensor)
    target = loss.in_float32(loss.target("target", loss.type))
    last = loss.int_constant("loss_last_axis", [-1])

    def along(one: str, other: str) -> str:
        return loss.add("ReduceSum", loss.add("Mul", one, other), last, keepdims=0)

    lengths = [loss.add("Add", along(one, one), loss.number(_COSINE_EPSILON)) for one in (x, target)]
    cosine = loss.add("Div", along(x, target), loss.add("Sqrt", loss.add("Mul", *lengths)))
    loss.finish("ReduceMean", loss.add("Sub", loss.number(1), cosine), keepdims=0)


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
    HUBER: _huber,
    SMOOTH_L1: _smooth_l1,
    FOCAL: _focal,
    COSINE: _cosine,
    OUTPUT: _model_output,
}
