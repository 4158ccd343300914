"""Gradient of Einsum: each operand's is the contraction of dy with all other operands.

Written as matrix products and multiplications, so that every temporary is a tensor of its own and
known before it is made.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.broadcasting import reduce_sum, reshape
from onnxgc.gradients.engine import GradientContext

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A tensor whose axes have distinct labels, none of them of size 1."""

    tensor: str
    labels: Labels


@dataclass(frozen=True, slots=True)
class Equation:
    """The labels of each operand's axes, repeated ones included, and of the output's.

    An axis under an ellipsis has the label `.0` if it is the last, `.1` if it is the one before.
    """

    operands: tuple[Labels, ...]
    output: Labels
    sizes: Mapping[str, int]


def parsed(equation: str, shapes: Sequence[tuple[int, ...]]) -> Equation:
    """An ONNX Einsum equation applied to operands of these shapes. Source: ONNX Einsum-12."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = tuple(_labels(term, len(shape)) for term, shape in zip(left.split(","), shapes, strict=True))
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            # An axis of 1 broadcasts over the others of its label.
            sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    broadcast = tuple(sorted((label for label in sizes if label[0] == "."), key=lambda x: -int(x[1:])))
    if arrow:
        before, dots, after = right.partition("...")
        return Equation(operands, (*before, *(broadcast if dots else ()), *after), sizes)
    count = Counter(label for labels in operands for label in labels)
    once = sorted(label for label in sizes if count[label] == 1 and label[0] != ".")
    return Equation(operands, (*broadcast, *once), sizes)


def _labels(term: str, rank: int) -> Labels:
    before, _, after = term.partition("...")
    covered = rank - len(before) - len(after)
    return (*before, *(f".{place}" for place in reversed(range(covered))), *after)


def einsum(g: GradientContext) -> None:
    """y = sum over labels that are not y's of the product of all operands.

    Raises:
        UnsupportedOperatorError: a letter's axis of 1 broadcasts, which inferred shapes leave out.
    """
    shapes = [g.input_shape(index) for index in range(len(g.node.inputs))]
    equation = parsed(_text(g.attribute("equation")), shapes)
    if tuple(equation.sizes[label] for label in equation.output) != g.output_shape():
        raise UnsupportedOperatorError(
            f"{g.node.place} has an axis of 1 that broadcasts over another of the "
            "same letter, which has no gradient rule; Expand that operand first, or name it by an ellipsis"
        )
    for index, labels in enumerate(equation.operands):
        if not g.wants(index):
            continue
        factors = [_factor(g, g.dy, equation.output, g.output_shape())]
        factors += [
            _factor(g, g.x(other), equation.operands[other], shapes[other])
            for other in range(len(shapes))
            if other != index
        ]
        own = dict(zip(labels, shapes[index], strict=True))
        target = tuple(label for label in own if own[label] != 1)
        gradient = _contracted(g, factors, target, equation.sizes)
        g.give(index, _on_diagonals(g, gradient, target, labels, shapes[index]))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _factor(g: GradientContext, tensor: str, labels: Labels, shape: tuple[int, ...]) -> Factor:
    """`tensor` without axes of 1, and with one axis for a label that it has several times."""
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    if len(kept) < len(shape):
        labels, shape = tuple(labels[axis] for axis in kept), tuple(shape[axis] for axis in kept)
        tensor = reshape(g, tensor, shape)
    for label, count in Counter(labels).items():
        if count == 1:
            continue
        # The diagonal, laid out flat, is every so many elements.
        order = sorted(range(len(labels)), key=lambda axis: labels[axis] == label)
        tensor = _turned(g, tensor, order)
        size = shape[labels.index(label)]
        labels = (*(other for other in labels if other != label), label)
        shape = (*(shape[axis] for axis in order[: len(order) - count]), size)
        tensor = reshape(g, tensor, (*shape[:-1], size**count))
        last, step = g.ints(len(shape) - 1), g.ints(_step(size, count))
        tensor = g.emit("Slice", tensor, g.ints(0), g.ints(size**count), last, step)
    return Factor(tensor, labels)


def _step(size: int, count: int) -> int:
    """From one element of the diagonal of `count` equal axes to the next."""
    return sum(size**power for power in range(count))


def _turned(g: GradientContext, tensor: str, order: Sequence[int]) -> str:
    if list(order) == sorted(order):
        return tensor
    return g.emit("Transpose", tensor, perm=list(order))


def _arranged(g: GradientContext, factor: Factor, labels: Labels) -> str:
    """The factor's tensor with its axes in the order of `labels`."""
    return _turned(g, factor.tensor, [factor.labels.index(label) for label in labels])


