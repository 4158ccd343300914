"""Functions of modules in forms that PyTorch's exporter keeps: randomness as Dropout, or switched off."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ExportableForms(TorchFunctionMode):
    """Replaces functions by forms that PyTorch's exporter keeps; `last` is the name of the last call.

    Random functions become `dropout`, for which ONNX has an operator: the file is random in training, as the
    module is, and deterministic in evaluation. Label smoothing and normalisation without running statistics
    are decomposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _SILENT:
            self.last = name
        return _FORMS.get(func, func)(*args, **(kwargs or {}))


class WithoutRandomness(TorchFunctionMode):
    """Switches Dropout off, as in evaluation; normalisations still use batch statistics.

    The row of an embedding table at `padding_idx` gets a gradient, as in a file.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in _FIXED_ARGUMENTS:
            given = inspect.signature(func).bind(*args, **named)
            name, value = _FIXED_ARGUMENTS[func]
            given.arguments[name] = value
            args, named = given.args, given.kwargs
        elif func is F.scaled_dot_product_attention:
            rest = dict(zip(("is_causal", "scale", "enable_gqa"), args[5:], strict=False))
            args, named = args[:4], {**rest, **named, "dropout_p": 0.0}
        elif func in _RECURRENT:
            # The Dropout rate is their only float argument.
            args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        elif func is Tensor.bernoulli_ and _is_probability(args):
            return args[0].fill_(args[1])
        return func(*args, **named)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Out of place: the exporter does not support in-place Dropout."""
    dropped = F.dropout(x, p, training)
    return x.copy_(dropped) if inplace and training else dropped


