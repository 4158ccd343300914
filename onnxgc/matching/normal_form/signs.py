"""Values that are proven to have no negative element."""

from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.terms import OfValue, Unordered
from onnxgc.matching.normal_form.value_graph import Structure

_NEVER_NEGATIVE = ("Sigmoid", "Softplus", "Exp", "Abs", "softmax")


def is_never_negative(structure: Structure, x: View) -> bool:
    if x.scale <= 0:
        return False
    pending, seen = [x.value], {x.value}
    while pending:
        operands = _decisive_operands(structure, pending.pop())
        if operands is None:
            return False
        pending += set(operands) - seen
        seen.update(operands)
    return True


def _decisive_operands(structure: Structure, value: int) -> list[int] | None:
    """The operands whose signs decide whether a value may be negative; None if it may be in any case."""
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
            is_positive = all(isinstance(of, OfValue) and rest[0] > 0 for of, *rest in parts)
            return [of.value for of, *_ in parts] if is_positive else None
        case ("MaxPool" | "AveragePool" | "mean" | "max" | "min" | "taken", OfValue(inner), *_):
            return [inner]
    return [] if entity.op in _NEVER_NEGATIVE else None
