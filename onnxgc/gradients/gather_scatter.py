"""Gradients of operators that pick elements by index, put them there, or repeat them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from onnxgc.gradients.broadcasting import Sums, reduce_sum, reshape, unbroadcast, zeros
from onnxgc.gradients.data_movement import Taken, placed
from onnxgc.gradients.engine import GradientContext
from onnxgc.model.core.ir import Array

# A product with a one-hot matrix costs two operations a row and element, a scattered addition as much as
# some 500: measured on CPU, with tables of 2 to 50,257 rows of 12 to 768 elements.
_MOST_ONE_HOT_ROWS = 256
# A one-hot matrix of more rows would be larger than the indices that scattering takes.
_MOST_ROWS_BY_WIDTH = 8
# A one-hot matrix of constant indices is a constant, which a runtime keeps all the time.
_LARGEST_CONSTANT_ONE_HOT = 1 << 18
# Elements scattered at a time: each needs an index, and few stay in the cache.
_PIECE_ELEMENTS = 1 << 18
_MOST_PIECES = 16
# A table of so many times the rows that are read is mostly zeros, which the last step writes.
_SPARSE_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table [before..., rows, after...] that were read: `count` of them.

    `values`: gradients [before..., count, after...]. `indices`: a tensor of `count` numbers, or as many for
    each place in `before` where they are `batched`; negative ones count from the end. `known`: their
    values [count], none of them negative, where they are constant and not batched.
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

    def of(self, size: int) -> tuple[int, ...]:
        """The shape of so many rows."""
        return (*self.before, size, *self.after)


_Shaped = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RowForm:
    """One way to add rows up: a tensor of the elements of [before..., rows, after...], and its shape.

    The first form that applies is taken. What has the shape of x needs no view, which would be copied
    where it is an output.
    """

    name: str
    applies: Callable[[GradientContext, Rows], bool]
    build: Callable[[GradientContext, Rows], _Shaped]


def gather(g: GradientContext) -> None:
    """y = rows of x at indices along an axis: dx = dy added to these rows, which may repeat."""
    shape = g.input_shape(0)
    axis = int(g.attribute("axis", 0)) % len(shape)
    known = g.constant_input(1)
    rows = Rows(
        before=shape[:axis],
        rows=shape[axis],
        count=math.prod(g.input_shape(1)),
        after=shape[axis + 1 :],
        values=g.dy,
        indices=g.x(1),
        known=None if known is None else known.reshape(-1) % max(shape[axis], 1),
    )
    g.give(0, _added_rows(g, rows))


def gather_nd(g: GradientContext) -> None:
    """y = parts of x at index vectors: dx = dy added to these parts, which may repeat.

    The axes that an index vector counts through are one, and so are those before and behind them.
    """
    shape, index_shape = g.input_shape(0), g.input_shape(1)
    lead = int(g.attribute("batch_dims", 0))
    indexed = shape[lead : lead + index_shape[-1]]
    rows = Rows(
        before=shape[:lead],
        rows=math.prod(indexed),
        count=math.prod(index_shape[lead:-1]),
        after=shape[lead + len(indexed) :],
        values=g.dy,
        indices=g.x(1),
        is_batched=math.prod(shape[:lead]) > 1,
    )
    if 0 not in g.output_shape():
        rows = _with_flat_indices(g, rows, indexed)
    g.give(0, _added_rows(g, rows))


def _with_flat_indices(g: GradientContext, rows: Rows, indexed: tuple[int, ...]) -> Rows:
    """The rows by one index each, in place of a vector for the axes `indexed`."""
    known = g.constant_input(1)
    if known is not None:
        vectors = known.reshape(rows.outer, rows.count, len(indexed)) % np.asarray(indexed)
        flat = np.ravel_multi_index(tuple(np.moveaxis(vectors, -1, 0)), indexed)
        if (flat == flat[0]).all():
            return replace(rows, indices=g.constants.add(flat[0]), known=flat[0], is_batched=False)
        return replace(rows, indices=g.constants.add(flat))
    return replace(rows, indices=_flat_indices(g, g.x(1), indexed))


def _flat_indices(g: GradientContext, vectors: str, indexed: tuple[int, ...]) -> str:
    """Index vectors along the last axis as indices into the axes `indexed` taken as one."""
    if len(indexed) == 1:
        return vectors
    strides = [math.prod(indexed[axis + 1 :]) for axis in range(len(indexed))]
    counted = g.emit("Mul", g.emit("Mod", vectors, g.ints(*indexed)), g.ints(*strides))
    return reduce_sum(g, counted, (-1,))


def _added_rows(g: GradientContext, rows: Rows) -> str:
    shape = g.input_shape(0)
    if not rows.element_count:
        return zeros(g, shape)
    form = next(form for form in ROW_FORMS if form.applies(g, rows))
    found, found_shape = form.build(g, rows)
    return found if found_shape == shape else reshape(g, found, shape)


def _taken(rows: Rows) -> Taken | None:
    """What the indices take if they are constant and in even steps, as those of a Slice."""
    if rows.known is None:
        return None
    first = int(rows.known[0])
    if rows.count == 1:
        return Taken(rows.rows, 1, first)
    steps = np.diff(rows.known)
    step = int(steps[0])
    if step == 0 or (steps != step).any():
        return None
    return Taken(rows.rows, rows.count, min(first, int(rows.known[-1])), abs(step), step < 0)


def _in_places(g: GradientContext, rows: Rows) -> _Shaped:
    """The rows in their places, amid zeros."""
    taken = _taken(rows)
    assert taken is not None
    before, after = (tuple(Taken(size, size) for size in part) for part in (rows.before, rows.after))
    return placed(g, _values(g, rows, rows.of(rows.count)), (*before, taken, *after)), rows.of(rows.rows)


def _is_permutation(rows: Rows) -> bool:
    return rows.known is not None and np.array_equal(np.sort(rows.known), np.arange(rows.rows))


def _permuted(g: GradientContext, rows: Rows) -> _Shaped:
    """Each row once: from where it went."""
    assert rows.known is not None
    origins = g.ints(*np.argsort(rows.known).tolist())
    return g.emit("Gather", _values(g, rows, rows.of(rows.count)), origins, axis=len(rows.before)), rows.of(
        rows.rows
    )


def _suits_one_hot(g: GradientContext, rows: Rows) -> bool:
    """Few rows, in a type that ONNX Runtime has OneHot for on every provider."""
    most = min(_MOST_ONE_HOT_ROWS, _MOST_ROWS_BY_WIDTH * rows.outer * rows.width)
    is_small = rows.known is None or rows.rows * rows.count <= _LARGEST_CONSTANT_ONE_HOT
    has_kernel = g.input_type(0).dtype in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    return rows.rows <= most and is_small and has_kernel


def _by_one_hot(g: GradientContext, rows: Rows) -> _Shaped:
    """The product of a matrix with a one where a row was read, and of what was read."""
    batched = (rows.outer,) if rows.is_batched else ()
    lead = () if rows.outer == 1 and not batched else (rows.outer,)
    indices = reshape(g, rows.indices, (*batched, rows.count))
    if rows.width == 1 and not batched:
        matrix = _one_hot_rows(g, indices, rows.rows, axis=1)
        values = _values(g, rows, (rows.outer, rows.count))
        return g.emit("MatMul", values, matrix), (rows.outer, rows.rows)
    matrix = _one_hot_rows(g, indices, rows.rows, axis=len(batched))
    values = _values(g, rows, (*lead, rows.count, rows.width))
    return g.emit("MatMul", matrix, values), (*lead, rows.rows, rows.width)


def _one_hot_rows(g: GradientContext, indices: str, depth: int, axis: int) -> str:
    """A one where an index points along a new axis, else a zero; in the element type of input 0."""
    index_type = helper.tensor_dtype_to_np_dtype(_index_dtype(g))
    ends = g.tensor(np.asarray([0.0, 1.0]))
    return g.emit("OneHot", indices, g.constants.add(np.asarray([depth], index_type)), ends, axis=axis)


def _is_sparse(rows: Rows) -> bool:
    return not rows.is_batched and rows.rows > _SPARSE_FACTOR * rows.count


def _compact(g: GradientContext, rows: Rows) -> _Shaped:
    """The sums by themselves, one row for each that was read; then all rows, each from its sum or a zero.

    So the table is written once, and nothing else is of its size: a sum in place would have to be copied
    to become an output.
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
            sums = g.emit("Gather", _values(g, rows, rows.of(rows.count)), origins, axis=axis)
            rank = len(rows.of(size))
            sums = g.emit("Pad", sums, g.ints(*(int(place == rank + axis) for place in range(2 * rank))))
        else:
            sums = _scattered_to(g, rows, g.constants.add(sum_of.astype(np.int32)), size)
    else:
        # Where rows repeat, any of their numbers may stay: it is the same for all of them.
        size = rows.count + 1
        indices = reshape(g, rows.indices, (rows.count,))
        numbers = g.constants.add(np.arange(rows.count, dtype=np.int32))
        none = g.emit("Expand", g.constants.add(np.asarray(rows.count, np.int32)), g.ints(rows.rows))
        places = g.emit("ScatterElements", none, indices, numbers, axis=0)
        sums = _scattered_to(g, rows, g.emit("Gather", places, indices), size)
    return g.emit("Gather", reshape(g, sums, rows.of(size)), places, axis=axis), rows.of(rows.rows)


