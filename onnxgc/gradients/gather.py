"""Gradients of operators that pick elements by index."""

import math
from dataclasses import replace

import numpy as np
from onnx import helper

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rows_by_index import Rows, sum_rows
from onnxgc.gradients.rule_helpers import Sums, flat_indices, reduce_sum, reshape, zeros


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
    g.give(0, sum_rows(g, rows))


def gather_nd(g: GradientContext) -> None:
    """y = parts of x at index vectors: dx = dy added to these parts, which may repeat.

    The indexed axes are flattened to one, and so are the axes before and after them.
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
    g.give(0, sum_rows(g, rows))


def _with_flat_indices(g: GradientContext, rows: Rows, indexed: tuple[int, ...]) -> Rows:
    """The rows with one index each, instead of an index vector for the axes `indexed`."""
    known = g.constant_input(1)
    if known is not None:
        vectors = known.reshape(rows.outer, rows.count, len(indexed)) % np.asarray(indexed)
        flat = np.ravel_multi_index(tuple(np.moveaxis(vectors, -1, 0)), indexed)
        if (flat == flat[0]).all():
            return replace(rows, indices=g.constants.add(flat[0]), known=flat[0], is_batched=False)
        return replace(rows, indices=g.constants.add(flat))
    return replace(rows, indices=flat_indices(g, g.x(1), indexed))


def gather_elements(g: GradientContext) -> None:
    """y = x at indices along an axis: dx = dy added at the same indices.

    Indices may repeat: ScatterElements adds correctly with any number of threads, ScatterND does not.
    """
    total = Sums.from_zeros(g, g.input_shape(0), int(g.attribute("axis", 0)))
    total.add(g.x(1), g.dy)
    g.give(0, total.result())


def top_k(g: GradientContext) -> None:
    """y = the k largest (or smallest) elements along an axis: dx = dy at their indices, else zero."""
    empty = zeros(g, g.input_shape(0))
    g.give(0, g.emit("ScatterElements", empty, g.y(1), g.dy, axis=int(g.attribute("axis", -1))))


def one_hot(g: GradientContext) -> None:
    """y = on where an index points, else off: d(off, on) = the sums of dy over each kind of element."""
    rank, axis = len(g.output_shape()), int(g.attribute("axis", -1))
    index_type = helper.tensor_dtype_to_np_dtype(g.input_type(0).dtype)
    depth = g.constants.add(np.asarray([g.output_shape()[axis]], index_type))
    matrix = g.emit("OneHot", g.x(0), depth, g.tensor(np.asarray([0.0, 1.0]), 2), axis=axis)
    on = reduce_sum(g, g.emit("Mul", g.dy, matrix), tuple(range(rank)))
    off = g.emit("Sub", reduce_sum(g, g.dy, tuple(range(rank))), on)
    parts = (reshape(g, off, (1,)), reshape(g, on, (1,)))
    g.give(2, g.emit("Concat", *parts, axis=0))
