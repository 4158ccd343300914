"""Which values are known to have no negative element."""

from __future__ import annotations

from onnxgc.matching.normal_form.structure import OfValue, Structure, Unordered, View

_NEVER_NEGATIVE = ("Sigmoid", "Softplus", "Exp", "Abs", "softmax")


def is_never_negative(structure: Structure, x: View) -> bool:
    """Whether it is known that no element is negative."""
    if x.scale <= 0:
        return False
    pending, looked_at = [x.value], {x.value}
    while pending:
        depends = _depends(structure, pending.pop())
        if depends is None:
            return False
        pending += set(depends) - looked_at
        looked_at.update(depends)
    return True


def _depends(structure: Structure, value: int) -> list[int] | None:
    """The values that must have no negative element so that this one has none; None where it may have one."""
    entity = structure.entities[value]
    match (entity.op, *entity.term):
        case ("clip", OfValue(inner), low, high) if high >= 0:
            return [] if low >= 0 else [inner]
        case ("clip", *_):
            return None
        case ("power", OfValue(inner), exponent):
            return [] if exponent % 2 == 0 else [inner]
        case ("plus", OfValue(inner), number) if number >= 0:
            return [inner]
        case ("sum", Unordered(terms), _) if all(factor > 0 for _, factor in terms):
            return [of.value for of, _ in terms]
        case ("product", Unordered(factors), _):
            return [factor.value for factor in factors]
        case ("concatenated", parts, _):
            is_known = all(isinstance(of, OfValue) and rest[0] > 0 for of, *rest in parts)
            return [of.value for of, *_ in parts] if is_known else None
        case ("MaxPool" | "AveragePool" | "mean" | "max" | "min" | "taken", OfValue(inner), *_):
            return [inner]
    return [] if entity.op in _NEVER_NEGATIVE else None