def _scattered(g: GradientContext, rows: Rows) -> _Shaped:
    """Additions to zeros in the rows' own places."""
    indices = rows.indices
    if _index_dtype(g) == onnx.TensorProto.INT64:
        indices = g.emit("Cast", indices, to=onnx.TensorProto.INT32)
    shape = (rows.rows, rows.width) if rows.outer == 1 else (rows.outer, rows.rows, rows.width)
    return _scattered_to(g, rows, indices, rows.rows), shape


def _scattered_to(g: GradientContext, rows: Rows, indices: str, size: int) -> str:
    """The values added to `size` rows of zeros by int32 `indices`, a few at a time.

    Not by ScatterND, which loses additions on CPU where indices repeat.
    """
    lead = () if rows.outer == 1 else (rows.outer,)
    axis = len(lead)
    pieces = min(_MOST_PIECES, rows.count, math.ceil(rows.element_count / _PIECE_ELEMENTS))
    index_lead = lead if rows.is_batched else (1,) * axis
    indices = reshape(g, indices, (*index_lead, rows.count, 1))
    values = _values(g, rows, (*lead, rows.count, rows.width))
    total = Sums.from_zeros(g, (*lead, size, rows.width), axis)
    bounds = [rows.count * piece // pieces for piece in range(pieces + 1)]
    for start, stop in itertools.pairwise(bounds):
        piece, places = values, indices
        if pieces > 1:
            span = (g.ints(start), g.ints(stop), g.ints(axis))
            piece, places = g.emit("Slice", values, *span), g.emit("Slice", indices, *span)
        total.add(g.emit("Expand", places, g.ints(*lead, stop - start, rows.width)), piece)
    return total.result()


def _values(g: GradientContext, rows: Rows, shape: tuple[int, ...]) -> str:
    return rows.values if shape == g.output_shape() else reshape(g, rows.values, shape)


def _index_dtype(g: GradientContext) -> int:
    return g.input_type(1).dtype


ROW_FORMS: tuple[RowForm, ...] = (
    RowForm("in places", lambda g, rows: _taken(rows) is not None, _in_places),
    RowForm("permuted", lambda g, rows: _is_permutation(rows), _permuted),
    RowForm("one-hot", _suits_one_hot, _by_one_hot),
    RowForm("compact", lambda g, rows: _is_sparse(rows), _compact),
    RowForm("scattered", lambda g, rows: True, _scattered),
)


def gather_elements(g: GradientContext) -> None:
    """y = x at indices along an axis: dx = dy added back at the same places.

    Indices may repeat; ScatterElements adds them right on every thread count, ScatterND does not.
    """
    total = Sums.from_zeros(g, g.input_shape(0), int(g.attribute("axis", 0)))
    total.add(g.x(1), g.dy)
    g.give(0, total.result())


def top_k(g: GradientContext) -> None:
    """y = the k largest (or smallest) elements along an axis: dx = dy where they were, else zero."""
    nothing = zeros(g, g.input_shape(0))
    g.give(0, g.emit("ScatterElements", nothing, g.y(1), g.dy, axis=int(g.attribute("axis", -1))))


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of a tensor that an operator writes to.

    `read` gives a tensor's elements there; `write` puts elements into a tensor by a reduction.
    """

    read: Callable[[str], str]
    write: Callable[[str, str, str], str]


def scatter_elements(g: GradientContext) -> None:
    """y = x with updates at indices along an axis; see `_scatter`."""
    axis = int(g.attribute("axis", 0))

    def write(tensor: str, values: str, reduction: str) -> str:
        how = {} if reduction == "none" else {"reduction": reduction}
        return g.emit("ScatterElements", tensor, g.x(1), values, axis=axis, **how)

    _scatter(g, _Places(lambda tensor: g.emit("GatherElements", tensor, g.x(1), axis=axis), write))


def scatter_nd(g: GradientContext) -> None:
    """y = x with updates at index vectors; see `_scatter`.

    Where sums or products of several updates are needed, the axes that a vector counts through are one:
    ScatterND computes them wrong on several threads.
    """
    shape, index_shape = g.input_shape(0), g.input_shape(1)
    indexed = shape[: index_shape[-1]]
    flat = (math.prod(indexed), math.prod(shape[len(indexed) :]))
    count = math.prod(index_shape[:-1])

    def write(tensor: str, values: str, reduction: str) -> str:
        if reduction == "none":
            return g.emit("ScatterND", tensor, g.x(1), values)
        places = reshape(g, _flat_indices(g, g.x(1), indexed), (count, 1))
        places = g.emit("Expand", places, g.ints(count, flat[1]))
        tensor, values = reshape(g, tensor, flat), reshape(g, values, (count, flat[1]))
        written = g.emit("ScatterElements", tensor, places, values, axis=0, reduction=reduction)
        return reshape(g, written, shape)

    _scatter(g, _Places(lambda tensor: g.emit("GatherND", tensor, g.x(1)), write))


def _scatter(g: GradientContext, places: _Places) -> None:
    """y = x with updates u put at places, or added, multiplied, or the larger or smaller of them.

    Put (none): dx = dy, zero at the places; du = dy there. Where places repeat, ONNX leaves open which
    update stays, and each has the gradient. The update's gradient comes first: dy is then free to become
    x's in its own place.
    """
    reduction = g.attribute("reduction", "none")
    if reduction == "mul":
        _scatter_product(g, places)
    elif reduction in ("max", "min"):
        _scatter_extreme(g, places)
    else:
        if g.wants(2):
            g.give(2, places.read(g.dy))
        if g.wants(0):
            nothing = zeros(g, g.input_shape(2))
            g.give(0, g.dy if reduction == "add" else places.write(g.dy, nothing, "none"))


def _scatter_product(g: GradientContext, places: _Places) -> None:
    """y = x times the updates u at each place: dx = dy times the u, du = dy times x and the other u.

    The others' product is the product of all that are not zero over u, or zero where another one is zero.
    """
    if g.wants(2):
        is_zero = g.emit("Equal", g.x(2), g.scalar(0.0))
        zero = _as_number(g, is_zero)
        factors = g.emit("Add", g.x(2), zero)
        product = g.emit("Mul", g.dy, places.write(g.x(0), factors, "mul"))
        others = g.emit("Div", places.read(product), factors)
        zeros_in_place = places.read(places.write(zeros(g, g.input_shape(0)), zero, "add"))
        is_other_zero = g.emit("Greater", zeros_in_place, zero)
        g.give(2, g.emit("Where", is_other_zero, g.scalar(0.0), others))
    if g.wants(0):
        ones = g.emit("Expand", g.scalar(1.0), g.ints(*g.input_shape(0)))
        g.give(0, g.emit("Mul", g.dy, places.write(ones, g.x(2), "mul")))


def _scatter_extreme(g: GradientContext, places: _Places) -> None:
    """y = the largest or smallest of x and the updates at each place: dy in even parts to those that are y.

    Source: torch, scatter_reduce with amax and amin.
    """
    is_x = _as_number(g, g.emit("Equal", g.x(0), g.y()))
    is_update = _as_number(g, g.emit("Equal", g.x(2), places.read(g.y())))
    share = g.emit("Div", g.dy, places.write(is_x, is_update, "add"))
    if g.wants(2):
        g.give(2, g.emit("Mul", places.read(share), is_update))
    if g.wants(0):
        g.give(0, g.emit("Mul", share, is_x))


def _as_number(g: GradientContext, condition: str) -> str:
    return g.emit("Cast", condition, to=g.input_type(0).dtype)


def one_hot(g: GradientContext) -> None:
    """y = off where no index points, else on: d(off, on) = sums of dy there and there."""
    rank, axis = len(g.output_shape()), int(g.attribute("axis", -1))
    index_type = helper.tensor_dtype_to_np_dtype(g.input_type(0).dtype)
    depth = g.constants.add(np.asarray([g.output_shape()[axis]], index_type))
    matrix = g.emit("OneHot", g.x(0), depth, g.tensor(np.asarray([0.0, 1.0]), 2), axis=axis)
    on = reduce_sum(g, g.emit("Mul", g.dy, matrix), tuple(range(rank)))
    off = g.emit("Sub", reduce_sum(g, g.dy, tuple(range(rank))), on)
    parts = (reshape(g, off, (1,)), reshape(g, on, (1,)))
    g.give(2, g.emit("Concat", *parts, axis=0))


def reverse_sequence(g: GradientContext) -> None:
    """y = x with the first elements of each sequence in reverse: dx = dy likewise."""
    axes = {
        name: g.node.attributes[name] for name in ("batch_axis", "time_axis") if name in g.node.attributes
    }
    g.give(0, g.emit("ReverseSequence", g.dy, g.x(1), **axes))


def expand(g: GradientContext) -> None:
    """y = x repeated along axes of one element: dx = dy summed over them."""
    g.give(0, unbroadcast(g, g.dy, g.output_shape(), g.input_shape(0)))


def tile(g: GradientContext) -> None:
    """y = copies of x side by side: dx = dy summed over the copies."""
    shape, tiled = g.input_shape(0), g.output_shape()
    if 0 in tiled:
        g.give(0, zeros(g, shape))
        return
    parts: list[int] = []
    copied: list[int] = []
    for size, total in zip(shape, tiled, strict=True):
        if total != size:
            copied.append(len(parts))
            parts.append(total // size)
        parts.append(size)
    gradient = g.dy
    if copied:
        gradient = reduce_sum(g, reshape(g, gradient, tuple(parts)), tuple(copied))
        if len(parts) - len(copied) != len(shape):
            gradient = reshape(g, gradient, shape)
    g.give(0, gradient)
