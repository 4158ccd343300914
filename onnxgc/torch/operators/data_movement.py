"""Operators that move elements and change shapes."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.torch.operators.products import torch_pad_order
from onnxgc.torch.operators.setting_values import Ints, Number, ints, number


def reshape(x: Tensor, shape: Ints, *, allowzero: int = 0) -> Tensor:
    """A size of 0 copies the size of x, unless `allowzero`."""
    sizes = ints(shape)
    if not allowzero:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(ints(axes)))


def unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    along = ints(axes)
    rank = x.ndim + len(along)
    for axis in sorted(axis % rank for axis in along):
        x = x.unsqueeze(axis)
    return x


def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(list(perm) if perm is not None else list(reversed(range(x.ndim))))


def expand(x: Tensor, shape: Ints) -> Tensor:
    """Expands x to the broadcast of its shape and `shape`."""
    sizes = ints(shape)
    whole = [1] * (x.ndim - len(sizes)) + sizes
    lead = len(whole) - x.ndim
    # A size of 1 keeps the size of x.
    return x.expand([size if size != 1 or axis < lead else -1 for axis, size in enumerate(whole)])


def tile(x: Tensor, repeats: Ints) -> Tensor:
    return x.repeat(ints(repeats))


def concat(*operands: Tensor, axis: int) -> Tensor:
    return torch.cat(operands, axis)


def split(
    x: Tensor, sizes: Ints | None = None, *, outputs: int, axis: int = 0, num_outputs: int | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Without `sizes` into equal parts, of which the last may be smaller."""
    each = ints(sizes) if sizes is not None else math.ceil(x.shape[axis] / (num_outputs or outputs))
    parts: tuple[Tensor, ...] = torch.split(x, each, axis)
    return parts[0] if outputs == 1 else parts


