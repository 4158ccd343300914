"""Reference for losses and gradients: an interpreter of ONNX forward graphs with torch autograd.

It shares no code with onnxgc. `reference_step` trains a source model for one step, with parameters from
initializers, Constant or ConstantOfShape nodes, batch statistics in BatchNormalization, and given masks in
Dropout. `reference_outputs` is inference.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
import torch.nn.functional as F  # noqa: N812 - torch's convention
from onnx import helper, numpy_helper
from torch import Tensor

from tests.torch_operators import OPERATORS, Attributes, ints

Array = npt.NDArray[Any]
IGNORED_LABEL = -100
_BATCH_NORM_ROLES = {1: "scale", 2: "bias", 3: "mean", 4: "variance"}


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Results of a training step.

    `gradients` has gradients of all floating weights that the loss depends on. `outputs` are the model's own
    outputs, a trailing Softmax included. `batch_statistics` has the next value of each running statistic,
    with torch's unbiased variance.
    """

    loss: float
    gradients: dict[str, Array]
    outputs: dict[str, Array]
    batch_statistics: dict[str, Array]


def reference_step(
    model: onnx.ModelProto,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    target: Array,
    *,
    loss: str = "cross-entropy",
    dtype: torch.dtype = torch.float64,
    masks: Mapping[str, Array] | None = None,
) -> ReferenceStep:
    """Loss and gradients of one step, computed in `dtype`.

    Args:
        model: a forward graph, as written by an exporter.
        weights: values by tensor name; by default those of the graph.
        inputs: the model's inputs by name.
        target: int64 labels [N] or [N, d...] for cross-entropy (-100 is ignored), else an array
            of the output's shape.
        loss: `cross-entropy`, `mse`, `l1`, `bce`, or the name of a scalar output.
        dtype: the floating type of the computation.
        masks: kept elements (1 or True) of each Dropout, by the name of its output; without a mask, Dropout
            is the identity.
    """
    run = _Interpreter(model, weights, inputs, dtype, training=True, masks=masks or {})
    run.execute()
    value = _loss(run, loss, target)
    differentiable = {name: t for name, t in run.weights.items() if t.requires_grad}
    gradients: Sequence[Tensor | None] = torch.autograd.grad(value, list(differentiable.values()), allow_unused=True)
    return ReferenceStep(
        loss=float(value.detach()),
        gradients={n: g.numpy() for n, g in zip(differentiable, gradients, strict=True) if g is not None},
        outputs=run.outputs(),
        batch_statistics={name: t.numpy() for name, t in run.batch_statistics.items()},
    )


def reference_outputs(
    model: onnx.ModelProto,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    *,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Array]:
    """The model's outputs in inference, with running statistics and without Dropout."""
    run = _Interpreter(model, weights, inputs, dtype, training=False, masks={})
    with torch.no_grad():
        run.execute()
    return run.outputs()


def random_weights(model: onnx.ModelProto, seed: int = 0) -> dict[str, Array]:
    """Values of all floating weights by role: He initialisation, statistics near 0 and 1.

    A value depends only on name, shape, role and `seed`, not on the order in the file.
    """
    roles: dict[str, str] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if node.op_type == "BatchNormalization" and index in _BATCH_NORM_ROLES:
                roles.setdefault(name, _BATCH_NORM_ROLES[index])
            elif node.op_type in ("Conv", "Gemm") and index == 2:
                roles.setdefault(name, "bias")
            elif node.op_type in ("Clip", "Dropout", "Reshape"):
                roles.setdefault(name, "data" if index == 0 else "setting")
    return {
        name: _draw(np.random.default_rng([seed, zlib.crc32(name.encode())]), roles.get(name, ""), shape)
        for name, shape in weight_shapes(model).items()
        if roles.get(name) != "setting"
    }


def _draw(generator: np.random.Generator, role: str, shape: tuple[int, ...]) -> Array:
    unit = generator.random(shape, dtype=np.float32)
    if role in ("bias", "mean"):
        return (unit - 0.5) * np.float32(0.2)
    if role in ("scale", "variance") or len(shape) < 2:
        return unit + np.float32(0.5)
    limit = np.float32(math.sqrt(6 / math.prod(shape[1:])))
    unit -= np.float32(0.5)
    unit *= 2 * limit
    return unit


