"""Operators of ONNX in torch, for the interpreter in `tests/torch_reference.py`."""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's convention
from torch import Tensor

Attributes = dict[str, Any]
Inputs = list[Any]
"""A node's inputs: tensors, and None for absent optional ones."""


class Operator(Protocol):
    """Computes outputs from inputs and attributes; `opset` among these is the model's."""

    def __call__(self, inputs: Inputs, a: Attributes, /) -> Tensor: ...


def ints(tensor: Tensor | None) -> list[int]:
    assert tensor is not None
    return [int(value) for value in tensor.reshape(-1).tolist()]


def _axes(inputs: Sequence[Tensor | None], a: Attributes) -> list[int] | None:
    """Axes of a node: an attribute in older opsets, an input in newer ones."""
    if "axes" in a:
        return list(a["axes"])
    return ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else None


# --- convolution and pooling ---------------------------------------------------------------


def _by_rank(name: str, rank: int) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, f"{name}{rank}d")
    return function


def _pads(shape: Sequence[int], window: Sequence[int], a: Attributes) -> list[tuple[int, int]]:
    """Pads (begin, end) of each spatial dimension; `window` is the size of the dilated kernel."""
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
    """Additional pads at the end for ceil_mode, where the last window may exceed the input.

    Source: ONNX, MaxPool: a window that would begin in the end padding is ignored.
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


def _conv(inputs: Inputs, a: Attributes) -> Tensor:
    x, weight, *bias = inputs
    rank = x.ndim - 2
    return _by_rank("conv", rank)(
        _pad(x, _pads(x.shape[2:], _window(weight.shape[2:], a), a), 0.0),
        weight,
        bias[0] if bias else None,
        stride=a.get("strides", [1] * rank),
        dilation=a.get("dilations", [1] * rank),
        groups=a.get("group", 1),
    )


def _conv_transpose(inputs: Inputs, a: Attributes) -> Tensor:
    x, weight, *bias = inputs
    rank = x.ndim - 2
    if "output_shape" in a or a.get("auto_pad", "NOTSET") != "NOTSET":
        raise NotImplementedError("ConvTranspose with output_shape or auto_pad")
    y = _by_rank("conv_transpose", rank)(
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


def _max_pool(inputs: Inputs, a: Attributes) -> Tensor:
    x, kernel = inputs[0], a["kernel_shape"]
    shape, window, rank = x.shape[2:], _window(kernel, a), x.ndim - 2
    pads = _pads(shape, window, a)
    x = _pad(_pad(x, pads, -math.inf), _ceil_pads(shape, window, pads, a), -math.inf)
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    return _by_rank("max_pool", rank)(x, kernel, strides, dilation=dilations)


def _average_pool(inputs: Inputs, a: Attributes) -> Tensor:
    x, kernel = inputs[0], a["kernel_shape"]
    shape, rank = x.shape[2:], x.ndim - 2
    if set(a.get("dilations", [1])) != {1}:
        raise NotImplementedError("AveragePool with dilations")
    pads = _pads(shape, kernel, a)
    ceil_pads = _ceil_pads(shape, kernel, pads, a)
    # The share of each window that counts; padding by ceil_mode never counts.
    counted = torch.ones((1, 1, *shape), dtype=x.dtype)
    counted = _pad(_pad(counted, pads, float(a.get("count_include_pad", 0))), ceil_pads, 0.0)
    x = _pad(_pad(x, pads, 0.0), ceil_pads, 0.0)
    pool, strides = _by_rank("avg_pool", rank), a.get("strides", [1] * rank)
    return pool(x, kernel, strides) / pool(counted, kernel, strides)


def _global_average_pool(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    return x.mean(dim=tuple(range(2, x.ndim)), keepdim=True)


def _global_max_pool(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    return x.flatten(2).max(dim=2).values.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


# --- normalisation, activation, products ---------------------------------------------------


def _lrn(inputs: Inputs, a: Attributes) -> Tensor:
    x, size = inputs[0], a["size"]
    squares = (x * x).movedim(1, -1)
    squares = F.pad(squares, ((size - 1) // 2, size // 2))
    total = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    alpha, beta, bias = a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("bias", 1.0)
    result: Tensor = x / (bias + alpha / size * total) ** beta
    return result


def _layer_normalization(inputs: Inputs, a: Attributes) -> Tensor:
    x, scale, *bias = inputs
    shape = x.shape[a.get("axis", -1) % x.ndim :]
    return F.layer_norm(x, shape, scale, bias[0] if bias else None, a.get("epsilon", 1e-5))


def _instance_normalization(inputs: Inputs, a: Attributes) -> Tensor:
    x, scale, bias = inputs
    return F.instance_norm(x, weight=scale, bias=bias, eps=a.get("epsilon", 1e-5))


def _clip(inputs: Inputs, a: Attributes) -> Tensor:
    low, high = (*inputs[1:], None, None)[:2]
    low = a.get("min") if low is None else low.item()
    high = a.get("max") if high is None else high.item()
    return inputs[0] if low is None and high is None else torch.clamp(inputs[0], low, high)


def _softmax_as(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes) -> Tensor:
        x: Tensor = inputs[0]
        if a["opset"] >= 13:
            return function(x, dim=a.get("axis", -1))
        axis = a.get("axis", 1) % x.ndim
        return function(x.reshape(math.prod(x.shape[:axis]), -1), dim=1).reshape(x.shape)

    return run


def _where(inputs: Inputs, a: Attributes) -> Tensor:
    condition, x, y = inputs
    return torch.where(condition, x, y)


def _prelu(inputs: Inputs, a: Attributes) -> Tensor:
    x, slope = inputs
    return torch.where(x > 0, x, x * slope)


def _selu(inputs: Inputs, a: Attributes) -> Tensor:
    alpha = a.get("alpha", 1.67326319217681884765625)
    scale: float = a.get("gamma", 1.05070102214813232421875)
    return scale * torch.where(inputs[0] > 0, inputs[0], alpha * torch.expm1(inputs[0]))


def _shrink(inputs: Inputs, a: Attributes) -> Tensor:
    x, limit, bias = inputs[0], a.get("lambd", 0.5), a.get("bias", 0.0)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, 0 * x))


def _cum_sum(inputs: Inputs, a: Attributes) -> Tensor:
    x, axis = inputs[0], ints(inputs[1])[0]
    x = x.flip(axis) if a.get("reverse", 0) else x
    total = x.cumsum(axis) - x if a.get("exclusive", 0) else x.cumsum(axis)
    return total.flip(axis) if a.get("reverse", 0) else total


def _trilu(inputs: Inputs, a: Attributes) -> Tensor:
    diagonal = ints(inputs[1])[0] if len(inputs) > 1 else 0
    return torch.triu(inputs[0], diagonal) if a.get("upper", 1) else torch.tril(inputs[0], diagonal)


def _gemm(inputs: Inputs, a: Attributes) -> Tensor:
    x, weight, *bias = inputs
    x = x.mT if a.get("transA", 0) else x
    weight = weight.mT if a.get("transB", 0) else weight
    y: Tensor = a.get("alpha", 1.0) * (x @ weight)
    return y + a.get("beta", 1.0) * bias[0] if bias and bias[0] is not None else y


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda inputs, a: function(inputs[0])


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes) -> Tensor:
        x, y = inputs
        if a.get("broadcast", 0) and "axis" in a:
            # Up to opset 6, y's dimensions begin at x's `axis`.
            y = y.reshape(*y.shape, *[1] * (x.ndim - a["axis"] - y.ndim))
        return function(x, y)

    return run


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    return lambda inputs, a: reduce(function, inputs)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _reduce_as(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes) -> Tensor:
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


def _flatten(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    axis = a.get("axis", 1)
    return x.reshape(math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim]), -1)


def _transpose(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    return x.permute(a.get("perm", list(reversed(range(x.ndim)))))


def _concat(inputs: Inputs, a: Attributes) -> Tensor:
    return torch.cat(inputs, dim=a.get("axis", 1))


def _unsqueeze(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    axes = _axes(inputs, a) or []
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    axes = _axes(inputs, a)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _expand(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    return x.expand(torch.broadcast_shapes(x.shape, ints(inputs[1])))


def _slice(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    if "starts" in a:
        starts, ends, axes, steps = a["starts"], a["ends"], a.get("axes"), None
    else:
        starts, ends = ints(inputs[1]), ints(inputs[2])
        axes, steps = (ints(t) if t is not None else None for t in (*inputs[3:], None, None)[:2])
    axes = axes or range(len(starts))
    steps = steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        indices = range(*slice(start, end, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(indices), dtype=torch.int64))
    return x


def _gather(inputs: Inputs, a: Attributes) -> Tensor:
    x, indices = inputs
    result: Tensor = x[(slice(None),) * (a.get("axis", 0) % x.ndim) + (indices,)]
    return result


def _shape(inputs: Inputs, a: Attributes) -> Tensor:
    return torch.tensor(inputs[0].shape[a.get("start", 0) : a.get("end")], dtype=torch.int64)


def _pad_operator(inputs: Inputs, a: Attributes) -> Tensor:
    x: Tensor = inputs[0]
    if a.get("mode", "constant") != "constant" or len(inputs) > 3:
        raise NotImplementedError("Pad with another mode than constant, or with axes")
    pads = a["pads"] if "pads" in a else ints(inputs[1])
    value = inputs[2].item() if len(inputs) > 2 and inputs[2] is not None else a.get("value", 0.0)
    return _pad(x, list(zip(pads[: x.ndim], pads[x.ndim :], strict=True)), value)


_NAMED_AS_IN_TORCH = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Log Neg Reciprocal Relu Sigmoid Sin Sinh Sqrt Tan Tanh"
)

OPERATORS: dict[str, Operator] = {
    **{name: _unary(getattr(torch, name.lower())) for name in _NAMED_AS_IN_TORCH.split()},
    "Add": _binary(torch.add),
    "AveragePool": _average_pool,
    "Celu": lambda inputs, a: F.celu(inputs[0], a.get("alpha", 1.0)),
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "CumSum": _cum_sum,
    "Div": _binary(_divide),
    "Elu": lambda inputs, a: F.elu(inputs[0], a.get("alpha", 1.0)),
    "Equal": _binary(torch.eq),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": lambda inputs, a: F.gelu(inputs[0], approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "Greater": _binary(torch.gt),
    "HardSigmoid": lambda inputs, a: torch.clamp(a.get("alpha", 0.2) * inputs[0] + a.get("beta", 0.5), 0, 1),
    "HardSwish": _unary(F.hardswish),
    "Identity": _unary(lambda x: x),
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": lambda inputs, a: F.leaky_relu(inputs[0], a.get("alpha", 0.01)),
    "Less": _binary(torch.lt),
    "LogSoftmax": _softmax_as(F.log_softmax),
    "MatMul": _binary(torch.matmul),
    "Max": _variadic(torch.maximum),
    "MaxPool": _max_pool,
    "Mean": lambda inputs, a: reduce(torch.add, inputs) / len(inputs),
    "Min": _variadic(torch.minimum),
    "Mish": _unary(F.mish),
    "Mod": _binary(torch.fmod),
    "Mul": _binary(torch.mul),
    "PRelu": _prelu,
    "Pad": _pad_operator,
    "Pow": _binary(torch.pow),
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
    "Selu": _selu,
    "Shape": _shape,
    "Shrink": _shrink,
    "Slice": _slice,
    "Softmax": _softmax_as(F.softmax),
    # F.softplus is linear above 20.
    "Softplus": _unary(lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    "Softsign": _unary(F.softsign),
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Sum": _variadic(torch.add),
    "Swish": lambda inputs, a: inputs[0] * torch.sigmoid(a.get("alpha", 1.0) * inputs[0]),
    "ThresholdedRelu": lambda inputs, a: F.threshold(inputs[0], a.get("alpha", 1.0), 0.0),
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