def _on_diagonals(
    g: GradientContext, tensor: str, labels: Labels, wanted: Labels, shape: tuple[int, ...]
) -> str:
    """A gradient with one axis a label as that of an operand: zeros off its diagonals."""
    count = Counter(label for label, size in zip(wanted, shape, strict=True) if size != 1)
    sizes = {label: size for label, size in zip(wanted, shape, strict=True) if size != 1}
    for label in (label for label in labels if count[label] > 1):
        size, step = sizes[label], _step(sizes[label], count[label])
        order = sorted(range(len(labels)), key=lambda axis: labels[axis] == label)
        tensor = _turned(g, tensor, order)
        labels = tuple(labels[axis] for axis in order)
        rest = tuple(sizes[other] for other in labels if other != label)
        tensor = reshape(g, tensor, (*rest, size, 1))
        pads = g.ints(*(0,) * (2 * len(rest) + 3), step - 1)
        tensor = reshape(g, g.emit("Pad", tensor, pads), (*rest, size * step))
        stop, last = g.ints(size ** count[label]), g.ints(len(rest))
        tensor = g.emit("Slice", tensor, g.ints(0), stop, last)
        labels = tuple(other for other in labels if other != label) + (label,) * count[label]
        tensor = reshape(g, tensor, (*rest, *(size,) * count[label]))
    places = {label: iter([i for i, other in enumerate(labels) if other == label]) for label in sizes}
    order = [next(places[label]) for label, size in zip(wanted, shape, strict=True) if size != 1]
    tensor = _turned(g, tensor, order)
    return tensor if len(order) == len(shape) else reshape(g, tensor, shape)


def _contracted(
    g: GradientContext, factors: Sequence[Factor], target: Labels, sizes: Mapping[str, int]
) -> str:
    """The product of all factors, summed over what is not in `target` and repeated over what they lack."""
    pending = list(factors)
    while len(pending) > 1:
        _, first, second = min(
            (_count(_kept(pending, pair, target), sizes), *pair)
            for pair in itertools.combinations(range(len(pending)), 2)
        )
        pair = (first, second)
        kept = _kept(pending, pair, target)
        order = tuple(label for label in target if label in kept) if set(kept) <= set(target) else kept
        product = _pair(g, pending[first], pending[second], order, sizes)
        pending = [factor for index, factor in enumerate(pending) if index not in pair] + [product]
    (factor,) = pending
    factor = _summed(g, factor, target)
    present = tuple(label for label in target if label in factor.labels)
    tensor = _arranged(g, factor, present)
    if present == target:
        return tensor
    tensor = reshape(g, tensor, tuple(sizes[label] if label in present else 1 for label in target))
    return g.emit("Expand", tensor, g.ints(*(sizes[label] for label in target)))


def _count(labels: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)


def _kept(pending: Sequence[Factor], pair: tuple[int, int], target: Labels) -> Labels:
    """Labels of the product of a pair that the target or another factor still needs."""
    needed = set(target)
    for index, factor in enumerate(pending):
        if index not in pair:
            needed.update(factor.labels)
    both = dict.fromkeys((*pending[pair[0]].labels, *pending[pair[1]].labels))
    return tuple(label for label in both if label in needed)


def _summed(g: GradientContext, factor: Factor, kept: Iterable[str]) -> Factor:
    axes = tuple(axis for axis, label in enumerate(factor.labels) if label not in kept)
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in kept)
    return Factor(reduce_sum(g, factor.tensor, axes), labels)


def _pair(g: GradientContext, a: Factor, b: Factor, kept: Labels, sizes: Mapping[str, int]) -> Factor:
    """a b summed over what is not in `kept`, whose order the result has if that costs no more."""
    a = _summed(g, a, {*kept, *b.labels})
    b = _summed(g, b, {*kept, *a.labels})
    if all(label in kept for label in (*a.labels, *b.labels)):
        return _multiplied(g, a, b, kept, sizes)
    form = min(_product_forms(a, b, kept), key=lambda form: form.moved(sizes, kept))
    return form.emit(g, sizes)


