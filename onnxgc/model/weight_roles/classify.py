"""Infers which weights train from their uses and values, and lets the user override the result."""

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxgc.errors import NoParametersError
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import TensorType, Weight
from onnxgc.model.core.name_globs import matches
from onnxgc.model.core.stored_weights import ExportedAs
from onnxgc.model.weight_roles.role_notes import listed
from onnxgc.model.weight_roles.roles import ParameterDecision, Role
from onnxgc.model.weight_roles.uses import WeightUse, WeightUses
from onnxgc.model.weight_roles.value_patterns import (
    are_sine_and_cosine,
    holds_sines_and_cosines,
    likely_sine_and_cosine,
    sample,
)
from onnxgc.model.weight_roles.weight_evidence import exported_role, values_of

NOT_FLOATING = "not a floating-point tensor"
_TABLE_USES = frozenset({"Mul", "Add", "Gather"})
"""Operators that read tables of positions: as factors, as summands, and by lookup."""
_ROLES_BY_MARK = {
    ExportedAs.PARAMETER: Role.PARAMETER,
    ExportedAs.BUFFER: Role.CONSTANT,
    ExportedAs.CONSTANT: Role.CONSTANT,
}

_ADDITION = "+"
"""The prefix of a glob that trains in addition to the inferred parameters."""


def classify_weights(
    draft: Draft, trainable: Sequence[str] = (), freeze: Sequence[str] = ()
) -> tuple[ParameterDecision, ...]:
    """The role of each weight; `trainable` and `freeze` are globs of names that override it.

    With `trainable` and no `freeze`, nothing else trains, unless every glob begins with a plus: `+scale`
    trains in addition to the inferred parameters. If both match, `trainable` wins. Except for running
    statistics, a mark of the exporter has priority over use and values.

    Raises:
        NoParametersError: a glob matches no float weight, or is to train only running statistics.
    """
    for option, globs in (("trainable", trainable), ("freeze", freeze)):
        if isinstance(globs, str):
            raise NoParametersError(f"{option} takes a list of globs, such as ['{globs}']")
    finder = WeightUses(draft)
    uses = {name: finder.uses_of(name) for name, weight in draft.weights.items() if weight.type.is_floating}
    decisions = [_decide(name, weight, uses.get(name)) for name, weight in draft.weights.items()]
    return _with_overrides(_without_angle_tables(decisions, draft, uses), trainable, freeze)


def _decide(name: str, weight: Weight, uses: Sequence[WeightUse] | None) -> ParameterDecision:
    if uses is None:
        return ParameterDecision(name, weight.type, Role.CONSTANT, NOT_FLOATING)
    mark = exported_role(weight)
    is_statistic = any(use.role is Role.STATISTIC for use in uses)
    # Exporters mark running statistics as buffers.
    if mark in _ROLES_BY_MARK and not is_statistic:
        reason = f"a {mark}, as marked by the exporter"
        return ParameterDecision(name, weight.type, _ROLES_BY_MARK[mark], reason, _reading_nodes(uses))
    for role in (Role.PARAMETER, Role.STATISTIC, Role.CONSTANT):
        in_role = [use for use in uses if use.role is role]
        if in_role:
            reason, doubt = in_role[0].reason, _doubt(name, in_role)
            return ParameterDecision(name, weight.type, role, reason, _reading_nodes(in_role), doubt)
    return ParameterDecision(name, weight.type, Role.CONSTANT, "not used by any operator")


def _reading_nodes(uses: Sequence[WeightUse]) -> tuple[str, ...]:
    """The nodes that read a weight's values, or those that read its shape if there are no others."""
    names = dict.fromkeys(use.node.name for use in uses if use.node.op not in ("Shape", "Size"))
    return tuple(names or dict.fromkeys(use.node.name for use in uses))