def weight_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    floating = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer if t.data_type in floating}
    constants = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in constants:
            fill = _attributes(node).get("value")
            if fill is None or fill.data_type in floating:
                shapes[node.output[0]] = tuple(numpy_helper.to_array(constants[node.input[0]]).tolist())
        elif node.op_type == "Constant":
            value = _attributes(node).get("value")
            if value is not None and value.data_type in floating:
                shapes[node.output[0]] = tuple(value.dims)
    return shapes


def with_fed_weights(model: onnx.ModelProto, weights: Mapping[str, Array]) -> onnx.ModelProto:
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    graph = fed.graph
    nodes = [node for node in graph.node if node.output[0] not in weights]
    read = {name for node in nodes for name in node.input}
    initializers = [t for t in graph.initializer if t.name not in weights and t.name in read]
    inputs = [value for value in graph.input if value.name not in weights and value.name in read]
    inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in weights.items()
    ]
    for repeated, kept in ((graph.node, nodes), (graph.initializer, initializers), (graph.input, inputs)):
        del repeated[:]
        repeated.extend(kept)
    return fed


def _loss(run: "_Interpreter", kind: str, target: Array) -> Tensor:
    if kind in run.output_names:
        return run.values[kind]
    output = run.output_names[0]
    if kind == "cross-entropy":
        logits = run.before(output, ("Softmax", "LogSoftmax"))
        labels = torch.from_numpy(np.ascontiguousarray(target))
        while logits.ndim > labels.ndim + 1 and logits.shape[-1] == 1:
            logits = logits.squeeze(-1)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL)
    expected = torch.from_numpy(np.ascontiguousarray(target)).to(run.dtype)
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(run.before(output, ("Sigmoid",)), expected)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss}
    return losses[kind](run.values[output], expected)


