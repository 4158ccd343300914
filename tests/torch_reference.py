"""The independent truth for losses and gradients: an ONNX forward graph run by torch autograd.

Shares no code with onnxgc. `reference_step` trains one step on a *source* model: parameters as
they come in the file (initializers, Constant or ConstantOfShape nodes), BatchNormalization on
batch statistics, Dropout with given masks. `reference_outputs` runs it for inference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from onnx import helper, numpy_helper
from torch import Tensor

Array = npt.NDArray[Any]
Attributes = dict[str, Any]
IGNORED_LABEL = -100
_BATCH_NORM_ROLES = {1: "scale", 2: "bias", 3: "mean", 4: "variance"}


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One training step.

    `gradients` has the gradient of the loss for every floating weight that it depends on.
    `outputs` are the model's own outputs, a trailing Softmax included. `batch_statistics` holds
    the next value of each running statistic, by the statistic's name, with torch's unbiased
    variance.
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
    """Loss and gradients of one step; every floating tensor is computed in `dtype`.

    Args:
        model: a forward graph as its exporter wrote it.
        weights: values by tensor name; those that are missing come from the graph.
        inputs: the model's inputs by name.
        target: int64 labels [N] or [N, d...] for cross-entropy (-100 is ignored), else an array
            of the output's shape.
        loss: `cross-entropy`, `mse`, `l1`, `bce`, or the name of a scalar output.
        dtype: the floating type of all computation.
        masks: what each Dropout keeps (1 or True), by the name of its output; without a mask
            it passes its input on.
    """
    run = _Interpreter(model, weights, inputs, dtype, training=True, masks=masks or {})
    run.execute()
    value = _loss(run, loss, target)
    differentiable = {name: t for name, t in run.weights.items() if t.requires_grad}
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        value, list(differentiable.values()), allow_unused=True
    )
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
    """The model's outputs in inference: running statistics, no Dropout."""
    run = _Interpreter(model, weights, inputs, dtype, training=False, masks={})
    with torch.no_grad():
        run.execute()
    return run.outputs()


def random_weights(model: onnx.ModelProto, seed: int = 0) -> dict[str, Array]:
    """A value for every floating weight, by role: He initialisation, statistics near 0 and 1.

    A value depends on its name, shape, role and `seed` alone, not on the order in the file.
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
    """Every floating tensor that the file itself defines, in the file's order."""
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
    """A copy in which `weights` are graph inputs, so that any runtime can be fed with them."""
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


def _loss(run: _Interpreter, kind: str, target: Array) -> Tensor:
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
    """Runs the graph's nodes in file order; `values` holds every tensor by name."""

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
        self.statistics = {
            name for n in graph.node if n.op_type == "BatchNormalization" for name in n.input[3:5]
        }
        self.computed_from_inputs: set[str] = set()
        self.declared_batch, self.batch = self._batch()

    def _batch(self) -> tuple[int | None, int]:
        """The literal batch that the file declares, if any, and the one that is fed."""
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
            raise ValueError(f"weights that the model does not have: {sorted(unknown)}")

    def outputs(self) -> dict[str, Array]:
        return {name: self.values[name].detach().numpy() for name in self.output_names}

    def before(self, name: str, operators: Sequence[str]) -> Tensor:
        """A tensor, or what its producer reads if that is one of `operators`."""
        producer = self.producers[name]
        return self.values[producer.input[0] if producer.op_type in operators else name]

    def _tensor(self, value: Array) -> Tensor:
        # A copy: weights from the file are read-only, and torch must never write to the caller's.
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
            self._define(node.output[0], np.full(_ints(inputs[0]), value))
            return
        if self.computed_from_inputs.intersection(node.input):
            self.computed_from_inputs.update(node.output)
        special = _SPECIAL.get(node.op_type)
        if special is not None:
            results = special(self, node, inputs, attributes)
        elif node.op_type in OPERATORS:
            results = OPERATORS[node.op_type](inputs, attributes, self.opset)
        else:
            raise NotImplementedError(f"'{node.output[0]}': {node.op_type} has no reference in torch")
        results = results if isinstance(results, tuple) else (results,)
        # Outputs beyond these (masks, indices, statistics) are for nobody here to read: a later
        # read fails by name.
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
        shape = list(a["shape"]) if "shape" in a else _ints(inputs[1])
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
            return x.split(_ints(inputs[1]), axis)
        return x.split(a.get("split", math.ceil(x.shape[axis] / len(node.output))), axis)


# Not bound to a run: a run that held its own methods would keep all its tensors until the garbage collector
# came by, which counts objects and not bytes.
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


def _ints(tensor: Tensor | None) -> list[int]:
    assert tensor is not None
    return [int(value) for value in tensor.reshape(-1).tolist()]


