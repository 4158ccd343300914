"""The gradient of a convolution's weight, in the form that suits its sizes and the execution provider.

x: [N, C, spatial...], w: [K, C / groups, kernel...], dy: [N, K, output...]. P is the number of output
positions of one image, G the number of groups, k the number of kernel elements.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import channel_sums, product, reduce_sum, reshape, sum_over
from onnxgc.gradients.windows import Windows
from onnxgc.model.core.ir import Array

_MAX_PARTS = 8
# Columns of a matrix product below which its overhead matters.
_MIN_COLUMNS = 1 << 14
# Sums by offset read the same few tensors repeatedly, which is fast while these stay in the cache.
_CACHE_ELEMENTS = 1 << 18
_MAX_INDEX = 1 << 31
# Elements of an index that may be a constant, shared by all convolutions of the same windows.
_MAX_CONSTANT_INDEX = 1 << 15


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
    """One way to compute dw, on `parts` equal parts of the batch; the first applicable form is used."""

    name: str
    applies: Callable[[Convolution], bool]
    build: Callable[[GradientContext, Convolution, str, str], str]
    parts: Callable[[GradientContext, Convolution], int]


def weight_gradient(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw by the first applicable form of the provider, in parts of the batch if the form asks for them.

    Every form rearranges x and dy; with parts, only one part of each is copied at a time.
    """
    form = next(form for form in WEIGHT_FORMS[g.provider] if form.applies(c))
    parts = form.parts(g, c)
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


def _equal_parts(c: Convolution, wanted: int) -> int:
    """The largest number of equal parts of the batch, at most `wanted`."""
    return max((parts for parts in range(1, wanted + 1) if c.batch % parts == 0), default=1)


