"""Convolutions and matrix products. x: [N, C, spatial...]."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

CONV: Mapping[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: Mapping[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    begins, ends = _pads(x.shape[2:], weight.shape[2:], strides, dilations, auto_pad, pads)
    if begins != ends:
        # torch pads both ends equally.
        x, begins = F.pad(x, torch_pad_order(begins, ends)), [0] * rank
    return CONV[rank](x, weight, bias, strides, begins, dilations, group)


def _pads(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    auto_pad: str,
    pads: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """Padding at begins and ends. Source: ONNX, Conv, `auto_pad`: SAME yields ceil(size / stride) windows."""
    rank = len(sizes)
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        given = [0] * (2 * rank) if pads is None or auto_pad == "VALID" else list(pads)
        return given[:rank], given[rank:]
    totals = [
        max(0, (math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size)
        for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    return _split_padding(totals, auto_pad)


def _split_padding(totals: Sequence[int], auto_pad: str) -> tuple[list[int], list[int]]:
    less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (less, more) if auto_pad == "SAME_UPPER" else (more, less)


def torch_pad_order(begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Pads in the order of `F.pad`: begin and end of the last axis first."""
    return [side for pair in reversed(list(zip(begins, ends, strict=True))) for side in pair]


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Source: ONNX, ConvTranspose. weight: [C, K / groups, kernel...]."""
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    further = list(output_padding or [0] * rank)
    reached = [
        (size - 1) * stride + (k - 1) * dilation + 1
        for size, k, stride, dilation in zip(x.shape[2:], weight.shape[2:], strides, dilations, strict=True)
    ]
    if output_shape is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # Runtimes do not extend the output where a stride exceeds the kernel's extent.
        output_shape = [
            min(size * stride, r + f) for size, stride, r, f in zip(x.shape[2:], strides, reached, further, strict=True)
        ]
    if output_shape is not None:
        wanted = output_shape[-rank:]
        totals = [max(0, r + f - w) for r, f, w in zip(reached, further, wanted, strict=True)]
        begins, ends = _split_padding(totals, auto_pad)
    else:
        given = list(pads) if pads is not None and auto_pad != "VALID" else [0] * (2 * rank)
        begins, ends = given[:rank], given[rank:]
        wanted = [r + f - b - e for r, f, b, e in zip(reached, further, begins, ends, strict=True)]
    run = _CONV_TRANSPOSE[rank]
    beyond = [w + b - r for w, b, r in zip(wanted, begins, reached, strict=True)]
    symmetric = [b + rest for b, rest in zip(begins, beyond, strict=True)]
    if all(0 <= f < max(s, d) for f, s, d in zip(symmetric, strides, dilations, strict=True)):
        # torch crops both ends equally, and extends the end.
        return run(x, weight, bias, strides, begins, symmetric, group, dilations)
    y = run(x, weight, None, strides, 0, 0, group, dilations)
    y = F.pad(y, torch_pad_order([-b for b in begins], beyond))
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - ONNX's own names
    transB: int = 0,  # noqa: N803
) -> Tensor:
    """alpha a b + beta c, as a linear layer where possible."""
    a = a.t() if transA else a
    if alpha == 1 and (c is None or (beta == 1 and c.shape == (b.shape[0 if transB else 1],))):
        return F.linear(a, b if transB else b.t(), c)
    b = b.t() if transB else b
    if c is None or beta == 0:
        return alpha * (a @ b)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *operands)