def _axes(inputs: Sequence[Tensor | None], a: Attributes) -> list[int] | None:
    """Axes are an attribute in older opsets and an input in newer ones."""
    if "axes" in a:
        return list(a["axes"])
    return _ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else None


# --- convolution and pooling ---------------------------------------------------------------

Inputs = list[Any]
"""A node's inputs: tensors, and None where an optional one is absent."""
_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}
_MAX_POOL: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pads(shape: Sequence[int], window: Sequence[int], a: Attributes) -> list[tuple[int, int]]:
    """Pads (begin, end) of each spatial dimension; `window` is the kernel with its dilation."""
    rank, auto = len(shape), a.get("auto_pad", "NOTSET")
    if auto == "NOTSET":
        pads = a.get("pads", [0] * (2 * rank))
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if auto == "VALID":
        return [(0, 0)] * rank
    result = []
    for size, k, stride in zip(shape, window, a.get("strides", [1] * rank), strict=True):
        total = max(0, (math.ceil(size / stride) - 1) * stride + k - size)
        less, more = total // 2, total - total // 2
        result.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return result


def _ceil_pads(
    shape: Sequence[int], window: Sequence[int], pads: list[tuple[int, int]], a: Attributes
) -> list[tuple[int, int]]:
    """Further pads at the end for ceil_mode, where the last window may hang over.

    Source: ONNX, MaxPool: a window that would begin in the end padding is left out.
    """
    if not a.get("ceil_mode", 0):
        return [(0, 0)] * len(shape)
    result = []
    strides = a.get("strides", [1] * len(shape))
    for size, k, stride, (begin, end) in zip(shape, window, strides, pads, strict=True):
        padded = begin + size + end
        last = math.ceil((padded - k) / stride)
        if last * stride >= begin + size:
            last -= 1
        result.append((0, max(0, last * stride + k - padded)))
    return result