@dataclass
class _Interpreter:
    """Runs the graph's nodes in file order; `values` has every tensor by name."""

    model: onnx.ModelProto
    given: Mapping[str, Array]
    fed: Mapping[str, Array]
    dtype: torch.dtype
    training: bool
    masks: Mapping[str, Array]
    values: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    batch_statistics: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.opset = next(o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx"))
        self.output_names = [value.name for value in graph.output]
        self.producers = {name: node for node in graph.node for name in node.output}
        self.statistics = {name for n in graph.node if n.op_type == "BatchNormalization" for name in n.input[3:5]}
        self.computed_from_inputs: set[str] = set()
        self.declared_batch, self.batch = self._batch()

    def _batch(self) -> tuple[int | None, int]:
        for value in self.model.graph.input:
            if value.name in self.fed and value.type.tensor_type.shape.dim:
                return value.type.tensor_type.shape.dim[0].dim_value or None, len(self.fed[value.name])
        return None, 1

    def execute(self) -> None:
        for tensor in self.model.graph.initializer:
            if tensor.name not in self.fed:
                self._define(tensor.name, numpy_helper.to_array(tensor))
        for name, value in self.fed.items():
            self.values[name] = self._tensor(value)
            self.computed_from_inputs.add(name)
        for node in self.model.graph.node:
            self._run(node)
        if unknown := self.given.keys() - self.weights.keys():
            raise ValueError(f"the model has no weights {sorted(unknown)}")

    def outputs(self) -> dict[str, Array]:
        return {name: self.values[name].detach().numpy() for name in self.output_names}

    def before(self, name: str, operators: Sequence[str]) -> Tensor:
        """A tensor, or the input of its producer if that is one of `operators`."""
        producer = self.producers[name]
        return self.values[producer.input[0] if producer.op_type in operators else name]

    def _tensor(self, value: Array) -> Tensor:
        # A copy: arrays of the file are read-only, and torch must not write to the caller's.
        tensor = torch.from_numpy(np.array(value))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _define(self, name: str, value: Array) -> None:
        tensor = self._tensor(self.given.get(name, value))
        if self.training and tensor.is_floating_point() and name not in self.statistics:
            tensor.requires_grad_()
        self.values[name] = self.weights[name] = tensor

    def _run(self, node: onnx.NodeProto) -> None:
        attributes = _attributes(node)
        if node.op_type == "Constant":
            self._define(node.output[0], _constant(attributes))
            return
        inputs = [self.values[name] if name else None for name in node.input]
        if node.op_type == "ConstantOfShape":
            fill = attributes.get("value")
            value = numpy_helper.to_array(fill).reshape(()) if fill is not None else np.float32(0)
            self._define(node.output[0], np.full(ints(inputs[0]), value))
            return
        if self.computed_from_inputs.intersection(node.input):
            self.computed_from_inputs.update(node.output)
        special = _SPECIAL.get(node.op_type)
        if special is not None:
            results = special(self, node, inputs, attributes)
        elif node.op_type in OPERATORS:
            results = OPERATORS[node.op_type](inputs, {**attributes, "opset": self.opset})
        else:
            raise NotImplementedError(f"'{node.output[0]}': {node.op_type} has no reference in torch")
        results = results if isinstance(results, tuple) else (results,)
        # Further outputs (masks, indices, statistics) have no value here; a later read raises KeyError.
        self.values.update(zip(node.output, results, strict=False))

    def _batch_normalization(self, node: onnx.NodeProto, inputs: list[Tensor], a: Attributes) -> Tensor:
        if a.get("spatial", 1) != 1:
            raise NotImplementedError("BatchNormalization with spatial=0")
        x, scale, bias, mean, variance = inputs
        epsilon, momentum = a.get("epsilon", 1e-5), a.get("momentum", 0.9)
        if not self.training:
            return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
        new_mean, new_variance = mean.detach().clone(), variance.detach().clone()
        y = F.batch_norm(x, new_mean, new_variance, scale, bias, True, 1 - momentum, epsilon)
        self.batch_statistics.update(zip(node.input[3:5], (new_mean, new_variance), strict=True))
        return y

    def _dropout(self, node: onnx.NodeProto, inputs: list[Tensor], a: Attributes) -> Tensor:
        mask = self.masks.get(node.output[0]) if self.training else None
        if mask is None:
            return inputs[0]
        given = len(inputs) > 1 and inputs[1] is not None
        ratio = inputs[1].item() if given else a.get("ratio", 0.5)
        return inputs[0] * torch.from_numpy(np.array(mask)).to(self.dtype) / (1 - ratio)

    def _reshape(self, node: onnx.NodeProto, inputs: list[Tensor], a: Attributes) -> Tensor:
        x = inputs[0]
        shape = list(a["shape"]) if "shape" in a else ints(inputs[1])
        if not a.get("allowzero", 0):
            shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
        literal_batch = bool(shape) and shape[0] == self.declared_batch
        if literal_batch and node.input[0] in self.computed_from_inputs and x.shape[:1] == (self.batch,):
            shape[0] = self.batch
        return x.reshape(shape)

    def _cast(self, node: onnx.NodeProto, inputs: list[Tensor], a: Attributes) -> Tensor:
        numpy_type = np.dtype(helper.tensor_dtype_to_np_dtype(a["to"]))
        if numpy_type.kind not in "biu":
            return inputs[0].to(self.dtype)
        return inputs[0].to(torch.bool if numpy_type.kind == "b" else torch.int64)

    def _split(self, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> tuple[Tensor, ...]:
        x, axis = inputs[0], a.get("axis", 0)
        if len(inputs) > 1:
            return x.split(ints(inputs[1]), axis)
        return x.split(a.get("split", math.ceil(x.shape[axis] / len(node.output))), axis)


# Functions, not bound methods: a cycle would keep all tensors of a run until the garbage collector runs,
# which counts objects, not bytes.
_SPECIAL: dict[str, Callable[[_Interpreter, onnx.NodeProto, list[Any], Attributes], Any]] = {
    "BatchNormalization": _Interpreter._batch_normalization,
    "Dropout": _Interpreter._dropout,
    "Reshape": _Interpreter._reshape,
    "Cast": _Interpreter._cast,
    "Split": _Interpreter._split,
}


def _attributes(node: onnx.NodeProto) -> Attributes:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _constant(a: Attributes) -> Array:
    if "value" in a:
        return numpy_helper.to_array(a["value"])
    (name, value), *_ = a.items()
    return np.array(value, dtype=np.float32 if "float" in name else np.int64)