def _multiplied(g: GradientContext, a: Factor, b: Factor, kept: Labels, sizes: Mapping[str, int]) -> Factor:
    """a b without a sum, in the order that lays out the least anew."""

    def moved(order: Labels) -> int:
        total = 0 if order == kept else _count(kept, sizes)
        for factor in (a, b):
            if tuple(label for label in order if label in factor.labels) != factor.labels:
                total += _count(factor.labels, sizes)
        return total

    orders = [kept, *((*x.labels, *(label for label in kept if label not in x.labels)) for x in (a, b))]
    order = min(orders, key=moved)

    def operand(factor: Factor) -> str:
        own = tuple(label for label in order if label in factor.labels)
        tensor = _arranged(g, factor, own)
        return reshape(g, tensor, tuple(sizes[label] if label in own else 1 for label in order))

    return Factor(g.emit("Mul", operand(a), operand(b)), order)


@dataclass(frozen=True, slots=True)
class _Product:
    """[batch, rows, inner] x [batch, inner, columns], with an order of the labels in each."""

    left: Factor
    right: Factor
    batch: Labels
    rows: Labels
    inner: Labels
    columns: Labels

    @property
    def result(self) -> Labels:
        return (*self.batch, *self.rows, *self.columns)

    def _layouts(self) -> tuple[tuple[Factor, Labels, Labels], ...]:
        """Each factor, with its layout as the product takes it and transposed."""
        return (
            (self.left, (*self.batch, *self.rows, *self.inner), (*self.inner, *self.rows)),
            (self.right, (*self.batch, *self.inner, *self.columns), (*self.columns, *self.inner)),
        )

    def _is_turned(self, factor: Factor, plain: Labels, turned: Labels) -> bool:
        """Whether the factor lies transposed, which Gemm takes as it is."""
        return not self.batch and factor.labels == turned and factor.labels != plain

    def moved(self, sizes: Mapping[str, int], wanted: Labels) -> int:
        """Elements that have to be laid out anew."""
        total = 0 if self.result == wanted else _count(self.result, sizes)
        for factor, plain, turned in self._layouts():
            if factor.labels != plain and not self._is_turned(factor, plain, turned):
                total += _count(factor.labels, sizes)
        return total

    def emit(self, g: GradientContext, sizes: Mapping[str, int]) -> Factor:
        rows, inner, columns = (_count(part, sizes) for part in (self.rows, self.inner, self.columns))
        lead = (_count(self.batch, sizes),) if self.batch else ()
        extents = ((rows, inner), (inner, columns))
        operands, turns = [], []
        for (factor, plain, turned), extent in zip(self._layouts(), extents, strict=True):
            is_turned = self._is_turned(factor, plain, turned)
            tensor = factor.tensor if is_turned else _arranged(g, factor, plain)
            operands.append(reshape(g, tensor, (*lead, *(reversed(extent) if is_turned else extent))))
            turns.append(int(is_turned))
        if self.batch:
            product = g.emit("MatMul", *operands)
        else:
            product = g.emit("Gemm", *operands, transA=turns[0], transB=turns[1])
        return Factor(reshape(g, product, tuple(sizes[label] for label in self.result)), self.result)


def _product_forms(a: Factor, b: Factor, kept: Labels) -> Iterable[_Product]:
    """The ways to write the sum as one matrix product."""

    def orders(labels: set[str], *templates: Labels) -> list[Labels]:
        found = (tuple(label for label in template if label in labels) for template in templates)
        return list(dict.fromkeys(found))

    shared, needed = set(a.labels) & set(b.labels), set(kept)
    for left, right in ((a, b), (b, a)):
        for batch, rows, inner, columns in itertools.product(
            orders(shared & needed, left.labels, right.labels, kept),
            orders(set(left.labels) - shared, left.labels, kept),
            orders(shared - needed, left.labels, right.labels),
            orders(set(right.labels) - shared, right.labels, kept),
        ):
            yield _Product(left, right, batch, rows, inner, columns)
