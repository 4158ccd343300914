"""Gradient of Einsum: that of each operand is the contraction of dy with all other operands.

Contractions are emitted as matrix products and multiplications, so that every temporary is a tensor of the
graph and visible to planning.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import reduce_sum, reshape
from onnxgc.model.operators.einsum_equation import Labels, parse_equation


@dataclass(frozen=True, slots=True)
class Factor:
    """A tensor whose axes have distinct labels and sizes other than 1."""

    tensor: str
    labels: Labels


def einsum(g: GradientContext) -> None:
    """y = the product of all operands, summed over the labels that y lacks.

    Raises:
        UnsupportedOperatorError: a letter's axis of 1 broadcasts, which ONNX's shape inference ignores.
    """
    shapes = [g.input_shape(index) for index in range(len(g.node.inputs))]
    equation = parse_equation(_text(g.attribute("equation")), shapes)
    if tuple(equation.sizes[label] for label in equation.output) != g.output_shape():
        raise UnsupportedOperatorError(
            f"{g.node.location} has an axis of 1 that broadcasts over another of the "
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
    """`tensor` without axes of 1, and with one axis (the diagonal) for each repeated label."""
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    if len(kept) < len(shape):
        labels, shape = tuple(labels[axis] for axis in kept), tuple(shape[axis] for axis in kept)
        tensor = reshape(g, tensor, shape)
    for label, count in Counter(labels).items():
        if count == 1:
            continue
        # In the flattened axes, the diagonal is a slice with a fixed step.
        order = sorted(range(len(labels)), key=lambda axis: labels[axis] == label)
        tensor = _transposed(g, tensor, order)
        size = shape[labels.index(label)]
        labels = (*(other for other in labels if other != label), label)
        shape = (*(shape[axis] for axis in order[: len(order) - count]), size)
        tensor = reshape(g, tensor, (*shape[:-1], size**count))
        last, step = g.ints(len(shape) - 1), g.ints(_diagonal_step(size, count))
        tensor = g.emit("Slice", tensor, g.ints(0), g.ints(size**count), last, step)
    return Factor(tensor, labels)


def _diagonal_step(size: int, count: int) -> int:
    """The distance between elements of the diagonal of `count` equal axes, flattened to one."""
    return sum(size**power for power in range(count))


def _transposed(g: GradientContext, tensor: str, order: Sequence[int]) -> str:
    if list(order) == sorted(order):
        return tensor
    return g.emit("Transpose", tensor, perm=list(order))


def _arranged(g: GradientContext, factor: Factor, labels: Labels) -> str:
    """The factor's tensor with its axes in the order of `labels`."""
    return _transposed(g, factor.tensor, [factor.labels.index(label) for label in labels])


def _on_diagonals(g: GradientContext, tensor: str, labels: Labels, wanted: Labels, shape: tuple[int, ...]) -> str:
    """A gradient with one axis per label in the layout of an operand: zero off the diagonals."""
    count = Counter(label for label, size in zip(wanted, shape, strict=True) if size != 1)
    sizes = {label: size for label, size in zip(wanted, shape, strict=True) if size != 1}
    for label in (label for label in labels if count[label] > 1):
        size, step = sizes[label], _diagonal_step(sizes[label], count[label])
        order = sorted(range(len(labels)), key=lambda axis: labels[axis] == label)
        tensor = _transposed(g, tensor, order)
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
    tensor = _transposed(g, tensor, order)
    return tensor if len(order) == len(shape) else reshape(g, tensor, shape)


def _contracted(g: GradientContext, factors: Sequence[Factor], target: Labels, sizes: Mapping[str, int]) -> str:
    """The product of all factors, summed over labels not in `target` and repeated over labels they lack."""
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
    """Labels of a pair's product that `target` or another factor needs."""
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
    """a b summed over labels not in `kept`; the result has the order of `kept` where that costs no more."""
    a = _summed(g, a, {*kept, *b.labels})
    b = _summed(g, b, {*kept, *a.labels})
    if all(label in kept for label in (*a.labels, *b.labels)):
        return _multiplied(g, a, b, kept, sizes)
    form = min(_product_forms(a, b, kept), key=lambda form: form.moved(sizes, kept))
    return form.emit(g, sizes)


def _multiplied(g: GradientContext, a: Factor, b: Factor, kept: Labels, sizes: Mapping[str, int]) -> Factor:
    """a b without a sum, in the order that copies the fewest elements."""

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
    """A matrix product [batch, rows, inner] x [batch, inner, columns], with the order of labels in each."""

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
        """Each factor, its layout in the product, and the transposed layout."""
        return (
            (self.left, (*self.batch, *self.rows, *self.inner), (*self.inner, *self.rows)),
            (self.right, (*self.batch, *self.inner, *self.columns), (*self.columns, *self.inner)),
        )

    def _is_transposed(self, factor: Factor, plain: Labels, transposed: Labels) -> bool:
        """Whether the factor's layout is transposed, which Gemm reads without a copy."""
        return not self.batch and factor.labels == transposed and factor.labels != plain

    def moved(self, sizes: Mapping[str, int], wanted: Labels) -> int:
        """Elements that transpositions copy."""
        total = 0 if self.result == wanted else _count(self.result, sizes)
        for factor, plain, transposed in self._layouts():
            if factor.labels != plain and not self._is_transposed(factor, plain, transposed):
                total += _count(factor.labels, sizes)
        return total

    def emit(self, g: GradientContext, sizes: Mapping[str, int]) -> Factor:
        rows, inner, columns = (_count(part, sizes) for part in (self.rows, self.inner, self.columns))
        lead = (_count(self.batch, sizes),) if self.batch else ()
        extents = ((rows, inner), (inner, columns))
        operands, transpositions = [], []
        for (factor, plain, transposed), extent in zip(self._layouts(), extents, strict=True):
            is_transposed = self._is_transposed(factor, plain, transposed)
            tensor = factor.tensor if is_transposed else _arranged(g, factor, plain)
            operands.append(reshape(g, tensor, (*lead, *(reversed(extent) if is_transposed else extent))))
            transpositions.append(int(is_transposed))
        if self.batch:
            product = g.emit("MatMul", *operands)
        else:
            product = g.emit("Gemm", *operands, transA=transpositions[0], transB=transpositions[1])
        return Factor(reshape(g, product, tuple(sizes[label] for label in self.result)), self.result)


def _product_forms(a: Factor, b: Factor, kept: Labels) -> Iterable[_Product]:
    """The ways to write the contraction of a pair as one matrix product."""

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
