"""Infers which weights train from their uses and values, and lets the user override the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxgc.errors import NoParametersError
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Weight
from onnxgc.model.core.stored_weights import ExportedAs, StoredWeight
from onnxgc.model.weight_roles.name_overrides import with_overrides
from onnxgc.model.weight_roles.roles import ParameterDecision, Role
from onnxgc.model.weight_roles.uses import WeightUse, WeightUses
from onnxgc.model.weight_roles.value_patterns import (
    are_sine_and_cosine,
    holds_sines_and_cosines,
    likely_sine_and_cosine,
    sample,
)
from onnxgc.model.weight_roles.weight_evidence import is_exported_parameter, values_of

NOT_FLOATING = "not a floating-point tensor"
_TABLE_USES = frozenset({"Mul", "Add", "Gather"})
"""Operators that read tables of positions: as factors, as summands, and by lookup."""
_ROLES_BY_MARK = {
    ExportedAs.PARAMETER: Role.PARAMETER,
    ExportedAs.BUFFER: Role.CONSTANT,
    ExportedAs.CONSTANT: Role.CONSTANT,
}


def classify_weights(
    draft: Draft, trainable: Sequence[str] = (), freeze: Sequence[str] = ()
) -> tuple[ParameterDecision, ...]:
    """The role of each weight; `trainable` and `freeze` are globs of names that override it.

    With `trainable` and no `freeze`, nothing else trains, unless every glob begins with a plus: `+scale`
    trains in addition to the inferred parameters. Where both match, `trainable` wins. Except for running
    statistics, a mark of the exporter has priority over use and values.

    Raises:
        NoParametersError: a glob matches no float weight, or is to train only running statistics.
    """
    for option, globs in (("trainable", trainable), ("freeze", freeze)):
        if isinstance(globs, str):
            raise NoParametersError(f"{option} takes a list of globs, such as ['{globs}']")
    finder = WeightUses(draft)
    uses = {name: finder.of(name) for name, weight in draft.weights.items() if weight.type.is_floating}
    decisions = [_decide(name, weight, uses.get(name)) for name, weight in draft.weights.items()]
    return with_overrides(_without_angle_tables(decisions, draft, uses), trainable, freeze)


def _decide(name: str, weight: Weight, uses: Sequence[WeightUse] | None) -> ParameterDecision:
    if uses is None:
        return ParameterDecision(name, weight.type, Role.CONSTANT, NOT_FLOATING)
    marked = _decision_by_mark(name, weight, uses)
    if marked is not None:
        return marked
    if not uses:
        return ParameterDecision(name, weight.type, Role.CONSTANT, "not used by any operator")
    for role in (Role.PARAMETER, Role.STATISTIC, Role.CONSTANT):
        found = [use for use in uses if use.role is role]
        if found:
            reason, doubt = found[0].reason, _doubt(name, found)
            return ParameterDecision(name, weight.type, role, reason, _reading_nodes(found), doubt)
    raise AssertionError(name)


def _decision_by_mark(name: str, weight: Weight, uses: Sequence[WeightUse]) -> ParameterDecision | None:
    """The role that the exporter marked; running statistics are marked as buffers."""
    mark = weight.exported_as if isinstance(weight, StoredWeight) else ExportedAs.UNKNOWN
    if mark not in _ROLES_BY_MARK or any(use.role is Role.STATISTIC for use in uses):
        return None
    reason = f"a {mark}, as marked by the exporter"
    return ParameterDecision(name, weight.type, _ROLES_BY_MARK[mark], reason, _reading_nodes(uses))


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
    names_by_type: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    tables: dict[str, str] = {}
    for decision in decisions:
        name, weight = decision.name, draft.weights[decision.name]
        if decision.role is not Role.PARAMETER or is_exported_parameter(weight):
            continue
        if not all(use.node.domain or use.node.op in _TABLE_USES for use in uses[name]):
            continue
        if holds_sines_and_cosines(values_of(weight)):
            tables[name] = "table of sines and cosines"
        names_by_type.setdefault((decision.type.dtype, decision.type.shape), []).append(name)
    for names in names_by_type.values():
        for pair in likely_sine_and_cosine([sample(values_of(draft.weights[name])) for name in names]):
            one, two = (names[number] for number in pair)
            if are_sine_and_cosine(values_of(draft.weights[one]), values_of(draft.weights[two])):
                tables |= {one: f"sines or cosines, paired with '{two}'"}
                tables |= {two: f"sines or cosines, paired with '{one}'"}
    return [
        replace(d, role=Role.CONSTANT, reason=f"{tables[d.name]}: {d.reason}", doubt="")
        if d.name in tables
        else d
        for d in decisions
    ]
