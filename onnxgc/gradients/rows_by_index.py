"""Sums of gradient rows by index: the backward of Gather and GatherND, where rows may repeat."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import Sums, reshape, zeros
from onnxgc.gradients.slicing import AxisSlice, undo_slices
from onnxgc.model.core.ir import Array

# A product with a one-hot matrix costs two operations per row and element, a scattered addition as much as
# about 500: measured on CPU, with tables of 2 to 50,257 rows of 12 to 768 elements.
_MAX_ONE_HOT_ROWS = 256
# With more rows per element of a row, the one-hot matrix is larger than the indices that scattering needs.
_MAX_ROWS_PER_WIDTH = 8
# A one-hot matrix of constant indices is itself constant, and a runtime keeps constants in memory.
_MAX_CONSTANT_ONE_HOT = 1 << 18
# Elements scattered at a time. Each needs an index, and a small piece stays in the cache.
_PIECE_ELEMENTS = 1 << 18
_MAX_PIECES = 16
# A table with more than this many times the rows that are read consists mostly of zeros.
_SPARSE_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` reads of the rows of a table [before..., rows, after...].

    `values`: gradients [before..., count, after...]. `indices`: a tensor of `count` row numbers, or of
    `count` for each position in `before` where `is_batched`; negative ones count from the end. `known`: their
    values [count], none negative, where the indices are constant and not batched.
    """

    before: tuple[int, ...]
    rows: int
    count: int
    after: tuple[int, ...]
    values: str
    indices: str
    is_batched: bool = False
    known: Array | None = None

    @property
    def outer(self) -> int:
        return math.prod(self.before)

    @property
    def width(self) -> int:
        return math.prod(self.after)

    @property
    def element_count(self) -> int:
        return self.outer * self.count * self.width

    def shape_with(self, rows: int) -> tuple[int, ...]:
        """The table's shape with another number of rows."""
        return (*self.before, rows, *self.after)


_Shaped = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RowForm:
    """One way to add rows: builds a tensor with the elements of [before..., rows, after...], and its shape.

    The first applicable form is used. A result in x's shape gets no Reshape: as a graph output it would cost
    a copy.
    """

    name: str
    applies: Callable[[GradientContext, Rows], bool]
    build: Callable[[GradientContext, Rows], _Shaped]


def sum_rows(g: GradientContext, rows: Rows) -> str:
    """Gradient of the table, in the shape of input 0."""
    shape = g.input_shape(0)
    if not rows.element_count:
        return zeros(g, shape)
    form = next(form for form in ROW_FORMS if form.applies(g, rows))
    total, total_shape = form.build(g, rows)
    return total if total_shape == shape else reshape(g, total, shape)


def _as_slice(rows: Rows) -> AxisSlice | None:
    """The slice equal to constant indices in even steps, or None."""
    if rows.known is None:
        return None
    first = int(rows.known[0])
    if rows.count == 1:
        return AxisSlice(rows.rows, 1, first)
    steps = np.diff(rows.known)
    step = int(steps[0])
    if step == 0 or (steps != step).any():
        return None
    return AxisSlice(rows.rows, rows.count, min(first, int(rows.known[-1])), abs(step), step < 0)


def _padded_slice(g: GradientContext, rows: Rows) -> _Shaped:
    """The rows amid zeros."""
    row_slice = _as_slice(rows)
    assert row_slice is not None
    before, after = (tuple(AxisSlice(size, size) for size in part) for part in (rows.before, rows.after))
    values = _reshaped_values(g, rows, rows.shape_with(rows.count))
    return undo_slices(g, values, (*before, row_slice, *after)), rows.shape_with(rows.rows)


def _is_permutation(rows: Rows) -> bool:
    return rows.known is not None and np.array_equal(np.sort(rows.known), np.arange(rows.rows))


def _permuted(g: GradientContext, rows: Rows) -> _Shaped:
    """Every row exactly once: Gather by the inverse permutation."""
    assert rows.known is not None
    origins = g.ints(*np.argsort(rows.known).tolist())
    values = _reshaped_values(g, rows, rows.shape_with(rows.count))
    return g.emit("Gather", values, origins, axis=len(rows.before)), rows.shape_with(rows.rows)


def _is_one_hot_cheaper(g: GradientContext, rows: Rows) -> bool:
    """Few rows, of a type for which every provider of ONNX Runtime has OneHot."""
    max_rows = min(_MAX_ONE_HOT_ROWS, _MAX_ROWS_PER_WIDTH * rows.outer * rows.width)
    is_small = rows.known is None or rows.rows * rows.count <= _MAX_CONSTANT_ONE_HOT
    has_kernel = g.input_type(0).dtype in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    return rows.rows <= max_rows and is_small and has_kernel


def _one_hot_product(g: GradientContext, rows: Rows) -> _Shaped:
    """The product of the values and a one-hot matrix of the indices."""
    batch = (rows.outer,) if rows.is_batched else ()
    lead = () if rows.outer == 1 and not batch else (rows.outer,)
    indices = reshape(g, rows.indices, (*batch, rows.count))
    if rows.width == 1 and not batch:
        matrix = _one_hot_rows(g, indices, rows.rows, axis=1)
        values = _reshaped_values(g, rows, (rows.outer, rows.count))
        return g.emit("MatMul", values, matrix), (rows.outer, rows.rows)
    matrix = _one_hot_rows(g, indices, rows.rows, axis=len(batch))
    values = _reshaped_values(g, rows, (*lead, rows.count, rows.width))
    return g.emit("MatMul", matrix, values), (*lead, rows.rows, rows.width)


