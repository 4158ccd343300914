"""Values in one normal form, however an exporter spells them.

Numbers that multiply are kept apart from a value, as its scale, so that it does not matter where an exporter
multiplies. Powers, polynomials of one value, variances, normalisations and softmax are recognised when their
last operator comes, and composed activations have the form in which most exporters write them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxgc.matching.normal_form.constant_tables import Seen, Table
from onnxgc.matching.normal_form.dimensions import Atom, Dim, Dims, as_set, extent
from onnxgc.matching.normal_form.structure import (
    Fixed,
    OfValue,
    Structure,
    Unordered,
    View,
    in_terms,
    padded,
    set_in_terms,
    unordered,
)

INFINITY = math.inf
_MOST_TERMS = 16
_WEIGHTED_MUL, _WEIGHTED_ADD = "weighted", "shifted"


class Terms:
    """Makes values of a structure."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._summands: dict[int, _Summands] = {}

    # -- with numbers and weights ----------------------------------------------------------------

    def scaled(self, x: View, factor: float) -> View:
        if factor == 0:
            return View(self.structure.value("zero", OfValue(x.value)), x.dims)
        return replace(x, scale=x.scale * factor)

    def plus_number(self, x: View, number: float) -> View:
        """s v + c as s (v + c / s)."""
        offset, value = number / x.scale, x.value
        known = self._known(value)
        if known[0] == "plus":
            value, offset = known[1], known[2] + offset
        if offset == 0:
            return replace(x, value=value)
        found = self.structure.value("plus", OfValue(value), offset, known=("plus", value, offset))
        return View(found, x.dims, x.scale)

    def with_weight(self, x: View, weight: Fixed, is_added: bool) -> View:
        """A weight that is multiplied or added; what scales it is as well a part of the weight."""
        rank = max(len(x.dims), len(weight.shape))
        x = replace(x, dims=((),) * (rank - len(x.dims)) + x.dims)
        dims, new = list(x.dims), list[Dim]()
        shape = (1,) * (rank - len(weight.shape)) + weight.shape
        for position, size in enumerate(shape):
            if size > 1 and not dims[position]:
                dims[position] = self.structure.axis("broadcast", size)
                new.append(dims[position])
        if weight.number is not None and new:
            number = weight.number
            x = self.plus_number(x, number) if is_added else self.scaled(x, number)
            return self.expanded(x, tuple(dims), new)
        cover = as_set(*(dim for dim, size in zip(dims, shape, strict=True) if size > 1))
        return self.weighted_by(replace(x, dims=tuple(dims)), weight, cover, is_added)

    def expanded(self, x: View, dims: Dims, new: Sequence[Dim]) -> View:
        """The same along new dimensions, which lie where it had none."""
        known = ("expanded", x.value, x.dims)
        value = self.structure.value("expand", OfValue(x.value), set_in_terms(*new), known=known)
        return replace(x, value=value, dims=dims)

    def with_table(self, x: View, shape: tuple[int, ...], table: Table, *, is_added: bool) -> View:
        """A constant that counts by its contents, added, or multiplied so that its largest number is 1."""
        rank = max(len(x.dims), len(shape))
        dims = list(((),) * (rank - len(x.dims)) + x.dims)
        new: list[Dim] = []
        for place, size in enumerate(shape, rank - len(shape)):
            if size > 1 and not dims[place]:
                dims[place] = self.structure.axis("broadcast", size)
                new.append(dims[place])
        largest = 1.0 if math.isinf(table.largest()) else table.largest()
        factor = 1 / x.scale if is_added else 1 / largest
        seen = table.mapped(lambda number: number * factor).seen_from_axes()
        op = "plus table" if is_added else "times table"
        contents = _contents(tuple(dims), seen)
        value = self.structure.value(op, OfValue(x.value), contents, set_in_terms(*new))
        return View(value, self._marked(tuple(dims), seen), x.scale if is_added else x.scale * largest)

    def _marked(self, dims: Dims, seen: Seen) -> Dims:
        """Dimensions under a table. What a product made is told apart by it, as keys from queries."""
        result = list(dims)
        for place, content in seen:
            result[-place] = tuple(
                self.structure.axis("joined", atom.size, in_terms((atom,)), content)[0]
                if self.structure.entities[atom.axis].op in ("own", "joined")
                else atom
                for atom in result[-place]
            )
        return tuple(result)

    def contracted(
        self, x: View, over: Dim, size: int, weight: str, axes: tuple[int, ...] = ()
    ) -> tuple[int, Dim]:
        """x times a matrix over a dimension, and the dimension that takes its place."""
        # Which axes of the weight lie on it, and how, only tells two uses of one weight apart.
        key = (weight, x.scale, in_terms(over), axes)
        return self.layer("linear", key, size, OfValue(x.value), set_in_terms(over))

    def layer(
        self, op: str, weights: tuple[Any, ...], size: int, *what: Any, is_dense: bool = True
    ) -> tuple[int, Dim]:
        """A product with weights, of which the first of `weights` is the name, and the channels it makes.

        They are all made alike where it `is_dense`.
        """
        new = self.structure.axis("channels", size, *what, weights=weights)
        known = ("layer", new, op, weights, what) if is_dense else ()
        return self.structure.value(op, *what, size, weights=weights, cover=new, known=known), new

    # -- of one value ----------------------------------------------------------------------------

    def unary(self, op: str, x: View, *settings: Any) -> View:
        return View(self.structure.value(op, OfValue(x.value), x.scale, *settings), x.dims)

    def clipped(self, x: View, low: float, high: float) -> View:
        """The value within limits; a positive scale goes through."""
        if x.scale < 0:
            return self.scaled(self.clipped(self.scaled(x, -1.0), -high, -low), -1.0)
        low, high, value = low / x.scale, high / x.scale, x.value
        known = self._known(value)
        if known[0] == "clipped":
            # The outer limits hold, also where no number is within both.
            inner = (min(max(known[2], low), high), max(min(known[3], high), low))
            value, low, high = known[1], *inner
        found = self.structure.value("clip", OfValue(value), low, high, known=("clipped", value, low, high))
        return View(found, x.dims, x.scale)

    def power(self, x: View, exponent: float) -> View:
        if exponent == 1:
            return x
        if x.scale < 0 and not float(exponent).is_integer():
            return self.unary("power", x, exponent)
        scale, value, total = float(x.scale**exponent), x.value, exponent
        known = self._known(value)
        if known[0] == "power" and float(exponent).is_integer():
            value, total = known[1], known[2] * exponent
            if total == 1:
                return View(value, x.dims, scale)
        found = self.structure.value("power", OfValue(value), total, known=("power", value, total))
        self._know_spread(found, value, total)
        return View(found, x.dims, scale)

    def erf(self, x: View) -> View:
        """An odd function: signs go through."""
        sign = math.copysign(1.0, x.scale)
        return self.scaled(self.unary("Erf", self.scaled(x, sign)), sign)

    def tanh(self, x: View) -> View:
        sign = math.copysign(1.0, x.scale)
        return self.scaled(self.unary("Tanh", self.scaled(x, sign)), sign)

    def exp(self, x: View) -> View:
        result = self.unary("Exp", x)
        known = self._known(x.value)
        if known[0] == "below its maximum" and x.scale == 1:
            self.structure.known_as.setdefault(result.value, ("exponential", *known[1:]))
        return result

    def mean(self, x: View, over: Dim, dims: Dims) -> View:
        """The mean over atoms; a mean of a mean is one over both."""
        value = x.value
        known = self._known(value)
        if known[0] == "mean":
            value, over = known[1], as_set(known[2], over)
        found = self.structure.value("mean", OfValue(value), set_in_terms(over), known=("mean", value, over))
        return View(found, dims, x.scale)

    def extreme(self, op: str, x: View, over: Dim, dims: Dims) -> View:
        if x.scale < 0:
            op = {"max": "min", "min": "max"}[op]
        found = self.structure.value(op, OfValue(x.value), set_in_terms(over), known=(op, x.value, over))
        return View(found, dims, x.scale)

    def normalized(self, x: View, over: Dim, epsilon: float) -> View:
        """x less its mean, divided by its deviation."""
        rest = as_set(tuple(a for a in atoms_of(x.dims) if not any(a.is_within(other) for other in over)))
        value = self.normalized_value(x.value, over, epsilon / x.scale**2, rest)
        return View(value, x.dims, math.copysign(1.0, x.scale))

    def normalized_value(self, value: int, over: Dim, epsilon: float, rest: Dim) -> int:
        known = ("normalized", value, over, epsilon, rest)
        term = (OfValue(value), set_in_terms(over), epsilon)
        return self.structure.value("normalize", *term, cover=rest, known=known)

    def softmax(self, x: View, over: Dim, op: str = "softmax") -> View:
        """What it is over is marked: what reads it can tell that axis from others alike."""
        value = self.structure.value(op, OfValue(x.value), x.scale, set_in_terms(over))
        dims = tuple(
            tuple(
                self.structure.axis(op, atom.size, in_terms((atom,)))[0] if atom in over else atom
                for atom in dim
            )
            for dim in x.dims
        )
        return View(value, dims)

    # -- of two values ---------------------------------------------------------------------------

    def product(self, x: View, y: View) -> View | None:
        x, y = self.not_expanded(x, y), self.not_expanded(y, x)
        for one, other in ((x, y), (y, x)):
            known = self._known(one.value)
            if known[0] == "weighted" and self._known(known[1])[0] in ("power", "spread"):
                # A weight beside one over the deviation: first the quotient, then the weight.
                inner = self.product(View(known[1], one.dims), other)
                cover = () if inner is None else _cover_in(known[3], one.dims, inner.dims)
                weighted = None if inner is None else self.weighted_by(inner, known[2], cover)
                return None if weighted is None else self.scaled(weighted, one.scale * known[4])
        special = self._normalization(x, y) or self._softmax(x, y) or self._of_powers(x, y)
        if special is not None:
            return special
        laid, crossing = self.structure.apart([(OfValue(v.value), v.dims) for v in (x, y)])
        dims = self.structure.broadcast(*laid)
        if dims is None:
            return None
        known = self._by_spread(x, y) or self._by_spread(y, x)
        value = self.structure.value(
            "product",
            unordered(OfValue(x.value), OfValue(y.value)),
            dims[1],
            *crossing,
            known=known or ("product", x, y),
        )
        return View(value, dims[0], x.scale * y.scale)

    def not_expanded(self, x: View, other: View) -> View:
        """What was expanded to the dimensions of the other operand, as it was before."""
        known = self._known(x.value)
        if known[0] != "expanded" or len(other.dims) < len(x.dims):
            return x
        lying = zip(reversed(known[2]), reversed(x.dims), reversed(other.dims), strict=False)
        is_covered = all(own or not here or extent(here) == extent(there) for own, here, there in lying)
        return replace(x, value=known[1], dims=known[2]) if is_covered else x

    def sum(self, x: View, y: View) -> View | None:
        return self.total([x, y])

    def total(
        self, views: Sequence[View], weights: Sequence[Fixed] = (), *, is_term: bool = False
    ) -> View | None:
        """The sum of values and weights.

        Where it `is_term`, nothing but another sum reads it: its terms are terms of that one then, so that
        it does not matter in which order an exporter adds.
        """
        special = self._special_sum(*views) if len(views) == 2 else None
        views = views if special is None else [special]
        count = sum(self._summands[view.value].count if view.value in self._summands else 1 for view in views)
        # A part that is long is known by the two that it is of, so that a sum of many is no square of them.
        is_whole = not is_term or count <= _MOST_TERMS
        terms, more = self._terms_of(views) if is_whole else (list(views), [])
        loose = [*weights, *more]
        x = self._sum_of(terms)
        if x is None:
            return None
        for weight in _combined(loose):
            x = self.with_weight(x, weight, is_added=True)
        if not is_term or len(terms) + len(loose) == 1 or self._is_bias(x):
            return x
        part = self.structure.value(
            "partial sum", OfValue(x.value), known=self.structure.known_as.get(x.value, ())
        )
        self._summands[part] = _Summands(
            tuple(self.scaled(term, 1 / x.scale) for term in terms), tuple(loose), count
        )
        return replace(x, value=part)

    def _terms_of(self, views: Sequence[View]) -> tuple[list[View], list[Fixed]]:
        """The values and weights that a sum is of, with those of its parts."""
        pending, terms, weights = list(reversed(views)), list[View](), list[Fixed]()
        while pending:
            view = pending.pop()
            known = self._summands.get(view.value)
            if known is None:
                terms.append(view)
                continue
            pending += [self.scaled(term, view.scale) for term in reversed(known.views)]
            weights += known.weights
        return terms, weights

    def _sum_of(self, views: Sequence[View]) -> View | None:
        """A sum, scaled so that the largest factor is 1."""
        if len(views) == 1:
            return views[0]
        totals: dict[tuple[int, Dims], float] = {}
        for view in views:
            key = (view.value, view.dims)
            totals[key] = totals.get(key, 0.0) + view.scale
        totals = {key: factor for key, factor in totals.items() if factor} or dict.fromkeys(totals, 0.0)
        if len(totals) == 1 or not any(totals.values()):
            ((value, dims), factor), *_ = totals.items()
            return self.scaled(View(value, dims), factor)
        scale = max(map(abs, totals.values()))
        terms = [(OfValue(value), factor / scale) for (value, _), factor in totals.items()]
        laid, crossing = self.structure.apart(list(zip(terms, (dims for _, dims in totals), strict=True)))
        found = self.structure.broadcast_all(laid)
        if found is None:
            return None
        return View(self.structure.value("sum", unordered(*terms), found[1], *crossing), found[0], scale)

    def _special_sum(self, x: View, y: View) -> View | None:
        """A sum of two values that is known to be something else, or less than another value."""
        dims = self.structure.broadcast(x.dims, y.dims)
        if dims is None:
            return None
        special = self._affine_normalization(x, y, dims[0]) or self._from_the_end_by_masks(x, y)
        if special is not None:
            return special
        for one, other in _both_ways(x, y):
            known: tuple[Any, ...] = ()
            if math.isclose(one.scale, -other.scale, rel_tol=1e-6):
                known = self._difference(one, other)
            if known:
                # The recognised form has the sign of what is subtracted from.
                terms = [(OfValue(v.value), v.scale / one.scale) for v in (x, y)]
                value = self.structure.value("sum", unordered(*terms), dims[1], known=known)
                return View(value, dims[0], one.scale)
        return None

    def _is_bias(self, x: View) -> bool:
        """Whether a weight was added to what is along the same axes a layer: both stay together."""
        known = self._known(x.value)
        layer = self.structure.entities[known[1]] if known[0] == "shifted" else None
        return layer is not None and layer.op != "entries of" and set(layer.cover) == set(known[3])

    def elementwise(self, op: str, *operands: View | Fixed, is_ordered: bool = True) -> View | None:
        dims: Dims = ()
        terms: list[Any] = []
        met: list[Any] = []
        keyed: list[tuple[Any, Dims]] = []
        for place, operand in enumerate(operands):
            key = (OfValue(operand.value), operand.scale) if isinstance(operand, View) else ()
            own: Dims = (
                tuple(self.structure.axis("broadcast", size) for size in operand.shape)
                if isinstance(operand, Fixed)
                else operand.dims
            )
            keyed.append(((place, key) if is_ordered else key, own))
        laid, crossing = self.structure.apart(keyed)
        for own in laid:
            found = self.structure.broadcast(dims, own)
            if found is None:
                return None
            dims = found[0]
            met += found[1].items
        weights: tuple[str, ...] = ()
        tables: list[Seen] = []
        for operand in operands:
            if isinstance(operand, View):
                terms.append((OfValue(operand.value), operand.scale))
            elif operand.number is not None:
                terms.append(operand.number)
            elif operand.table is not None:
                tables.append(operand.table.seen_from_axes())
                terms.append(_contents(dims, tables[-1]))
            else:
                terms.append("weight")
                weights += (operand.name,)
        for seen in tables:
            dims = self._marked(dims, seen)
        inner = tuple(terms) if is_ordered else unordered(*terms)
        return View(self.structure.value(op, inner, unordered(*met), *crossing, weights=weights), dims)

    # -- what values are known to be -------------------------------------------------------------

    def _known(self, value: int) -> tuple[Any, ...]:
        return self.structure.known_as.get(value, ("",))

    def _lies_over(self, rest: View, x: View, over: Dim) -> bool:
        """Whether each element of what some atoms of x were reduced to lies on those it was made of."""
        rank = max(len(rest.dims), len(x.dims))
        pairs = zip(padded(x.dims, rank), padded(rest.dims, rank), strict=True)
        parted = [(here, there) for here, there in pairs if here != there]
        is_spread = not any(self._without_spread(tuple(there for _, there in parted)))
        return is_spread and as_set(*(here for here, _ in parted)) == over

    def _without_spread(self, dims: Dims) -> Dims:
        """Dimensions, with nothing where a weight alone extends."""
        axes = self.structure.entities
        return tuple(() if all(axes[atom.axis].op == "broadcast" for atom in dim) else dim for dim in dims)

    def _lie_alike(self, x: View, y: View) -> bool:
        """Whether two values extend along the same dimensions, but for those of weights."""
        rank = max(len(x.dims), len(y.dims))
        first, second = (padded(self._without_spread(view.dims), rank) for view in (x, y))
        return first == second

    def _difference(self, x: View, less: View) -> tuple[Any, ...]:
        value, known = x.value, self._known(less.value)
        if known[0] in ("mean", "max") and known[1] == value and self._lies_over(less, x, known[2]):
            return ("centred" if known[0] == "mean" else "below its maximum", value, known[2])
        if not self._lie_alike(x, less):
            return ()
        first, second = self._known(value), known
        if first[0] == "mean" and second[0] == "power" and second[2] == 2:
            squared, mean = self._known(first[1]), self._known(second[1])
            is_square = squared[0] == "power" and squared[2] == 2
            if is_square and mean[0] == "mean" and mean[1] == squared[1] and mean[2] == first[2]:
                return ("variance", squared[1], first[2])
        return ()

    def _variance(self, value: int) -> tuple[int, Dim] | None:
        known = self._known(value)
        if known[0] == "clipped" and known[2] == 0:
            known = self._known(known[1])
        if known[0] == "variance":
            return known[1], known[2]
        if known[0] == "mean":
            square = self._known(known[1])
            centred = self._known(square[1]) if square[0] == "power" and square[2] == 2 else ("",)
            if centred[0] == "centred" and centred[2] == known[2]:
                return centred[1], centred[2]
        return None

    def _know_spread(self, found: int, value: int, exponent: float) -> None:
        """Whether it is one over the deviation of a value."""
        known = self._known(value)
        if exponent != -0.5 or known[0] != "plus":
            return
        variance = self._variance(known[1])
        if variance is not None:
            self.structure.known_as[found] = ("spread", *variance, known[2])

    def _normalization(self, x: View, y: View) -> View | None:
        for one, other in ((x, y), (y, x)):
            centred, spread = self._known(one.value), self._known(other.value)
            is_of_both = centred[0] == "centred" and spread[0] == "spread" and centred[1:] == spread[1:3]
            if is_of_both and self._lies_over(other, one, centred[2]):
                # Scales that variance and epsilon share cancel; others stay.
                result = self.normalized(View(centred[1], one.dims), centred[2], spread[3])
                return self.scaled(result, one.scale * other.scale)
        return None

    def _softmax(self, x: View, y: View) -> View | None:
        for one, other in ((x, y), (y, x)):
            top, bottom = self._known(one.value), self._known(other.value)
            if top[0] != "exponential" or bottom[0] != "power" or bottom[2] != -1:
                continue
            total = self._known(bottom[1])
            is_whole = total[0] == "mean" and total[1] == one.value and total[2] == top[2]
            if is_whole and self._lies_over(other, one, top[2]):
                return self.softmax(View(top[1], one.dims), top[2])
        return None

    def _of_powers(self, x: View, y: View) -> View | None:
        """Powers of one value, and one times the same plus a number, as a polynomial."""
        if x.dims != y.dims:
            return None
        for one, other in ((x, y), (y, x)):
            base, exponent = self._as_power(one.value)
            second, more = self._as_power(other.value)
            scale = one.scale * other.scale
            if base == second:
                return self.scaled(self.power(View(base, x.dims), exponent + more), scale)
            known = self._known(other.value)
            if known[0] == "plus":
                second, more = self._as_power(known[1])
                if base == second and more != 1:
                    high = self.power(View(base, x.dims), exponent + more)
                    low = self.scaled(self.power(View(base, x.dims), exponent), known[2])
                    total = self.sum(high, low)
                    return None if total is None else self.scaled(total, scale)
        return None

    def _as_power(self, value: int) -> tuple[int, float]:
        known = self._known(value)
        return (known[1], known[2]) if known[0] == "power" else (value, 1.0)

    def weighted_by(self, x: View, weight: Fixed, cover: Dim, is_added: bool = False) -> View:
        """A weight of which it is known what it covers in x.

        What scales x is a part of the weight, or of weights below one that is added; else it stays outside.
        """
        outside = 1.0
        if is_added and not self._has_weights_along(x.value, cover):
            outside, x = x.scale, replace(x, scale=1.0)
        value = self.structure.value(
            _WEIGHTED_ADD if is_added else _WEIGHTED_MUL,
            OfValue(x.value),
            set_in_terms(cover),
            weights=(weight.name, x.scale),
            cover=cover,
            known=("shifted" if is_added else "weighted", x.value, weight, cover, x.scale),
        )
        return View(value, x.dims, outside)

    def _has_weights_along(self, value: int, cover: Dim) -> bool:
        """Whether weights along these axes, which can take in a factor, made a value."""
        entity = self.structure.entities[value]
        if not cover or set(entity.cover) != set(cover):
            return False
        if entity.op == _WEIGHTED_ADD:
            return self._has_weights_along(self._known(value)[1], cover)
        return bool(entity.weights)

    def _by_spread(self, x: View, spread: View) -> tuple[Any, ...]:
        """Whether a product is a value, or its mean, divided by the value's deviation."""
        known, first = self._known(spread.value), self._known(x.value)
        if known[0] != "spread":
            return ()
        if x.value == known[1] and self._lies_over(spread, x, known[2]):
            return ("by its deviation", *known[1:])
        if first[0] == "mean" and first[1:] == known[1:3] and self._lie_alike(x, spread):
            return ("mean by deviation", *known[1:])
        return ()

    def _affine_normalization(self, x: View, y: View, dims: Dims) -> View | None:
        """x s + (b - m s) with s = g / deviation, as many write batch normalisation; g or b may lack."""
        for one, other in _both_ways(x, y):
            shift = self._known(other.value)
            has_shift = shift[0] == "shifted"
            means, sign = (shift[1], shift[4] * other.scale) if has_shift else (other.value, other.scale)
            if one.scale != 1:
                continue
            top, weight, factor = self._without_weight(one.value)
            bottom, same_weight, other_factor = self._without_weight(means)
            if weight[:1] != same_weight[:1] or not math.isclose(factor, -sign * other_factor):
                continue
            if (top[0], bottom[0]) != ("by its deviation", "mean by deviation") or top[1:] != bottom[1:]:
                continue
            if not self._lies_over(other, one, top[2]):
                continue
            result = self.scaled(self.normalized(View(top[1], dims), top[2], top[3]), factor)
            if weight:
                result = self.weighted_by(result, weight[0], _cover_in(weight[1], one.dims, dims))
            if not has_shift:
                return result
            return self.weighted_by(result, shift[2], _cover_in(shift[3], other.dims, dims), is_added=True)
        return None

    def _without_weight(self, value: int) -> tuple[tuple[Any, ...], tuple[Any, ...], float]:
        """What a value is known as below a weight that multiplies it, the weight, its cover, a factor."""
        known = self._known(value)
        if known[0] == "weighted":
            return self._known(known[1]), known[2:4], known[4]
        return known, (), 1.0

    def is_guard(self, condition: View, x: View) -> bool:
        """Whether a condition holds where a softmax is no number, as of a row that is masked."""
        guard = self.structure.entities[condition.value]
        is_of_softmax = self.structure.entities[x.value].op == "softmax"
        return is_of_softmax and guard.op == "IsNaN" and guard.term[0] == OfValue(x.value)

    # -- indices -----------------------------------------------------------------------------------

    def from_the_end(self, condition: View, first: View, second: View) -> View | None:
        """Indices in which negative ones count from the end, as the indices that they are made of."""
        known = self._known(first.value)
        if (
            known[0] == "plus"
            and known[1] == second.value
            and self._is_sign_of(condition.value, second.value)
        ):
            return second
        return None

    def _from_the_end_by_masks(self, x: View, y: View) -> View | None:
        """The same as a sum of both choices, each multiplied with where it holds."""
        for one, other in ((x, y), (y, x)):
            first, second = self._known(one.value), self._known(other.value)
            if first[0] != "product" or second[0] != "product":
                continue
            for mask, moved in _both_ways(first[1], first[2]):
                for rest, kept in _both_ways(second[1], second[2]):
                    is_rest = self.structure.entities[rest.value].term[:1] == (OfValue(mask.value),)
                    if is_rest and self.from_the_end(mask, moved, kept) is not None:
                        return replace(kept, scale=1.0)
        return None

    def _is_sign_of(self, condition: int, value: int) -> bool:
        entity = self.structure.entities[condition]
        found: bool = entity.op == "Less" and entity.term[0] == ((OfValue(value), 1.0), 0.0)
        return found