def _doubt(name: str, uses: Sequence[WeightUse]) -> str:
    doubt = next((use.doubt for use in uses if use.doubt), "")
    if not doubt or uses[0].role is not Role.PARAMETER:
        return doubt
    return f"parameter '{name}' {doubt}, pass --freeze '{name}'"


def _without_angle_tables(
    decisions: Sequence[ParameterDecision], draft: Draft, uses: Mapping[str, Sequence[WeightUse]]
) -> list[ParameterDecision]:
    """The decisions, with tables of sines and cosines (in one tensor or in two) as constants."""
    names_by_type: defaultdict[TensorType, list[str]] = defaultdict(list)
    tables: dict[str, str] = {}
    for decision in decisions:
        name, weight = decision.name, draft.weights[decision.name]
        if decision.role is not Role.PARAMETER or exported_role(weight) is ExportedAs.PARAMETER:
            continue
        if not all(use.node.domain or use.node.op in _TABLE_USES for use in uses[name]):
            continue
        if holds_sines_and_cosines(values_of(weight)):
            tables[name] = "table of sines and cosines"
        names_by_type[decision.type].append(name)
    for names in names_by_type.values():
        for pair in likely_sine_and_cosine([sample(values_of(draft.weights[name])) for name in names]):
            one, two = (names[number] for number in pair)
            if are_sine_and_cosine(values_of(draft.weights[one]), values_of(draft.weights[two])):
                tables |= {one: f"sines or cosines, paired with '{two}'"}
                tables |= {two: f"sines or cosines, paired with '{one}'"}
    return [
        replace(d, role=Role.CONSTANT, reason=f"{tables[d.name]}: {d.reason}", doubt="") if d.name in tables else d
        for d in decisions
    ]


def _with_overrides(
    decisions: Sequence[ParameterDecision], trainable: Sequence[str], freeze: Sequence[str]
) -> tuple[ParameterDecision, ...]:
    """The decisions with the roles that the globs choose."""
    for glob in trainable:
        _check(decisions, "--trainable", glob.removeprefix(_ADDITION))
    for glob in freeze:
        _check(decisions, "--freeze", glob)
    trained = [glob.removeprefix(_ADDITION) for glob in trainable]
    is_exclusive = bool(trained) and not freeze and not all(glob.startswith(_ADDITION) for glob in trainable)
    return tuple(_override(decision, trained, freeze, is_exclusive) for decision in decisions)


def _check(decisions: Sequence[ParameterDecision], option: str, glob: str) -> None:
    floating = [decision for decision in decisions if decision.type.is_floating]
    matched = [decision for decision in floating if matches(decision.name, glob)]
    if not matched:
        names = [decision.name for decision in floating]
        close = difflib.get_close_matches(glob.strip("*?"), names, n=3, cutoff=0.3) or names[:3]
        known = f"closest names: {', '.join(map(repr, close))}" if close else "the model has no float weights"
        raise NoParametersError(f"{option} '{glob}' matches no weight of the model; {known}")
    if option == "--trainable" and all(decision.role is Role.STATISTIC for decision in matched):
        raise NoParametersError(
            f"--trainable '{glob}' matches only running statistics, such as '{matched[0].name}' of "
            f"{listed(matched[0].used_by)}: they have no gradient; the step updates them from the batch, "
            "or keeps them with --freeze-bn"
        )


def _override(
    decision: ParameterDecision, trainable: Sequence[str], freeze: Sequence[str], is_exclusive: bool
) -> ParameterDecision:
    if not decision.type.is_floating or decision.role is Role.STATISTIC:
        return decision
    for glob in trainable:
        if matches(decision.name, glob):
            return replace(decision, role=Role.PARAMETER, reason=f"--trainable {glob}", doubt="")
    if decision.role is not Role.PARAMETER:
        return decision
    if is_exclusive:
        return replace(decision, role=Role.FROZEN, reason="--trainable names others", doubt="")
    for glob in freeze:
        if matches(decision.name, glob):
            return replace(decision, role=Role.FROZEN, reason=f"--freeze {glob}")
    return decision
