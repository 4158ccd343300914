"""Einstein sums of one or two tensors, as products and sums."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from onnxgc.matching.normal_form.affine import linear
from onnxgc.matching.normal_form.builder import Builder
from onnxgc.matching.normal_form.dimensions import Dim, merged, reshaped
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.operators.elementwise import times
from onnxgc.matching.operators.products import product_of_views
from onnxgc.matching.operators.reductions import reduced
from onnxgc.model.core.ir import Node
from onnxgc.model.operators.einsum_equation import Labels, parse_equation


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A tensor with a label for each of its dimensions."""

    view: View
    labels: Labels

    def dim(self, *labels: str) -> Dim:
        """The dimension of several labels; those that the tensor lacks are empty."""
        axes = [self.labels.index(label) for label in labels if label in self.labels]
        return merged(atom for axis in axes for atom in self.view.dims[axis])

    def arranged(self, labels: Sequence[str]) -> View:
        return replace(self.view, dims=tuple(self.dim(label) for label in labels))


def einsum(builder: Builder, node: Node) -> View | None:
    """None for diagonals, and for labels that broadcast."""
    shapes = [builder.shape(name) for name in node.inputs]
    equation = parse_equation(node.attribute("equation"), shapes)
    wanted, sizes = equation.output, equation.sizes
    is_plain = all(len(set(labels)) == len(labels) for labels in (*equation.operands, wanted))
    full = [tuple(sizes[label] for label in labels) for labels in equation.operands]
    if not is_plain or full != shapes or not sizes.keys() >= set(wanted):
        return None
    operands = list(zip(builder.refs(node), equation.operands, strict=True))
    # Weights last.
    operands.sort(key=lambda operand: not isinstance(operand[0], View))
    views = [_Labelled(ref, labels) for ref, labels in operands if isinstance(ref, View)]
    last, labels = operands[-1]
    match len(operands), views:
        case 1, [x]:
            return _summed(builder, x, wanted).arranged(wanted)
        case 2, [x, y]:
            x, y = _summed(builder, x, y.labels + wanted), _summed(builder, y, x.labels + wanted)
            return _of_views(builder, x, y, wanted)
        case 2, [x] if isinstance(last, WeightTensor):
            return _with_weight(builder, _summed(builder, x, labels + wanted), last, labels, wanted)
    return None


def _summed(builder: Builder, x: _Labelled, kept: Collection[str]) -> _Labelled:
    """A tensor summed over the labels that only it has."""
    axes = [axis for axis, label in enumerate(x.labels) if label not in kept]
    labels = tuple(label for label in x.labels if label in kept)
    return _Labelled(reduced(builder, "ReduceSum", x.view, axes, is_kept=False), labels) if axes else x


def _of_views(builder: Builder, x: _Labelled, y: _Labelled, wanted: Labels) -> View | None:
    """A product of matrices, with the last label that only one operand has as rows, or columns.

    All other labels of the result are batch dimensions.
    """
    own_x = [label for label in wanted if label not in y.labels]
    own_y = [label for label in wanted if label not in x.labels]
    over = [label for label in x.labels if label not in wanted]
    if own_x and own_y and wanted.index(own_x[-1]) > wanted.index(own_y[-1]):
        return _of_views(builder, y, x, wanted)
    if not over:
        return None if own_x and own_y else times(builder, x.arranged(wanted), y.arranged(wanted))
    rows, columns = own_x[-1:], own_y[-1:]
    batch = [label for label in wanted if label not in rows + columns]
    if {atom.axis for atom in x.dim(*own_x[:-1])} & {atom.axis for atom in y.dim(*own_y[:-1])}:
        # The result would have one axis twice.
        return None
    first = replace(x.view, dims=(*x.arranged(batch).dims, x.dim(*rows), x.dim(*over)))
    second = replace(y.view, dims=(*y.arranged(batch).dims, y.dim(*over), y.dim(*columns)))
    result = product_of_views(builder, first, second)
    # A matrix without rows has one row.
    labels = (*batch, *(rows or [""]), *columns)
    return None if result is None else _Labelled(result, labels).arranged(wanted)


def _with_weight(builder: Builder, x: _Labelled, weight: WeightTensor, labels: Labels, wanted: Labels) -> View | None:
    """A linear layer, or, without a sum, an elementwise product."""
    sizes = dict(zip(labels, weight.shape, strict=True))
    over = [label for label in labels if label not in wanted]
    new = [label for label in labels if label not in x.labels]
    if not over and not new:
        aligned = replace(weight, shape=tuple(sizes.get(label, 1) for label in x.labels))
        result = times(builder, x.view, aligned)
        return None if result is None else _Labelled(result, x.labels).arranged(wanted)
    if len(over) + len(new) != len(labels) or set(over) & set(new):
        # A matrix per element of a dimension, or a sum over the weight alone.
        return None
    axes = tuple(labels.index(label) for label in over)
    size = math.prod(sizes[label] for label in new)
    value, channels = linear(builder.structure, x.view, x.dim(*over), size, weight.name, axes)
    parts = reshaped((channels,), [sizes[label] for label in new])
    if parts is None:
        return None
    kept = [label for label in x.labels if label in wanted]
    dims = (*(x.dim(label) for label in kept), *parts)
    return _Labelled(View(value, dims), (*kept, *new)).arranged(wanted)