def _bernoulli_(x: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    """Ones with probability p, as p times a Dropout of ones, which is p in evaluation."""
    if not _is_probability((x, p)):
        return x.bernoulli_(p, **options)
    return x.copy_(p * F.dropout(torch.ones_like(x), 1.0 - p, training=True))


def _by_feature(alone: int = 0) -> Callable[..., Tensor]:
    """Dropout of whole channels of [N, C, ...], or of [C, ...] where the input has `alone` dimensions."""

    def dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        leading = 1 if x.ndim == alone else 2
        ones = x.new_ones([*x.shape[:leading], *[1] * (x.ndim - leading)])
        chosen = F.dropout(ones, p, training)
        return x.mul_(chosen) if inplace else x * chosen

    return dropped


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    """With four dimensions, which the exporter requires."""
    if query.ndim != 3 or key.ndim != 3 or value.ndim != 3:
        return F.scaled_dot_product_attention(query, key, value, *rest, **named)
    mask = rest[0] if rest else named.pop("attn_mask", None)
    # A mask of [N, L, S] differs between samples, one of [L, S] does not.
    mask = mask[:, None] if isinstance(mask, Tensor) and mask.ndim == 3 else mask
    query, key, value = (tensor[:, None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, *rest[1:], **named)[:, 0]


def _cross_entropy(input: Tensor, target: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Cross entropy with label smoothing and class probabilities, decomposed.

    Source: the documentation of `torch.nn.CrossEntropyLoss`.
    """
    given = inspect.signature(F.cross_entropy).bind(input, target, *rest, **named)
    given.apply_defaults()
    weight, smoothing = given.arguments["weight"], given.arguments["label_smoothing"]
    axis = 1 if input.ndim > 1 else 0
    is_legacy = given.arguments["size_average"] is not None or given.arguments["reduce"] is not None
    if is_legacy or not (smoothing or target.is_floating_point() or input.ndim == 1):
        return F.cross_entropy(*given.args, **given.kwargs)
    reduction, ignored = given.arguments["reduction"], given.arguments["ignore_index"]
    classes = input.shape[axis]
    along = [-1] + [1] * (input.ndim - 1 - axis)
    log = F.log_softmax(input, axis)
    weighted = log if weight is None else log * weight.reshape(along)
    if target.is_floating_point():
        shares = target * (1.0 - smoothing) + smoothing / classes
        each = -(weighted * shares).sum(axis)
        total: Tensor = each if reduction == "none" else each.sum()
        return total / (target.numel() // classes) if reduction == "mean" else total
    is_label = target != ignored
    labels = torch.where(is_label, target, torch.zeros_like(target))
    picked = weighted.gather(axis, labels.unsqueeze(axis)).squeeze(axis)
    each = -(picked * (1.0 - smoothing) + weighted.sum(axis) * (smoothing / classes))
    each = torch.where(is_label, each, torch.zeros_like(each))
    if reduction == "mean":
        of_class = torch.ones_like(each) if weight is None else weight[labels]
        return each.sum() / torch.where(is_label, of_class, torch.zeros_like(of_class)).sum()
    return each.sum() if reduction == "sum" else each


def _cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    named = ("none", "mean", "sum")[reduction]
    return _cross_entropy(input, target, weight, None, ignore_index, None, named, label_smoothing=label_smoothing)


def _normalised(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """x: [N, C, ...], with a weight and a bias per channel."""
    of_channels = [1, -1] + [1] * (x.ndim - 2)
    y = (x - mean) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight.reshape(of_channels)
    return y if bias is None else y + bias.reshape(of_channels)


def _of_batch(x: Tensor, axes: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    mean = x.mean(axes, keepdim=True)
    return _normalised(x, mean, (x - mean).square().mean(axes, keepdim=True), weight, bias, eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Decomposed where running statistics are absent."""
    if running_mean is None or running_var is None:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        return _of_batch(input, axes, weight, bias, eps)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Decomposed where running statistics are used: BatchNormalization would train them."""
    if not use_input_stats and running_mean is not None and running_var is not None:
        of_channels = [1, -1] + [1] * (input.ndim - 2)
        mean, variance = (value.reshape(of_channels) for value in (running_mean, running_var))
        return _normalised(input, mean, variance, weight, bias, eps)
    return F.instance_norm(input, None, None, weight, bias, use_input_stats=True, eps=eps)


def _in_torch_order(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A normalisation with the arguments of `torch.batch_norm`: weight and bias before running statistics."""

    def reordered(
        input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *rest: Any, **named: Any
    ) -> Tensor:
        named.pop("cudnn_enabled", None)
        return norm(input, running_mean, running_var, weight, bias, *rest[:3], **named)

    return reordered


def _by_divisor(pool: Callable[..., Tensor], axes: int) -> Callable[..., Tensor]:
    """Average pooling with `divisor_override`, which the exporter ignores, as a factor."""
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")

    def pooled(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        given = {**dict(zip(names, rest, strict=False)), **named}
        divisor, size = given.get("divisor_override"), given["kernel_size"]
        if not divisor or given.get("ceil_mode"):
            return pool(x, *rest, **named)
        given |= {"count_include_pad": True, "divisor_override": None}
        size = [size] * axes if isinstance(size, int) else list(size) * (axes // len(size))
        result: Tensor = pool(x, **given) * (math.prod(size) / divisor)
        return result

    return pooled


def _is_probability(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[1], float | int) and args[0].is_floating_point()


# Functions that torch calls around the operators of a module.
_SILENT = frozenset(["__get__", "__set__", "_set_grad_enabled"])
_FORMS: Mapping[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    torch._C._nn.cross_entropy_loss: _cross_entropy_loss,
    F.avg_pool2d: _by_divisor(F.avg_pool2d, 2),
    F.avg_pool3d: _by_divisor(F.avg_pool3d, 3),
    F.batch_norm: _batch_norm,
    torch.batch_norm: _in_torch_order(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _in_torch_order(_instance_norm),
    Tensor.bernoulli_: _bernoulli_,
    F.dropout: _dropout,
    F.dropout1d: _by_feature(2),
    F.dropout2d: _by_feature(),
    F.dropout3d: _by_feature(4),
    F.scaled_dot_product_attention: _attention,
}
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_FIXED_ARGUMENTS: Mapping[Any, tuple[str, Any]] = {
    **dict.fromkeys((*_DROPOUTS, F.rrelu, F.multi_head_attention_forward), ("training", False)),
    F.embedding: ("padding_idx", None),
}
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
