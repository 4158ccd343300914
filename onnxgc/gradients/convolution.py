"""Gradients of convolution and transposed convolution, in the form that suits their sizes.

x: [N, C, spatial...], w: [K, C / groups, kernel...], y, dy: [N, K, output...]. P is the number of
output positions of one image, G the number of groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import reduce_sum, reshape
from onnxgc.gradients.windows import Windows, transposed_windows_of, windows_of

_MAX_PARTS = 8
# Columns of a matrix product below which its overhead matters.
_MIN_COLUMNS = 1 << 14
# Sums by offset read the same few tensors repeatedly, which is fast while these stay in the cache.
_CACHE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Convolution:
    """The static properties of one convolution."""

    windows: Windows
    batch: int
    channels_in: int
    channels_out: int
    groups: int

    @property
    def positions(self) -> int:
        return math.prod(self.windows.output_size)

    @property
    def is_pointwise(self) -> bool:
        return self.groups == 1 and not self.windows.is_padded and all(k == 1 for k in self.windows.kernel)

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.channels_in == self.channels_out

    @property
    def is_strided(self) -> bool:
        return any(stride > 1 for stride in self.windows.strides)

    @property
    def is_stem(self) -> bool:
        """Few input channels and a large kernel: one product per offset would be mostly overhead."""
        return self.groups == 1 and self.channels_in <= 4 and all(k >= 5 for k in self.windows.kernel)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One way to compute dw. The first applicable form is used, on at most `max_parts` parts of the batch."""

    name: str
    applies: Callable[[Convolution], bool]
    build: Callable[[GradientContext, Convolution, str, str], str]
    max_parts: Callable[[Convolution], int]


def conv(g: GradientContext) -> None:
    """y = x * w + b."""
    shape_w = g.input_shape(1)
    batch, channels_in = g.input_shape(0)[:2]
    convolution = Convolution(
        windows_of(g, shape_w[2:]), batch, channels_in, shape_w[0], int(g.attribute("group", 1))
    )
    if g.wants(2):
        g.give(2, reduce_sum(g, g.dy, (0, *range(2, len(shape_w)))))
    # The weight's gradient comes before x's: it is the last reader of x, which can then be released.
    if g.wants(1):
        g.give(1, _weight_gradient(g, convolution, g.x(0), g.dy))
    if g.wants(0):
        g.give(0, _input_gradient(g, convolution))


def conv_transpose(g: GradientContext) -> None:
    """y = transposed convolution of x by w, plus b.

    dx is the convolution of dy by w. dw is the weight gradient of that convolution, with dy as its input and
    x as the gradient of its output. x: [N, C, spatial...], w: [C, K / groups, kernel...].
    """
    shape_w = g.input_shape(1)
    batch, channels = g.output_shape()[:2]
    windows = transposed_windows_of(g, shape_w[2:])
    convolution = Convolution(windows, batch, channels, shape_w[0], int(g.attribute("group", 1)))
    if g.wants(2):
        g.give(2, reduce_sum(g, g.dy, (0, *range(2, len(shape_w)))))
    if g.wants(1):
        g.give(1, _weight_gradient(g, convolution, g.dy, g.x(0)))
    if g.wants(0):
        g.give(0, _convolved_dy(g, convolution))


def _convolved_dy(g: GradientContext, c: Convolution) -> str:
    """The convolution of dy by w: the input gradient of a transposed convolution."""
    return g.emit(
        "Conv",
        g.dy,
        g.x(1),
        kernel_shape=list(c.windows.kernel),
        strides=list(c.windows.strides),
        dilations=list(c.windows.dilations),
        pads=c.windows.pads,
        group=c.groups,
    )