def _parts_by_columns(g: GradientContext, c: Convolution) -> int:
    """Parts whose matrix products all have `_MIN_COLUMNS` columns."""
    return _equal_parts(c, min(_MAX_PARTS, c.batch * c.positions // _MIN_COLUMNS))


def _parts_by_cache(g: GradientContext, c: Convolution) -> int:
    """Parts of x that fit into a processor's cache, but few: each has several nodes per kernel element."""
    elements = c.batch * c.channels_in * math.prod(c.windows.input_size)
    return _equal_parts(c, min(_MAX_PARTS // 2, -(-elements // _CACHE_ELEMENTS)))


def _whole_batch(g: GradientContext, c: Convolution) -> int:
    return 1


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
        by_image = g.emit("MatMul", dy, g.emit("Transpose", x, perm=[0, 2, 1]))
        return reshape(g, reduce_sum(g, by_image, (0,)), g.input_shape(1))
    by_image = g.emit("MatMul", x, g.emit("Transpose", dy, perm=[0, 2, 1]))
    gradient = g.emit("Transpose", reduce_sum(g, by_image, (0,)), perm=[1, 0])
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


def _strided(g: GradientContext, padded: str, windows: Windows, offset: tuple[int, ...], first_axis: int = 2) -> str:
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
        summed = g.emit("Gemm", rows, read, transB=1)
        parts.append(g.emit("Unsqueeze", summed, g.ints(2)))
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
        summed = g.emit("MatMul", rows, reshape(g, read, (c.groups, columns, per_in)))
        parts.append(reshape(g, summed, (c.channels_out, per_in, 1)))
    return _stacked(g, parts)


def _depthwise(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw[c, k] = sum of dy[:, c] x[:, c] shifted by k."""
    padded = _padded(g, x, c.windows, 2)
    shape = (c.batch, c.channels_out, *c.windows.output_size)
    parts = []
    for offset in _offsets(c.windows):
        scaled = g.emit("Mul", dy, _strided(g, padded, c.windows, offset))
        parts.append(reshape(g, channel_sums(g, scaled, shape), (c.channels_out, 1, 1)))
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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Elements of the tensors from which a weight gradient is computed by columns."""

    x: int
    dy: int
    columns: int
    products: int

    @classmethod
    def of_convolution(cls, c: Convolution) -> "_Sizes":
        kernel = math.prod(c.windows.kernel)
        return cls(
            c.batch * c.channels_in * math.prod(c.windows.input_size),
            c.batch * c.channels_out * c.positions,
            c.batch * c.channels_in * kernel * c.positions,
            c.batch * c.channels_in * kernel * c.channels_out // c.groups,
        )

    @property
    def by_image(self) -> bool:
        """Whether a product for each image, whose results are added, moves less than copies of x and dy."""
        return self.products <= self.x + self.dy


def _parts_by_memory(g: GradientContext, c: Convolution) -> int:
    """The fewest parts whose columns and copies fit into the memory for them, and an index into 32 bits."""
    item = g.input_type(0).size_bytes // max(g.input_type(0).element_count, 1)
    for parts in range(1, c.batch + 1):
        if c.batch % parts == 0:
            sizes = _Sizes.of_convolution(replace(c, batch=c.batch // parts))
            sliced = sizes.x + sizes.dy if parts > 1 else 0
            beside = sizes.products if sizes.by_image else sizes.dy
            temporary = sliced + sizes.columns + max(sizes.x, beside)
            if temporary * item <= g.column_bytes and sizes.columns < _MAX_INDEX:
                return parts
    return c.batch


def _pointwise_in_place(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """As `_pointwise`, without copies of x and dy where a product for each image moves less."""
    if c.is_strided:
        x = _strided(g, x, c.windows, (0,) * c.windows.rank)
    if _Sizes.of_convolution(c).by_image:
        rows = reshape(g, dy, (c.batch, c.channels_out, c.positions))
        columns = reshape(g, x, (c.batch, c.channels_in, c.positions))
        products = product(g, rows, columns, (3, 3), transpose_right=True)
        gradient = sum_over(g, products, (c.batch, c.channels_out, c.channels_in), (0,))
    else:
        rows = _channels_first(g, dy, c.channels_out, c.batch * c.positions)
        columns = _channels_first(g, x, c.channels_in, c.batch * c.positions)
        gradient = g.emit("Gemm", rows, columns, transB=1)
    return reshape(g, gradient, g.input_shape(1))


def _by_columns(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw = dy columns^T, with the elements of x's windows gathered as columns.

    One product for each image, [K, P] x [C k, P]^T; or one of the whole batch, [N P, K]^T x [N P, k C], for
    which channels come last. Groups are an axis of the batched product.
    """
    per_in, per_out = c.channels_in // c.groups, c.channels_out // c.groups
    kernel, p = math.prod(c.windows.kernel), c.positions
    padded = _padded(g, x, c.windows, 2)
    size = math.prod(c.windows.padded_size)
    if _Sizes.of_convolution(c).by_image:
        flat = reshape(g, padded, (c.batch, c.channels_in, size))
        columns = g.emit("Gather", flat, _window_index(g, c.windows, kernel_first=True), axis=2)
        columns = reshape(g, columns, (c.batch, c.groups, per_in * kernel, p))
        rows = reshape(g, dy, (c.batch, c.groups, per_out, p))
        products = product(g, rows, columns, (4, 4), transpose_right=True)
        gradient = sum_over(g, products, (c.batch, c.groups, per_out, per_in * kernel), (0,))
        return reshape(g, gradient, g.input_shape(1))
    flat = reshape(g, padded, (c.batch, c.groups, per_in, size))
    flat = g.emit("Transpose", flat, perm=[1, 0, 3, 2])
    columns = g.emit("Gather", flat, _window_index(g, c.windows, kernel_first=False), axis=2)
    columns = reshape(g, columns, (c.groups, c.batch * p, kernel * per_in))
    rows = reshape(g, dy, (c.batch, c.groups, per_out, p))
    rows = reshape(g, g.emit("Transpose", rows, perm=[1, 0, 3, 2]), (c.groups, c.batch * p, per_out))
    gradient = reshape(g, product(g, rows, columns, (3, 3), transpose_left=True), (c.channels_out, kernel, per_in))
    return reshape(g, g.emit("Transpose", gradient, perm=[0, 2, 1]), g.input_shape(1))


def _window_index(g: GradientContext, windows: Windows, *, kernel_first: bool) -> str:
    """The position in a flat padded image of each element that each window reads: int32 [k P] or [P k].

    A large one is the sum of two small constants, since constants stay resident.
    """
    strides = [math.prod(windows.padded_size[axis + 1 :]) for axis in range(windows.rank)]
    inside = _grid(windows.kernel, [d * stride for d, stride in zip(windows.dilations, strides, strict=True)])
    starts = [step * stride for step, stride in zip(windows.strides, strides, strict=True)]
    *outer, last = windows.output_size
    rows, columns = _grid(outer, starts[:-1]), _grid([last], starts[-1:])
    if kernel_first:
        terms = np.add.outer(inside, rows)[:, :, None], columns
    else:
        terms = rows[:, None, None], np.add.outer(columns, inside)
    first, second = (term.astype(np.int32) for term in terms)
    if inside.size * rows.size * columns.size <= _MAX_CONSTANT_INDEX:
        return g.constants.add((first + second).reshape(-1))
    return reshape(g, g.emit("Add", g.constants.add(first), g.constants.add(second)), (-1,))


def _grid(sizes: Sequence[int], strides: Sequence[int]) -> Array:
    """Sums of multiples of strides, as many as there are positions in a grid of `sizes`: flat."""
    axes = [np.arange(size) * stride for size, stride in zip(sizes, strides, strict=True)]
    return functools.reduce(np.add.outer, axes, np.zeros((), np.int64)).reshape(-1)


WEIGHT_FORMS: Mapping[str, tuple[WeightForm, ...]] = {
    "cpu": (
        WeightForm("pointwise", lambda c: c.is_pointwise, _pointwise, _parts_by_columns),
        WeightForm("depthwise", lambda c: c.is_depthwise and c.groups > 1, _depthwise, _parts_by_cache),
        WeightForm("grouped", lambda c: c.groups > 1, _grouped, _parts_by_columns),
        WeightForm("exchanged", lambda c: c.is_stem, _exchanged, _parts_by_columns),
        WeightForm("by offset", lambda c: True, _by_offset, _parts_by_columns),
    ),
    # A GPU prefers few large products to many small ones, and convolutions with large filters are slow.
    "cuda": (
        WeightForm("pointwise", lambda c: c.is_pointwise, _pointwise_in_place, _whole_batch),
        WeightForm("depthwise", lambda c: c.is_depthwise and c.groups > 1, _depthwise, _whole_batch),
        WeightForm("by columns", lambda c: True, _by_columns, _parts_by_memory),
    ),
}
