"""Normalisations. x: [N, C, spatial...] for operators without an axis."""

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor


def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    training: bool,
    outputs: int,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    evaluated: int = 0,
) -> Tensor | tuple[Tensor, ...]:
    """Normalises by the batch's statistics in training mode, by running ones in evaluation or if `evaluated`.

    Training updates the running statistics in place, with the unbiased variance, as torch does.
    """
    by_batch = training and not evaluated
    y = F.batch_norm(x, mean, variance, scale, bias, by_batch, 1 - momentum, epsilon)
    return y if outputs == 1 else (y, mean, variance)


def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: int,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor | tuple[Tensor, ...]:
    shape = x.shape[axis % x.ndim :]
    if scale.shape == shape and (bias is None or bias.shape == shape):
        y = F.layer_norm(x, shape, scale, bias, epsilon)
    else:
        # Scale and bias of another shape are broadcast to x.
        y = F.layer_norm(x, shape, None, None, epsilon) * scale
        y = y if bias is None else y + bias
    if outputs == 1:
        return y
    axes = list(range(axis % x.ndim, x.ndim))
    mean = x.mean(axes, keepdim=True)
    return y, mean, (x.var(axes, correction=0, keepdim=True) + epsilon).rsqrt()


def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    shape = x.shape[axis % x.ndim :]
    is_own = scale.shape == shape
    y = F.rms_norm(x, shape, scale if is_own else None, epsilon)
    return y if is_own else y * scale


def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    if size % 2:
        return F.local_response_norm(x, size, alpha, beta, bias)
    # torch's even windows begin one channel before ONNX's.
    squares = x.square().flatten(2).unsqueeze(1)
    padded = F.pad(squares, (0, 0, (size - 1) // 2, size // 2))
    means = F.avg_pool2d(padded, (size, 1), stride=1).reshape(x.shape)
    return x / (bias + alpha * means).pow(beta)


def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """A row of zeros stays zero and has no gradient."""
    total = (x.abs() if p == 1 else x.square()).sum(axis, keepdim=True)
    is_zero = total == 0
    norm = total.masked_fill(is_zero, 1)
    return (x / (norm if p == 1 else norm.sqrt())).masked_fill(is_zero, 0)