def slice_(x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> Tensor:
    begins, stops = ints(starts), ints(ends)
    along = [axis % x.ndim for axis in ints(axes)] if axes is not None else list(range(len(begins)))
    strides = ints(steps) if steps is not None else [1] * len(begins)
    taken = [slice(None)] * x.ndim
    flipped = []
    for axis, begin, stop, step in zip(along, begins, stops, strides, strict=True):
        indices = _slice_range(begin, stop, step, x.shape[axis])
        if step < 0:
            # torch slices forwards only: the same elements are sliced, then flipped.
            indices = indices[::-1]
            flipped.append(axis)
        taken[axis] = slice(indices.start, max(indices.stop, indices.start), indices.step)
    part = x[tuple(taken)]
    return part.flip(flipped) if flipped else part


def _slice_range(begin: int, stop: int, step: int, extent: int) -> range:
    """Indices of a slice. Source: ONNX, Slice: negative bounds count from the end, then both are clamped."""
    begin, stop = (bound + extent if bound < 0 else bound for bound in (begin, stop))
    if step < 0:
        return range(min(max(begin, 0), extent - 1), min(max(stop, -1), extent - 1), step)
    return range(min(max(begin, 0), extent), min(max(stop, 0), extent), step)


def pad(
    x: Tensor, pads: Ints, value: Number | None = None, axes: Ints | None = None, *, mode: str = "constant"
) -> Tensor:
    """Negative pads crop, for constants after padding and otherwise before it."""
    given = ints(pads)
    along = [axis % x.ndim for axis in ints(axes)] if axes is not None else list(range(x.ndim))
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for axis, begin, end in zip(along, given, given[len(along) :], strict=False):
        begins[axis], ends[axis] = begin, end
    added = [max(size, 0) for size in begins], [max(size, 0) for size in ends]
    if mode == "constant":
        return _crop(_pad_constant(x, torch_pad_order(*added), value), begins, ends)
    x = _crop(x, begins, ends)
    for axis, (begin, end) in enumerate(zip(*added, strict=True)):
        if begin or end:
            x = _pad_axis(x, axis, begin, end, mode)
    return x


def _pad_constant(x: Tensor, pads: list[int], value: Number | None) -> Tensor:
    if isinstance(value, Tensor):
        # A learned value gets its gradient.
        inside = F.pad(torch.ones_like(x, dtype=torch.bool), pads)
        return torch.where(inside, F.pad(x, pads), value)
    return F.pad(x, pads, value=0 if value is None else number(value))


def _crop(x: Tensor, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
    for axis, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin < 0 or end < 0:
            front = max(-begin, 0)
            x = x.narrow(axis, front, x.shape[axis] - front - max(-end, 0))
    return x


def _pad_axis(x: Tensor, axis: int, begin: int, end: int, mode: str) -> Tensor:
    """Pads one axis, so that any number of axes can be padded."""
    extent = x.shape[axis]
    sources = [_source_index(index, extent, mode) for index in range(-begin, extent + end)]
    return x.index_select(axis, torch.tensor(sources, device=x.device))


def _source_index(index: int, extent: int, mode: str) -> int:
    if mode == "edge":
        return min(max(index, 0), extent - 1)
    if mode == "wrap":
        return index % extent
    period = max(1, 2 * (extent - 1))
    return min(index % period, period - index % period) if extent > 1 else 0


def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """x: [N, C, H, W]. CRD is torch's pixel_shuffle."""
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, blocksize, blocksize, channels // blocksize**2, height, width)
    moved = parts.permute(0, 3, 4, 1, 5, 2)
    return moved.reshape(batch, channels // blocksize**2, height * blocksize, width * blocksize)


def space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    """x: [N, C, H, W]."""
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // blocksize, blocksize, width // blocksize, blocksize)
    moved = parts.permute(0, 3, 5, 1, 2, 4)
    return moved.reshape(batch, channels * blocksize**2, height // blocksize, width // blocksize)


def col2im(
    x: Tensor,
    image_shape: Ints,
    block_shape: Ints,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Sums overlapping blocks x: [N, C k, L] into an image, with k elements per block and L blocks."""
    image, block = ints(image_shape), ints(block_shape)
    rank = len(image)
    strides, dilations, pads = strides or [1] * rank, dilations or [1] * rank, pads or [0] * (2 * rank)
    padded = [size + begin + end for size, begin, end in zip(image, pads, pads[rank:], strict=False)]
    counts = [
        (size - dilation * (k - 1) - 1) // stride + 1
        for size, k, stride, dilation in zip(padded, block, strides, dilations, strict=True)
    ]
    columns = x.reshape(-1, math.prod(block) * math.prod(counts))
    indices = _block_indices(padded, block, counts, strides, dilations).to(x.device)
    flat = columns.new_zeros(columns.shape[0], math.prod(padded)).index_add(1, indices, columns)
    crops = [-size for size in pads]
    return F.pad(flat.reshape(x.shape[0], -1, *padded), torch_pad_order(crops[:rank], crops[rank:]))


def _block_indices(
    image: Sequence[int], block: Sequence[int], counts: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Tensor:
    """The index in the flat image of each element of each block: [elements x blocks]."""
    rank = len(image)
    flat = torch.zeros(1, dtype=torch.int64)
    for axis in range(rank):
        inner = torch.arange(block[axis]) * dilations[axis]
        outer = torch.arange(counts[axis]) * strides[axis]
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = block[axis], counts[axis]
        flat = flat * image[axis] + (inner[:, None] + outer).reshape(shape)
    return flat.reshape(-1)


def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """Reverses the first `lengths[i]` elements of sample i."""
    steps = torch.arange(x.shape[time_axis], device=x.device)
    each = lengths.to(steps.dtype).unsqueeze(1)
    source = torch.where(steps < each, each - 1 - steps, steps)
    shape = [1] * x.ndim
    shape[batch_axis], shape[time_axis] = x.shape[batch_axis], x.shape[time_axis]
    source = (source if batch_axis < time_axis else source.t()).reshape(shape)
    return x.gather(time_axis, source.expand(x.shape))
