"""Activations, and Dropout."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.torch.operators.setting_values import Number, number

_SELU_ALPHA = 1.6732632423543772
_SELU_GAMMA = 1.0507009873554805
# Inputs from which log(1 + e^x) equals x; torch's default of 20 suits float32.
_LINEAR_THRESHOLDS = {torch.float64: 40.0}


def clip(x: Tensor, low: Number | None = None, high: Number | None = None) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        # torch.clamp takes two numbers or two tensors.
        bounded = x if low is None else torch.clamp(x, min=low)
        return bounded if high is None else torch.clamp(bounded, max=high)
    return x if low is None and high is None else torch.clamp(x, low, high)


def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(alpha * x + beta, 0, 1)


def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x: [N, C, ...]; the slope is one number, one per channel, or broadcast to x."""
    per_channel = (x.shape[1], *(1,) * (x.ndim - 2)) if x.ndim > 1 else ()
    if slope.numel() == 1 or tuple(slope.shape) == per_channel:
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x > 0, x, x * slope)


def selu(x: Tensor, *, alpha: float = _SELU_ALPHA, gamma: float = _SELU_GAMMA) -> Tensor:
    is_default = math.isclose(alpha, _SELU_ALPHA, rel_tol=1e-7) and math.isclose(gamma, _SELU_GAMMA, rel_tol=1e-7)
    return F.selu(x) if is_default else gamma * F.elu(x, alpha)


def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=_LINEAR_THRESHOLDS.get(x.dtype, 20.0))


def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.threshold(x, alpha, 0.0)


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return F.softmax(x, axis)


def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return F.log_softmax(x, axis)


def masked_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Rows of minus infinity become NaN, which later operators replace; their gradients are zero."""
    is_masked = torch.isneginf(x).all(axis, keepdim=True)
    return F.softmax(x.masked_fill(is_masked, 0), axis).masked_fill(is_masked, math.nan)


def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """One at the first maximum along an axis, zero elsewhere."""
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


def dropout(
    x: Tensor,
    ratio: Number | Sequence[float] | None = None,
    training_mode: Number | None = None,
    *,
    training: bool,
    outputs: int,
    seed: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """On in training mode, regardless of the file; torch's generator draws masks, regardless of `seed`."""
    rate = 0.5 if ratio is None else number(ratio)
    if outputs == 1:
        return F.dropout(x, rate, training)
    if not training or rate == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    y, mask = torch.native_dropout(x, rate, True)
    return y, mask
