"""Pooling. x: [N, C, spatial...]; the reader replaces `auto_pad` by explicit padding."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.torch.operators.products import CONV, torch_pad_order
from onnxgc.torch.operators.setting_values import Ints, ints

_MAX_POOL: Mapping[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_MAX_POOL_ALONE: Mapping[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL: Mapping[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _Windows:
    """Sliding windows, with defaults filled in."""

    def __init__(
        self,
        x: Tensor,
        kernel_shape: Sequence[int],
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
        ceil_mode: int,
    ) -> None:
        self.rank = rank = x.ndim - 2
        self.kernel = list(kernel_shape)
        self.strides, self.dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
        given = list(pads or [0] * (2 * rank))
        self.begins, self.ends = given[:rank], given[rank:]
        self.ceil_mode = bool(ceil_mode)
        self.reaches = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        self.sizes = list(x.shape[2:])

    @property
    def suits_torch(self) -> bool:
        """Whether torch supports the padding: equal at both ends, and at most half a window."""
        halves = (begin <= k // 2 for begin, k in zip(self.begins, self.kernel, strict=True))
        return self.begins == self.ends and all(halves)

    def whole_ends(self) -> list[int]:
        """Padding at the end up to the last window.

        Source: ONNX, MaxPool, `ceil_mode`: no window begins in the padding at the end.
        """
        if not self.ceil_mode:
            return self.ends
        ends = []
        for axis, size in enumerate(self.sizes):
            begin, stride, reach = self.begins[axis], self.strides[axis], self.reaches[axis]
            last = math.ceil((size + begin + self.ends[axis] - reach) / stride)
            last -= last * stride >= size + begin
            ends.append(last * stride + reach - size - begin)
        return ends


def max_pool(
    x: Tensor,
    *,
    outputs: int,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    w = _Windows(x, kernel_shape, strides, dilations, pads, ceil_mode)
    padded, begins, ceils = x, w.begins, w.ceil_mode
    if not w.suits_torch:
        least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        padded = F.pad(x, torch_pad_order(w.begins, w.whole_ends()), value=least)
        begins, ceils = [0] * w.rank, False
    settings = (w.kernel, w.strides, begins, w.dilations, ceils)
    if outputs == 1:
        return _MAX_POOL_ALONE[w.rank](padded, *settings)
    y, positions = _MAX_POOL[w.rank](padded, *settings)
    shifts = [0] * w.rank if w.suits_torch else w.begins
    return y, _flat_indices(x, positions, padded.shape[2:], shifts, by_columns=bool(storage_order))


def _flat_indices(
    x: Tensor, positions: Tensor, padded: Sequence[int], shifts: Sequence[int], *, by_columns: bool
) -> Tensor:
    """Indices into padded images as flat indices into x. Source: ONNX, MaxPool, Indices."""
    sizes = x.shape[2:]
    coordinates = []
    for size, shift in zip(reversed(padded), reversed(shifts), strict=True):
        coordinates.append(positions % size - shift)
        positions = positions // size
    if not by_columns:
        coordinates.reverse()
    extents = reversed(sizes) if by_columns else sizes
    images = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    flat = images.reshape(*x.shape[:2], *[1] * len(sizes))
    for extent, coordinate in zip(extents, coordinates, strict=True):
        flat = flat * extent + coordinate
    return flat


def max_unpool(
    x: Tensor,
    indices: Tensor,
    output_shape: Ints | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Scatters x into zeros, at flat indices of an image without `output_shape`, to which zeros are added.

    Source: ONNX's reference and test cases; ONNX Runtime reads indices of an image of `output_shape`.
    """
    rank = x.ndim - 2
    steps, around = strides or [1] * rank, pads or [0] * (2 * rank)
    sizes = [
        (size - 1) * steps[axis] + kernel_shape[axis] - around[axis] - around[rank + axis]
        for axis, size in enumerate(x.shape[2:])
    ]
    shape = [*x.shape[:2], *sizes]
    flat = x.new_zeros(math.prod(shape)).scatter(0, indices.reshape(-1), x.reshape(-1))
    image = flat.reshape(shape)
    if output_shape is None:
        return image
    added = [wanted - size for wanted, size in zip(ints(output_shape)[2:], sizes, strict=True)]
    return F.pad(image, torch_pad_order([0] * rank, added))


def average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    w = _Windows(x, kernel_shape, strides, dilations, pads, ceil_mode)
    if w.suits_torch and set(w.dilations) == {1}:
        counts_pads = bool(count_include_pad)
        return _AVERAGE_POOL[w.rank](x, w.kernel, w.strides, w.begins, w.ceil_mode, counts_pads)
    ones = x.new_ones(1, 1, *w.sizes)
    around = torch_pad_order(w.begins, w.whole_ends())
    if count_include_pad:
        # Positions past the padding, under ceil_mode, never count.
        ones = F.pad(ones, torch_pad_order(w.begins, w.ends), value=1.0)
        rest = [whole - end for whole, end in zip(w.whole_ends(), w.ends, strict=True)]
        counts = _window_sum(F.pad(ones, torch_pad_order([0] * w.rank, rest)), w)
    else:
        counts = _window_sum(F.pad(ones, around), w)
    return _window_sum(F.pad(x, around), w) / counts


def _window_sum(padded: Tensor, w: _Windows) -> Tensor:
    """Sums over windows, as convolution of each image with ones."""
    images = padded.reshape(-1, 1, *padded.shape[2:])
    ones = padded.new_ones(1, 1, *w.kernel)
    sums = CONV[w.rank](images, ones, None, w.strides, 0, w.dilations)
    return sums.reshape(*padded.shape[:2], *sums.shape[2:])


def lp_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    w = _Windows(x, kernel_shape, strides, dilations, pads, ceil_mode)
    powers = F.pad(_absolute_power(x, p), torch_pad_order(w.begins, w.whole_ends()))
    return _root(_window_sum(powers, w), p)


def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    return _root(_absolute_power(x, p).sum(dim=tuple(range(2, x.ndim)), keepdim=True), p)


def _absolute_power(x: Tensor, p: int) -> Tensor:
    return x.abs() if p == 1 else x.abs().pow(p)


def _root(total: Tensor, p: int) -> Tensor:
    """The p-th root of each sum; the root of 0 is 0 and has no gradient."""
    if p == 1:
        return total
    is_zero = total == 0
    return total.masked_fill(is_zero, 1).pow(1 / p).masked_fill(is_zero, 0)


def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(dim=tuple(range(2, x.ndim)), keepdim=True)


def global_max_pool(x: Tensor) -> Tensor:
    return x.flatten(2).max(dim=2).values.reshape(*x.shape[:2], *[1] * (x.ndim - 2))
