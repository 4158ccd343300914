"""Random choices of modules: as Dropout, which a file can switch off, or left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AsDropout(TorchFunctionMode):
    """In it random choices are made by `dropout`, of which ONNX has an operator.

    So the file chooses in training as the module does, and nothing in evaluation.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _BY_DROPOUT.get(func, func)(*args, **(kwargs or {}))


class WithoutChoices(TorchFunctionMode):
    """In it nothing is dropped, as in evaluation, while batch statistics are those of training.

    A row of a table that a module keeps by `padding_idx` gets a gradient, as it does in a file.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _SWITCHED:
            given = inspect.signature(func).bind(*args, **named)
            given.arguments["training"] = False
            args, named = given.args, given.kwargs
        elif func is F.embedding:
            given = inspect.signature(func).bind(*args, **named)
            given.arguments["padding_idx"] = None
            args, named = given.args, given.kwargs
        elif func is F.scaled_dot_product_attention:
            args, named = args[:4], {**_named_rest(args), **named, "dropout_p": 0.0}
        elif func in _RECURRENT:
            # The rate of their Dropout is the one float that they take.
            args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        elif func is Tensor.bernoulli_ and _is_share(args):
            return args[0].fill_(args[1])
        return func(*args, **named)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In another place first: the exporter has no Dropout for the other."""
    dropped = F.dropout(x, p, training)
    return x.copy_(dropped) if inplace and training else dropped


def _bernoulli_(x: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    """One with the probability p, else zero: p times a Dropout of ones, which is p in evaluation."""
    if not _is_share((x, p)):
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
    """With the four dimensions that the exporter wants."""
    if query.ndim != 3 or key.ndim != 3 or value.ndim != 3:
        return F.scaled_dot_product_attention(query, key, value, *rest, **named)
    mask = rest[0] if rest else named.pop("attn_mask", None)
    # A mask of [N, ...] belongs to the samples, one of [L, S] to all of them.
    mask = mask[:, None] if isinstance(mask, Tensor) and mask.ndim == 3 else mask
    query, key, value = (tensor[:, None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, *rest[1:], **named)[:, 0]


def _named_rest(args: tuple[Any, ...]) -> dict[str, Any]:
    """What of attention's positional arguments stands behind the rate of its Dropout."""
    return dict(zip(("is_causal", "scale", "enable_gqa"), args[5:], strict=False))


def _is_share(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[1], float | int) and args[0].is_floating_point()


_BY_DROPOUT: Mapping[Any, Callable[..., Any]] = {
    Tensor.bernoulli_: _bernoulli_,
    F.dropout: _dropout,
    F.dropout1d: _by_feature(2),
    F.dropout2d: _by_feature(),
    F.dropout3d: _by_feature(4),
    F.scaled_dot_product_attention: _attention,
}
_SWITCHED = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.multi_head_attention_forward,
    }
)
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