@dataclass(frozen=True, slots=True)
class _Summands:
    """The values and weights that a sum is of, some of which may be sums; `count` values in all."""

    views: tuple[View, ...]
    weights: tuple[Fixed, ...]
    count: int


def _contents(dims: Dims, seen: Seen) -> Unordered:
    """A table by what it is along each dimension of the tensor that it lies on."""
    return unordered(*((in_terms(dims[-place]), content) for place, content in seen))


def _combined(weights: Sequence[Fixed]) -> list[Fixed]:
    """Added weights, with those that extend along no other axes than one of them as part of that one."""
    result: list[Fixed] = []
    for weight in sorted(weights, key=lambda weight: (-math.prod(weight.shape), weight.shape)):
        for place, larger in enumerate(result):
            rank = max(len(weight.shape), len(larger.shape))
            shape, smaller = (((1,) * (rank - len(w.shape)) + w.shape) for w in (larger, weight))
            if all(size in (1, own) for size, own in zip(smaller, shape, strict=True)):
                result[place] = Fixed(f"{larger.name}+{weight.name}", shape)
                break
        else:
            result.append(weight)
    return result


def _both_ways(x: View, y: View) -> tuple[tuple[View, View], tuple[View, View]]:
    return ((x, y), (y, x))


def _cover_in(cover: Dim, dims: Dims, result: Dims) -> Dim:
    """What a weight covers in a result, whose dimensions those of its operand lie on from the right."""
    lying = zip(reversed(dims), reversed(result), strict=False)
    return as_set(*(there for here, there in lying if here and set(here) <= set(cover)))


def positions(dims: Dims, axes: Sequence[int]) -> Dim:
    """What the dimensions at these places hold."""
    return as_set(*(dims[axis] for axis in axes))


def atoms_of(dims: Dims) -> tuple[Atom, ...]:
    return tuple(atom for dim in dims for atom in dim)
