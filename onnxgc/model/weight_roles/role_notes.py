"""Notes to the user about the roles of weights."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from onnxgc.model.weight_roles.roles import ParameterDecision, Role

_MAX_NAMES = 3


def parameter_notes(decisions: Iterable[ParameterDecision]) -> tuple[str, ...]:
    """One line for each tied or doubtful parameter and each kind of doubtful constant, one for the others."""
    decisions = tuple(decisions)
    parameters = [decision for decision in decisions if decision.role is Role.PARAMETER]
    tied = (
        f"parameter '{decision.name}' is used by {len(decision.used_by)} nodes ({listed(decision.used_by)}) "
        "and trains as one"
        for decision in parameters
        if len(decision.used_by) > 1
    )
    doubts = (decision.doubt for decision in parameters if decision.doubt)
    constants = [decision for decision in decisions if decision.role is Role.CONSTANT]
    return (*tied, *doubts, *_doubtful_constants(constants), *_other_constants(constants))


def _doubtful_constants(constants: Iterable[ParameterDecision]) -> Iterator[str]:
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for decision in constants:
        if decision.doubt:
            names_of[decision.doubt].append(decision.name)
    return (f"{_with_count(names)}: {doubt}" for doubt, names in names_of.items())


def _other_constants(constants: Iterable[ParameterDecision]) -> Iterator[str]:
    """One line for all tensors, which also counts single numbers."""
    fixed = [decision for decision in constants if decision.type.is_floating and not decision.doubt]
    tensors = [decision.name for decision in fixed if decision.type.element_count > 1]
    numbers = [decision.name for decision in fixed if decision.type.element_count == 1]
    if tensors:
        more = f", and {len(numbers)} single numbers" if numbers else ""
        yield (
            f"floating-point tensors that do not train: {_with_count(tensors)}{more}; "
            "`onnxgc inspect` lists the reasons, and --trainable +NAME trains one"
        )


def listed(names: Sequence[str]) -> str:
    """The first names, in quotes."""
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."


def _with_count(names: Sequence[str]) -> str:
    return f"'{names[0]}'" if len(names) == 1 else f"{listed(names)} ({len(names)} weights)"
