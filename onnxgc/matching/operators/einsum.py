"""Einstein sums of one or two tensors, as the products and sums that others write them with."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxgc.matching.normal_form.builder import Builder, Result
from onnxgc.matching.normal_form.dimensions import Dim, merged, reshaped
from onnxgc.matching.normal_form.structure import Fixed, View
from onnxgc.matching.operators.elementwise import times
from onnxgc.matching.operators.products import product_of_views
from onnxgc.matching.operators.reductions import reduced
from onnxgc.model.core.ir import Node


@dataclass(frozen=True, slots=True)
class _Lettered:
    """A tensor and a letter for each of its dimensions."""

    view: View
    letters: str

    def dim(self, *letters: str) -> Dim:
        """What letters stand for together; those that are missing hold nothing."""
        places = [self.letters.index(letter) for letter in letters if letter in self.letters]
        return merged(atom for place in places for atom in self.view.dims[place])

    def laid_out(self, letters: str) -> View:
        return replace(self.view, dims=tuple(self.dim(letter) for letter in letters))


def einsum(t: Builder, node: Node) -> Result:
    letters = _letters(node.attribute("equation"), [t.shape(name) for name in node.inputs])
    if letters is None:
        return None
    wanted = letters.pop()
    operands = list(zip(t.refs(node), letters, strict=True))
    # A weight comes last.
    operands.sort(key=lambda operand: not isinstance(operand[0], View))
    views = [_Lettered(ref, named) for ref, named in operands if isinstance(ref, View)]
    last, named = operands[-1]
    match len(operands), views:
        case 1, [x]:
            return [_summed(t, x, wanted).laid_out(wanted)]
        case 2, [x, y]:
            return _of_views(t, _summed(t, x, y.letters + wanted), _summed(t, y, x.letters + wanted), wanted)
        case 2, [x] if isinstance(last, Fixed):
            return _with_weight(t, _summed(t, x, named + wanted), last, named, wanted)
    return None


def _letters(equation: str | bytes, shapes: Sequence[tuple[int, ...]]) -> list[str] | None:
    """The letters of operands and result; None for diagonals, and for what a letter spreads."""
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


def _summed(t: Builder, x: _Lettered, kept: str) -> _Lettered:
    """A tensor summed over what nothing else has."""
    axes = [place for place, letter in enumerate(x.letters) if letter not in kept]
    letters = "".join(letter for letter in x.letters if letter in kept)
    return _Lettered(reduced(t, "ReduceSum", x.view, axes, is_kept=False), letters) if axes else x


def _of_views(t: Builder, x: _Lettered, y: _Lettered, wanted: str) -> Result:
    """A product of matrices: of what one operand alone has, the last is a dimension of its matrix.

    What else it has, and what both have, numbers the matrices.
    """
    own_x = [letter for letter in wanted if letter not in y.letters]
    own_y = [letter for letter in wanted if letter not in x.letters]
    over = [letter for letter in x.letters if letter not in wanted]
    if own_x and own_y and wanted.index(own_x[-1]) > wanted.index(own_y[-1]):
        return _of_views(t, y, x, wanted)
    if not over:
        return None if own_x and own_y else times(t, x.laid_out(wanted), y.laid_out(wanted))
    rows, columns = "".join(own_x[-1:]), "".join(own_y[-1:])
    batch = "".join(letter for letter in wanted if letter not in rows + columns)
    if {atom.axis for atom in x.dim(*own_x[:-1])} & {atom.axis for atom in y.dim(*own_y[:-1])}:
        # One axis, twice along the result, would not be told apart.
        return None
    first = replace(x.view, dims=(*x.laid_out(batch).dims, x.dim(*rows), x.dim(*over)))
    second = replace(y.view, dims=(*y.laid_out(batch).dims, y.dim(*over), y.dim(*columns)))
    result = product_of_views(t, first, second)
    # A matrix that has no letter for a dimension has size 1 there.
    return None if result is None else [_Lettered(result, batch + (rows or "0") + columns).laid_out(wanted)]


def _with_weight(t: Builder, x: _Lettered, weight: Fixed, named: str, wanted: str) -> Result:
    """A linear layer; or where nothing is summed over, a weight that is multiplied."""
    sizes = dict(zip(named, weight.shape, strict=True))
    over = [letter for letter in named if letter not in wanted]
    new = [letter for letter in named if letter not in x.letters]
    if not over and not new:
        spread = replace(weight, shape=tuple(sizes.get(letter, 1) for letter in x.letters))
        result = times(t, x.view, spread)
        made = result[0] if result else None
        return None if made is None else [_Lettered(made, x.letters).laid_out(wanted)]
    if len(over) + len(new) != len(named) or set(over) & set(new):
        # A matrix for each of some dimension, or a weight that is itself summed.
        return None
    axes = tuple(named.index(letter) for letter in over)
    size = math.prod(sizes[letter] for letter in new)
    value, channels = t.terms.contracted(x.view, x.dim(*over), size, weight.name, axes)
    parts = reshaped((channels,), [sizes[letter] for letter in new])
    if parts is None:
        return None
    kept = [letter for letter in x.letters if letter in wanted]
    dims = (*(x.dim(letter) for letter in kept), *parts)
    return [_Lettered(View(value, dims), "".join((*kept, *new))).laid_out(wanted)]