def _weight_gradient(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw by the first applicable form, in parts of the batch where images are large.

    Every form rearranges x and dy; with parts, only one part of each is copied at a time.
    """
    form = next(form for form in WEIGHT_FORMS["cpu"] if form.applies(c))
    parts = _parts(c, form)
    if parts == 1:
        return form.build(g, c, x, dy)
    images = c.batch // parts
    total = ""
    for start in range(0, c.batch, images):
        span = (g.ints(start), g.ints(start + images), g.ints(0))
        part_x, part_dy = g.emit("Slice", x, *span), g.emit("Slice", dy, *span)
        piece = form.build(g, replace(c, batch=images), part_x, part_dy)
        total = g.emit("Add", total, piece) if total else piece
    return total


def _parts(c: Convolution, form: WeightForm) -> int:
    """The largest number of equal parts of the batch that the form allows."""
    limit = min(_MAX_PARTS, form.max_parts(c))
    return max((parts for parts in range(1, limit + 1) if c.batch % parts == 0), default=1)


def _parts_by_columns(c: Convolution) -> int:
    """Parts whose matrix products all have `_MIN_COLUMNS` columns."""
    return c.batch * c.positions // _MIN_COLUMNS


def _parts_by_cache(c: Convolution) -> int:
    """Parts of x that fit into a processor's cache, but few: each has several nodes per kernel element."""
    elements = c.batch * c.channels_in * math.prod(c.windows.input_size)
    return min(_MAX_PARTS // 2, -(-elements // _CACHE_ELEMENTS))


def _input_gradient(g: GradientContext, c: Convolution) -> str:
    """dx by a transposed convolution; for kernels of 1, by a convolution with the transposed weight."""
    if c.is_pointwise and not c.is_strided:
        transposed = g.emit("Transpose", g.x(1), perm=[1, 0, *range(2, 2 + c.windows.rank)])
        return g.emit("Conv", g.dy, transposed, kernel_shape=list(c.windows.kernel))
    return g.emit("ConvTranspose", g.dy, g.x(1), group=c.groups, **c.windows.transposed())


def _pointwise(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw = sum over images and positions of dy x^T, by the product that needs the least memory."""
    p = c.positions
    if c.is_strided:
        x = _strided(g, x, c.windows, (0,) * c.windows.rank)
    x_size, dy_size = c.batch * c.channels_in * p, c.batch * c.channels_out * p
    product_size = c.batch * c.channels_in * c.channels_out
    if x_size + dy_size < min(x_size, dy_size) + product_size:
        columns = _channels_first(g, x, c.channels_in, c.batch * p)
        rows = _channels_first(g, dy, c.channels_out, c.batch * p)
        gradient = g.emit("Gemm", rows, columns, transB=1)
        return reshape(g, gradient, g.input_shape(1))
    x = reshape(g, x, (c.batch, c.channels_in, p))
    dy = reshape(g, dy, (c.batch, c.channels_out, p))
    if x_size <= dy_size:
        product = g.emit("MatMul", dy, g.emit("Transpose", x, perm=[0, 2, 1]))
        return reshape(g, reduce_sum(g, product, (0,)), g.input_shape(1))
    product = g.emit("MatMul", x, g.emit("Transpose", dy, perm=[0, 2, 1]))
    gradient = g.emit("Transpose", reduce_sum(g, product, (0,)), perm=[1, 0])
    return reshape(g, gradient, g.input_shape(1))


def _channels_first(g: GradientContext, tensor: str, channels: int, columns: int) -> str:
    """[N, C, ...] as the matrix [C, N P]."""
    rank = 2 + len(g.output_shape()[2:])
    transposed = g.emit("Transpose", tensor, perm=[1, 0, *range(2, rank)])
    return reshape(g, transposed, (channels, columns))


def _padded(g: GradientContext, tensor: str, windows: Windows, lead: int) -> str:
    """`tensor` with the convolution's padding; `lead` axes come before the spatial ones."""
    if not windows.is_padded:
        return tensor
    pads = (*(0,) * lead, *windows.pads_begin, *(0,) * lead, *windows.pads_end)
    return g.emit("Pad", tensor, g.ints(*pads))


def _offsets(windows: Windows) -> Iterator[tuple[int, ...]]:
    yield from itertools.product(*(range(size) for size in windows.kernel))


def _strided(
    g: GradientContext, padded: str, windows: Windows, offset: tuple[int, ...], first_axis: int = 2
) -> str:
    """The elements of the padded input that the kernel element at `offset` reads, per output position."""
    starts = [k * d for k, d in zip(offset, windows.dilations, strict=True)]
    ends = [
        start + (out - 1) * stride + 1
        for start, out, stride in zip(starts, windows.output_size, windows.strides, strict=True)
    ]
    axes = range(first_axis, first_axis + windows.rank)
    return g.emit("Slice", padded, g.ints(*starts), g.ints(*ends), g.ints(*axes), g.ints(*windows.strides))


def _by_offset(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """One product [K, N P] x [C, N P]^T for each kernel element."""
    columns = c.batch * c.positions
    rows = _channels_first(g, dy, c.channels_out, columns)
    padded = _padded(g, x, c.windows, 2)
    transposed = g.emit("Transpose", padded, perm=[1, 0, *range(2, 2 + c.windows.rank)])
    parts = []
    for offset in _offsets(c.windows):
        read = reshape(g, _strided(g, transposed, c.windows, offset), (c.channels_in, columns))
        product = g.emit("Gemm", rows, read, transB=1)
        parts.append(g.emit("Unsqueeze", product, g.ints(2)))
    return _stacked(g, parts)


def _stacked(g: GradientContext, parts: list[str]) -> str:
    """Parts [K, C, 1], one per kernel element, joined in the weight's shape."""
    stacked = parts[0] if len(parts) == 1 else g.emit("Concat", *parts, axis=2)
    return reshape(g, stacked, g.input_shape(1))


def _grouped(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """As `_by_offset`, with all groups in one batched product [G, K/G, N P] x [G, N P, C/G]."""
    rank, columns = c.windows.rank, c.batch * c.positions
    per_in, per_out = c.channels_in // c.groups, c.channels_out // c.groups
    spatial = tuple(range(3, 3 + rank))
    dy = reshape(g, dy, (c.batch, c.groups, per_out, *c.windows.output_size))
    dy = g.emit("Transpose", dy, perm=[1, 2, 0, *spatial])
    rows = reshape(g, dy, (c.groups, per_out, columns))
    x = reshape(g, x, (c.batch, c.groups, per_in, *c.windows.input_size))
    padded = _padded(g, x, c.windows, 3)
    transposed = g.emit("Transpose", padded, perm=[1, 0, *spatial, 2])
    parts = []
    for offset in _offsets(c.windows):
        read = _strided(g, transposed, c.windows, offset, first_axis=2)
        product = g.emit("MatMul", rows, reshape(g, read, (c.groups, columns, per_in)))
        parts.append(reshape(g, product, (c.channels_out, per_in, 1)))
    return _stacked(g, parts)


def _depthwise(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw[c, k] = sum of dy[:, c] x[:, c] shifted by k."""
    padded = _padded(g, x, c.windows, 2)
    axes = (0, *range(2, 2 + c.windows.rank))
    parts = []
    for offset in _offsets(c.windows):
        product = g.emit("Mul", dy, _strided(g, padded, c.windows, offset))
        parts.append(reshape(g, reduce_sum(g, product, axes), (c.channels_out, 1, 1)))
    return _stacked(g, parts)


def _cropped_to_windows(g: GradientContext, tensor: str, windows: Windows) -> str:
    """`tensor` without the elements at the end of each axis that no window covers."""
    ends = [size + min(over, 0) for size, over in zip(windows.input_size, windows.overshoot, strict=True)]
    cropped = [axis for axis, end in enumerate(ends) if end < windows.input_size[axis]]
    if not cropped:
        return tensor
    starts, stops = g.ints(*(0 for _ in cropped)), g.ints(*(ends[axis] for axis in cropped))
    return g.emit("Slice", tensor, starts, stops, g.ints(*(2 + axis for axis in cropped)))


def _exchanged(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """Convolution of x by dy, with batch and channels exchanged, and strides and dilations exchanged."""
    rank = c.windows.rank
    swap = [1, 0, *range(2, 2 + rank)]
    x = g.emit("Transpose", _cropped_to_windows(g, x, c.windows), perm=swap)
    dy = g.emit("Transpose", dy, perm=swap)
    gradient = g.emit(
        "Conv",
        x,
        dy,
        kernel_shape=list(c.windows.output_size),
        strides=list(c.windows.dilations),
        dilations=list(c.windows.strides),
        pads=[*c.windows.pads_begin, *c.windows.end_pads_used],
    )
    return g.emit("Transpose", gradient, perm=swap)


WEIGHT_FORMS: dict[str, tuple[WeightForm, ...]] = {
    "cpu": (
        WeightForm("pointwise", lambda c: c.is_pointwise, _pointwise, _parts_by_columns),
        WeightForm("depthwise", lambda c: c.is_depthwise and c.groups > 1, _depthwise, _parts_by_cache),
        WeightForm("grouped", lambda c: c.groups > 1, _grouped, _parts_by_columns),
        WeightForm("exchanged", lambda c: c.is_stem, _exchanged, _parts_by_columns),
        WeightForm("by offset", lambda c: True, _by_offset, _parts_by_columns),
    ),
}
