"""Which values are known to have no negative element."""

from __future__ import annotations

from onnxgc.comparison.structure import OfValue, Structure, Unordered, View

_NEVER_NEGATIVE = ("Sigmoid", "Softplus", "Exp", "Abs", "softmax")


def is_never_negative(structure: Structure, x: View) -> bool:
    """Whether it is known that no element is negative."""
    return x.scale > 0 and _Signs(structure).is_never_negative(x.value)


class _Signs:
    """What was found of values, each of which is looked at once."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._known: dict[int, bool] = {}

    def is_never_negative(self, value: int) -> bool:
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: int) -> bool:
        entity = self._structure.entities[value]
        match (entity.op, *entity.term):
            case ("clip", _, low, _) if low >= 0:
                return True
            case ("power", OfValue(inner), exponent):
                return exponent % 2 == 0 or self.is_never_negative(inner)
            case ("plus", OfValue(inner), number):
                return number >= 0 and self.is_never_negative(inner)
            case ("sum", Unordered(terms), _):
                return all(factor > 0 and self.is_never_negative(of.value) for of, factor in terms)
            case ("product", Unordered(factors), _):
                return all(self.is_never_negative(factor.value) for factor in factors)
            case ("concatenated", parts, _):
                return all(
                    isinstance(of, OfValue) and rest[0] > 0 and self.is_never_negative(of.value)
                    for of, *rest in parts
                )
            case ("clip" | "MaxPool" | "AveragePool" | "mean" | "max" | "min" | "taken", OfValue(inner), *_):
                return self.is_never_negative(inner)
        return entity.op in _NEVER_NEGATIVE
