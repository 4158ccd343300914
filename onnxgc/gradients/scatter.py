"""Gradients of ScatterElements and ScatterND."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import as_number, flat_indices, reshape, zeros


@dataclass(frozen=True, slots=True)
class _IndexedPlaces:
    """The elements of a tensor that an operator writes to.

    `read(tensor)` picks them from a tensor; `write(tensor, values, reduction)` writes values to them.
    """

    read: Callable[[str], str]
    write: Callable[[str, str, str], str]


def scatter_elements(g: GradientContext) -> None:
    """y = x with updates at indices along an axis; see `_scatter`."""
    axis = int(g.attribute("axis", 0))

    def write(tensor: str, values: str, reduction: str) -> str:
        how = {} if reduction == "none" else {"reduction": reduction}
        return g.emit("ScatterElements", tensor, g.x(1), values, axis=axis, **how)

    _scatter(g, _IndexedPlaces(lambda tensor: g.emit("GatherElements", tensor, g.x(1), axis=axis), write))


def scatter_nd(g: GradientContext) -> None:
    """y = x with updates at index vectors; see `_scatter`.

    Reductions flatten the indexed axes and use ScatterElements: ScatterND computes sums and products of
    repeated indices wrongly on several threads.
    """
    shape, index_shape = g.input_shape(0), g.input_shape(1)
    indexed = shape[: index_shape[-1]]
    flat = (math.prod(indexed), math.prod(shape[len(indexed) :]))
    count = math.prod(index_shape[:-1])

    def write(tensor: str, values: str, reduction: str) -> str:
        if reduction == "none":
            return g.emit("ScatterND", tensor, g.x(1), values)
        places = reshape(g, flat_indices(g, g.x(1), indexed), (count, 1))
        places = g.emit("Expand", places, g.ints(count, flat[1]))
        tensor, values = reshape(g, tensor, flat), reshape(g, values, (count, flat[1]))
        written = g.emit("ScatterElements", tensor, places, values, axis=0, reduction=reduction)
        return reshape(g, written, shape)

    _scatter(g, _IndexedPlaces(lambda tensor: g.emit("GatherND", tensor, g.x(1)), write))


def _scatter(g: GradientContext, places: _IndexedPlaces) -> None:
    """y = x with updates u written, added or multiplied at places, or the maximum or minimum taken there.

    Written (reduction none): dx = dy, zero at the places; du = dy there. ONNX does not define which update
    remains where places repeat, so each of them gets the gradient. The update's gradient comes first, so
    that x's can then overwrite dy.
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
            empty = zeros(g, g.input_shape(2))
            g.give(0, g.dy if reduction == "add" else places.write(g.dy, empty, "none"))


def _scatter_product(g: GradientContext, places: _IndexedPlaces) -> None:
    """y = x times the updates u at each place: dx = dy times the u, du = dy times x and the other u.

    The product of the other factors is the product of all nonzero factors divided by u, or zero where
    another factor is zero.
    """
    if g.wants(2):
        is_zero = g.emit("Equal", g.x(2), g.scalar(0.0))
        zero = as_number(g, is_zero)
        factors = g.emit("Add", g.x(2), zero)
        product = g.emit("Mul", g.dy, places.write(g.x(0), factors, "mul"))
        others = g.emit("Div", places.read(product), factors)
        zero_count = places.read(places.write(zeros(g, g.input_shape(0)), zero, "add"))
        is_other_zero = g.emit("Greater", zero_count, zero)
        g.give(2, g.emit("Where", is_other_zero, g.scalar(0.0), others))
    if g.wants(0):
        ones = g.emit("Expand", g.scalar(1.0), g.ints(*g.input_shape(0)))
        g.give(0, g.emit("Mul", g.dy, places.write(ones, g.x(2), "mul")))


def _scatter_extreme(g: GradientContext, places: _IndexedPlaces) -> None:
    """y = maximum or minimum of x and the updates at each place: dy in equal shares to all that equal y.

    Source: torch, scatter_reduce with amax and amin.
    """
    is_x = as_number(g, g.emit("Equal", g.x(0), g.y()))
    is_update = as_number(g, g.emit("Equal", g.x(2), places.read(g.y())))
    share = g.emit("Div", g.dy, places.write(is_x, is_update, "add"))
    if g.wants(2):
        g.give(2, g.emit("Mul", places.read(share), is_update))
    if g.wants(0):
        g.give(0, g.emit("Mul", share, is_x))