def _one_hot_rows(g: GradientContext, indices: str, depth: int, axis: int) -> str:
    """One-hot vectors of the indices along a new axis, in the element type of input 0."""
    index_type = helper.tensor_dtype_to_np_dtype(_index_dtype(g))
    off_on = g.tensor(np.asarray([0.0, 1.0]))
    return g.emit("OneHot", indices, g.constants.add(np.asarray([depth], index_type)), off_on, axis=axis)


def _is_sparse(rows: Rows) -> bool:
    return not rows.is_batched and rows.rows > _SPARSE_FACTOR * rows.count


def _compact(g: GradientContext, rows: Rows) -> _Shaped:
    """One sum for each distinct row, then a Gather of all rows: each from its sum or from a row of zeros.

    So the table is written once, and no temporary has its size; sums added up in the table itself would
    have to be copied to become an output.
    """
    axis = len(rows.before)
    if rows.known is not None:
        read, sum_of = np.unique(rows.known, return_inverse=True)
        size = len(read) + 1
        place_of_row = np.full(rows.rows, len(read), np.int32)
        place_of_row[read] = np.arange(len(read))
        places = g.constants.add(place_of_row)
        if len(read) == rows.count:
            origins = g.ints(*np.argsort(rows.known).tolist())
            values = _reshaped_values(g, rows, rows.shape_with(rows.count))
            sums = g.emit("Gather", values, origins, axis=axis)
            rank = len(rows.shape_with(size))
            sums = g.emit("Pad", sums, g.ints(*(int(place == rank + axis) for place in range(2 * rank))))
        else:
            sums = _scatter_values(g, rows, g.constants.add(sum_of.astype(np.int32)), size)
    else:
        # Repeated rows overwrite one another's number. Which one remains does not matter: all duplicates read
        # the same number.
        size = rows.count + 1
        indices = reshape(g, rows.indices, (rows.count,))
        numbers = g.constants.add(np.arange(rows.count, dtype=np.int32))
        unread = g.emit("Expand", g.constants.add(np.asarray(rows.count, np.int32)), g.ints(rows.rows))
        places = g.emit("ScatterElements", unread, indices, numbers, axis=0)
        sums = _scatter_values(g, rows, g.emit("Gather", places, indices), size)
    table = g.emit("Gather", reshape(g, sums, rows.shape_with(size)), places, axis=axis)
    return table, rows.shape_with(rows.rows)


def _scattered(g: GradientContext, rows: Rows) -> _Shaped:
    """Values added to a table of zeros."""
    indices = rows.indices
    if _index_dtype(g) == onnx.TensorProto.INT64:
        indices = g.emit("Cast", indices, to=onnx.TensorProto.INT32)
    shape = (rows.rows, rows.width) if rows.outer == 1 else (rows.outer, rows.rows, rows.width)
    return _scatter_values(g, rows, indices, rows.rows), shape


def _scatter_values(g: GradientContext, rows: Rows, indices: str, size: int) -> str:
    """The values added to `size` rows of zeros by int32 `indices`, a piece at a time.

    ScatterND would lose additions on CPU where indices repeat.
    """
    lead = () if rows.outer == 1 else (rows.outer,)
    axis = len(lead)
    pieces = min(_MAX_PIECES, rows.count, math.ceil(rows.element_count / _PIECE_ELEMENTS))
    index_lead = lead if rows.is_batched else (1,) * axis
    indices = reshape(g, indices, (*index_lead, rows.count, 1))
    values = _reshaped_values(g, rows, (*lead, rows.count, rows.width))
    total = Sums.from_zeros(g, (*lead, size, rows.width), axis)
    bounds = [rows.count * piece // pieces for piece in range(pieces + 1)]
    for start, stop in itertools.pairwise(bounds):
        piece, places = values, indices
        if pieces > 1:
            span = (g.ints(start), g.ints(stop), g.ints(axis))
            piece, places = g.emit("Slice", values, *span), g.emit("Slice", indices, *span)
        total.add(g.emit("Expand", places, g.ints(*lead, stop - start, rows.width)), piece)
    return total.result()


def _reshaped_values(g: GradientContext, rows: Rows, shape: tuple[int, ...]) -> str:
    return rows.values if shape == g.output_shape() else reshape(g, rows.values, shape)


def _index_dtype(g: GradientContext) -> int:
    return g.input_type(1).dtype


ROW_FORMS: tuple[RowForm, ...] = (
    RowForm("slice", lambda g, rows: _as_slice(rows) is not None, _padded_slice),
    RowForm("permuted", lambda g, rows: _is_permutation(rows), _permuted),
    RowForm("one-hot", _is_one_hot_cheaper, _one_hot_product),
    RowForm("compact", lambda g, rows: _is_sparse(rows), _compact),
    RowForm("scattered", lambda g, rows: True, _scattered),
)