def _pad(x: Tensor, pads: list[tuple[int, int]], value: float) -> Tensor:
    flat = [side for pair in reversed(pads) for side in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


def _window(kernel: Sequence[int], a: Attributes) -> list[int]:
    dilations = a.get("dilations", [1] * len(kernel))
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def _conv(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, weight, *bias = inputs
    rank = x.ndim - 2
    return _CONV[rank](
        _pad(x, _pads(x.shape[2:], _window(weight.shape[2:], a), a), 0.0),
        weight,
        bias[0] if bias else None,
        stride=a.get("strides", [1] * rank),
        dilation=a.get("dilations", [1] * rank),
        groups=a.get("group", 1),
    )


def _conv_transpose(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, weight, *bias = inputs
    rank = x.ndim - 2
    if "output_shape" in a or a.get("auto_pad", "NOTSET") != "NOTSET":
        raise NotImplementedError("ConvTranspose with output_shape or auto_pad")
    y = _CONV_TRANSPOSE[rank](
        x,
        weight,
        bias[0] if bias else None,
        stride=a.get("strides", [1] * rank),
        output_padding=a.get("output_padding", [0] * rank),
        dilation=a.get("dilations", [1] * rank),
        groups=a.get("group", 1),
    )
    pads = a.get("pads", [0] * (2 * rank))
    for axis in range(rank):
        begin, end = pads[axis], pads[rank + axis]
        y = y.narrow(axis + 2, begin, y.shape[axis + 2] - begin - end)
    return y


def _max_pool(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, kernel = inputs[0], a["kernel_shape"]
    shape, window, rank = x.shape[2:], _window(kernel, a), x.ndim - 2
    pads = _pads(shape, window, a)
    x = _pad(_pad(x, pads, -math.inf), _ceil_pads(shape, window, pads, a), -math.inf)
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    return _MAX_POOL[rank](x, kernel, strides, dilation=dilations)


def _average_pool(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, kernel = inputs[0], a["kernel_shape"]
    shape, rank = x.shape[2:], x.ndim - 2
    if set(a.get("dilations", [1])) != {1}:
        raise NotImplementedError("AveragePool with dilations")
    pads = _pads(shape, kernel, a)
    ceil_pads = _ceil_pads(shape, kernel, pads, a)
    # The share of each window that counts: what ceil_mode adds never does.
    counted = torch.ones((1, 1, *shape), dtype=x.dtype)
    counted = _pad(_pad(counted, pads, float(a.get("count_include_pad", 0))), ceil_pads, 0.0)
    x = _pad(_pad(x, pads, 0.0), ceil_pads, 0.0)
    pool, strides = _AVERAGE_POOL[rank], a.get("strides", [1] * rank)
    return pool(x, kernel, strides) / pool(counted, kernel, strides)


def _global_average_pool(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    return x.mean(dim=tuple(range(2, x.ndim)), keepdim=True)


def _global_max_pool(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    return x.flatten(2).max(dim=2).values.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


# --- normalisation, activation, products ---------------------------------------------------


def _lrn(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, size = inputs[0], a["size"]
    squares = (x * x).movedim(1, -1)
    squares = F.pad(squares, ((size - 1) // 2, size // 2))
    total = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    alpha, beta, bias = a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("bias", 1.0)
    result: Tensor = x / (bias + alpha / size * total) ** beta
    return result


def _layer_normalization(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, scale, *bias = inputs
    shape = x.shape[a.get("axis", -1) % x.ndim :]
    return F.layer_norm(x, shape, scale, bias[0] if bias else None, a.get("epsilon", 1e-5))


def _instance_normalization(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, scale, bias = inputs
    return F.instance_norm(x, weight=scale, bias=bias, eps=a.get("epsilon", 1e-5))


def _clip(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    low, high = (*inputs[1:], None, None)[:2]
    low = a.get("min") if low is None else low.item()
    high = a.get("max") if high is None else high.item()
    return inputs[0] if low is None and high is None else torch.clamp(inputs[0], low, high)


def _softmax_as(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
        x: Tensor = inputs[0]
        if opset >= 13:
            return function(x, dim=a.get("axis", -1))
        axis = a.get("axis", 1) % x.ndim
        return function(x.reshape(math.prod(x.shape[:axis]), -1), dim=1).reshape(x.shape)

    return run


def _where(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    condition, x, y = inputs
    return torch.where(condition, x, y)


def _prelu(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, slope = inputs
    return torch.where(x > 0, x, x * slope)


def _selu(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    alpha = a.get("alpha", 1.67326319217681884765625)
    scale: float = a.get("gamma", 1.05070102214813232421875)
    return scale * torch.where(inputs[0] > 0, inputs[0], alpha * torch.expm1(inputs[0]))


def _shrink(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, limit, bias = inputs[0], a.get("lambd", 0.5), a.get("bias", 0.0)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, 0 * x))


def _cum_sum(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, axis = inputs[0], _ints(inputs[1])[0]
    x = x.flip(axis) if a.get("reverse", 0) else x
    total = x.cumsum(axis) - x if a.get("exclusive", 0) else x.cumsum(axis)
    return total.flip(axis) if a.get("reverse", 0) else total


def _trilu(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    diagonal = _ints(inputs[1])[0] if len(inputs) > 1 else 0
    return torch.triu(inputs[0], diagonal) if a.get("upper", 1) else torch.tril(inputs[0], diagonal)


def _gemm(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, weight, *bias = inputs
    x = x.mT if a.get("transA", 0) else x
    weight = weight.mT if a.get("transB", 0) else weight
    y: Tensor = a.get("alpha", 1.0) * (x @ weight)
    return y + a.get("beta", 1.0) * bias[0] if bias and bias[0] is not None else y


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda inputs, a, opset: function(inputs[0])


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
        x, y = inputs
        if a.get("broadcast", 0) and "axis" in a:
            # Opset 6 and below: y's dimensions begin at x's `axis`.
            y = y.reshape(*y.shape, *[1] * (x.ndim - a["axis"] - y.ndim))
        return function(x, y)

    return run


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    return lambda inputs, a, opset: reduce(function, inputs)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _reduce_as(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
        x, axes = inputs[0], _axes(inputs, a)
        if not axes and a.get("noop_with_empty_axes", 0):
            return x
        return function(x, dim=axes or list(range(x.ndim)), keepdim=bool(a.get("keepdims", 1)))

    return run


def _product(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    for axis in dim:
        x = x.prod(axis, keepdim=True)
    return x if keepdim else x.squeeze(tuple(dim))


# --- shapes --------------------------------------------------------------------------------


def _flatten(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    axis = a.get("axis", 1)
    return x.reshape(math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim]), -1)


def _transpose(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    return x.permute(a.get("perm", list(reversed(range(x.ndim)))))


def _concat(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    return torch.cat(inputs, dim=a.get("axis", 1))


def _unsqueeze(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    axes = _axes(inputs, a) or []
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    axes = _axes(inputs, a)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _expand(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    return x.expand(torch.broadcast_shapes(x.shape, _ints(inputs[1])))


def _slice(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    if "starts" in a:
        starts, ends, axes, steps = a["starts"], a["ends"], a.get("axes"), None
    else:
        starts, ends = _ints(inputs[1]), _ints(inputs[2])
        axes, steps = (_ints(t) if t is not None else None for t in (*inputs[3:], None, None)[:2])
    axes = axes or range(len(starts))
    steps = steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        indices = range(*slice(start, end, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(indices), dtype=torch.int64))
    return x


def _gather(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x, indices = inputs
    result: Tensor = x[(slice(None),) * (a.get("axis", 0) % x.ndim) + (indices,)]
    return result


def _shape(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    return torch.tensor(inputs[0].shape[a.get("start", 0) : a.get("end")], dtype=torch.int64)


def _pad_operator(inputs: Inputs, a: Attributes, opset: int) -> Tensor:
    x: Tensor = inputs[0]
    if a.get("mode", "constant") != "constant" or len(inputs) > 3:
        raise NotImplementedError("Pad in another mode than constant, or with axes")
    pads = a["pads"] if "pads" in a else _ints(inputs[1])
    value = inputs[2].item() if len(inputs) > 2 and inputs[2] is not None else a.get("value", 0.0)
    return _pad(x, list(zip(pads[: x.ndim], pads[x.ndim :], strict=True)), value)


class Operator(Protocol):
    """What an operator computes from its inputs, its attributes and the model's opset."""

    def __call__(self, inputs: Inputs, a: Attributes, opset: int, /) -> Tensor: ...


OPERATORS: dict[str, Operator] = {
    "Abs": _unary(torch.abs),
    "Acos": _unary(torch.acos),
    "Acosh": _unary(torch.acosh),
    "Add": _binary(torch.add),
    "Asin": _unary(torch.asin),
    "Asinh": _unary(torch.asinh),
    "Atan": _unary(torch.atan),
    "Atanh": _unary(torch.atanh),
    "AveragePool": _average_pool,
    "Celu": lambda inputs, a, opset: F.celu(inputs[0], a.get("alpha", 1.0)),
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Cos": _unary(torch.cos),
    "Cosh": _unary(torch.cosh),
    "CumSum": _cum_sum,
    "Div": _binary(_divide),
    "Elu": lambda inputs, a, opset: F.elu(inputs[0], a.get("alpha", 1.0)),
    "Equal": _binary(torch.eq),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": lambda inputs, a, opset: F.gelu(inputs[0], approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "Greater": _binary(torch.gt),
    "HardSigmoid": lambda inputs, a, opset: torch.clamp(
        a.get("alpha", 0.2) * inputs[0] + a.get("beta", 0.5), 0, 1
    ),
    "HardSwish": _unary(F.hardswish),
    "Identity": _unary(lambda x: x),
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": lambda inputs, a, opset: F.leaky_relu(inputs[0], a.get("alpha", 0.01)),
    "Less": _binary(torch.lt),
    "Log": _unary(torch.log),
    "LogSoftmax": _softmax_as(F.log_softmax),
    "MatMul": _binary(torch.matmul),
    "Max": _variadic(torch.maximum),
    "MaxPool": _max_pool,
    "Mean": lambda inputs, a, opset: reduce(torch.add, inputs) / len(inputs),
    "Min": _variadic(torch.minimum),
    "Mish": _unary(F.mish),
    "Mod": _binary(torch.fmod),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "PRelu": _prelu,
    "Pad": _pad_operator,
    "Pow": _binary(torch.pow),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceL1": _reduce_as(lambda x, dim, keepdim: x.abs().sum(dim, keepdim)),
    "ReduceL2": _reduce_as(torch.linalg.vector_norm),
    "ReduceLogSum": _reduce_as(lambda x, dim, keepdim: x.sum(dim, keepdim).log()),
    "ReduceLogSumExp": _reduce_as(torch.logsumexp),
    "ReduceMax": _reduce_as(torch.amax),
    "ReduceMean": _reduce_as(torch.mean),
    "ReduceMin": _reduce_as(torch.amin),
    "ReduceProd": _reduce_as(_product),
    "ReduceSum": _reduce_as(torch.sum),
    "ReduceSumSquare": _reduce_as(lambda x, dim, keepdim: x.square().sum(dim, keepdim)),
    "Relu": _unary(torch.relu),
    "Selu": _selu,
    "Shape": _shape,
    "Shrink": _shrink,
    "Sigmoid": _unary(torch.sigmoid),
    "Sin": _unary(torch.sin),
    "Sinh": _unary(torch.sinh),
    "Slice": _slice,
    "Softmax": _softmax_as(F.softmax),
    # Not F.softplus, which turns linear above 20.
    "Softplus": _unary(lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    "Softsign": _unary(F.softsign),
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Sum": _variadic(torch.add),
    "Swish": lambda inputs, a, opset: inputs[0] * torch.sigmoid(a.get("alpha", 1.0) * inputs[0]),
    "Tan": _unary(torch.tan),
    "Tanh": _unary(torch.tanh),
    "ThresholdedRelu": lambda inputs, a, opset: F.threshold(inputs[0], a.get("alpha", 1.0), 0.0),
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
