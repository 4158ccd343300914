"""Einstein sums of one or two tensors, as products and sums."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxgc.matching.normal_form.affine import linear
from onnxgc.matching.normal_form.builder import Builder, Result
from onnxgc.matching.normal_form.dimensions import Dim, merged, reshaped
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.operators.elementwise import times
from onnxgc.matching.operators.products import product_of_views
from onnxgc.matching.operators.reductions import reduced
from onnxgc.model.core.ir import Node


@dataclass(frozen=True, slots=True)
class _Lettered:
    """A tensor with a letter for each of its dimensions."""

    view: View
    letters: str

    def dim(self, *letters: str) -> Dim:
        """The dimension of several letters; those that the tensor lacks are empty."""
        axes = [self.letters.index(letter) for letter in letters if letter in self.letters]
        return merged(atom for axis in axes for atom in self.view.dims[axis])

    def arranged(self, letters: str) -> View:
        return replace(self.view, dims=tuple(self.dim(letter) for letter in letters))


def einsum(builder: Builder, node: Node) -> Result:
    letters = _letters(node.attribute("equation"), [builder.shape(name) for name in node.inputs])
    if letters is None:
        return None
    wanted = letters.pop()
    operands = list(zip(builder.refs(node), letters, strict=True))
    # Weights last.
    operands.sort(key=lambda operand: not isinstance(operand[0], View))
    views = [_Lettered(ref, named) for ref, named in operands if isinstance(ref, View)]
    last, named = operands[-1]
    match len(operands), views:
        case 1, [x]:
            return [_summed(builder, x, wanted).arranged(wanted)]
        case 2, [x, y]:
            return _of_views(
                builder,
                _summed(builder, x, y.letters + wanted),
                _summed(builder, y, x.letters + wanted),
                wanted,
            )
        case 2, [x] if isinstance(last, WeightTensor):
            return _with_weight(builder, _summed(builder, x, named + wanted), last, named, wanted)
    return None


def _letters(equation: str | bytes, shapes: Sequence[tuple[int, ...]]) -> list[str] | None:
    """The letters of operands and result; None for diagonals, and for letters that broadcast."""
    text = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    ranks = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    spare = "".join(letter for letter in string.ascii_letters if letter not in text)[: max(ranks)]
    found = [term.replace("...", spare[len(spare) - rank :]) for term, rank in zip(terms, ranks, strict=True)]
    if not arrow:
        every = "".join(terms).replace("...", "")
        output = "..." + "".join(sorted(letter for letter in every if every.count(letter) == 1))
    found.append(output.replace("...", spare))
    sizes: dict[str, int] = {}
    for named, shape in zip(found, shapes, strict=False):
        for letter, size in zip(named, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None
    is_plain = all(len(set(named)) == len(named) for named in found)
    return found if is_plain and set(found[-1]) <= sizes.keys() else None


def _summed(builder: Builder, x: _Lettered, kept: str) -> _Lettered:
    """A tensor summed over the letters that only it has."""
    axes = [axis for axis, letter in enumerate(x.letters) if letter not in kept]
    letters = "".join(letter for letter in x.letters if letter in kept)
    return _Lettered(reduced(builder, "ReduceSum", x.view, axes, is_kept=False), letters) if axes else x


def _of_views(builder: Builder, x: _Lettered, y: _Lettered, wanted: str) -> Result:
    """A product of matrices, with the last letter that only one operand has as rows, or columns.

    All other letters of the result are batch dimensions.
    """
    own_x = [letter for letter in wanted if letter not in y.letters]
    own_y = [letter for letter in wanted if letter not in x.letters]
    over = [letter for letter in x.letters if letter not in wanted]
    if own_x and own_y and wanted.index(own_x[-1]) > wanted.index(own_y[-1]):
        return _of_views(builder, y, x, wanted)
    if not over:
        return None if own_x and own_y else times(builder, x.arranged(wanted), y.arranged(wanted))
    rows, columns = "".join(own_x[-1:]), "".join(own_y[-1:])
    batch = "".join(letter for letter in wanted if letter not in rows + columns)
    if {atom.axis for atom in x.dim(*own_x[:-1])} & {atom.axis for atom in y.dim(*own_y[:-1])}:
        # The result would have one axis twice.
        return None
    first = replace(x.view, dims=(*x.arranged(batch).dims, x.dim(*rows), x.dim(*over)))
    second = replace(y.view, dims=(*y.arranged(batch).dims, y.dim(*over), y.dim(*columns)))
    result = product_of_views(builder, first, second)
    # A matrix without rows has one row.
    return None if result is None else [_Lettered(result, batch + (rows or "0") + columns).arranged(wanted)]


def _with_weight(builder: Builder, x: _Lettered, weight: WeightTensor, named: str, wanted: str) -> Result:
    """A linear layer, or, without a sum, an elementwise product."""
    sizes = dict(zip(named, weight.shape, strict=True))
    over = [letter for letter in named if letter not in wanted]
    new = [letter for letter in named if letter not in x.letters]
    if not over and not new:
        aligned = replace(weight, shape=tuple(sizes.get(letter, 1) for letter in x.letters))
        result = times(builder, x.view, aligned)
        view = result[0] if result else None
        return None if view is None else [_Lettered(view, x.letters).arranged(wanted)]
    if len(over) + len(new) != len(named) or set(over) & set(new):
        # A matrix per element of a dimension, or a sum over the weight alone.
        return None
    axes = tuple(named.index(letter) for letter in over)
    size = math.prod(sizes[letter] for letter in new)
    value, channels = linear(builder.structure, x.view, x.dim(*over), size, weight.name, axes)
    parts = reshaped((channels,), [sizes[letter] for letter in new])
    if parts is None:
        return None
    kept = [letter for letter in x.letters if letter in wanted]
    dims = (*(x.dim(letter) for letter in kept), *parts)
    return [_Lettered(View(value, dims), "".join((*kept, *new))).arranged(wanted)]
