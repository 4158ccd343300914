"""--trainable and --freeze: globs of weight names that override inferred roles."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from onnxgc.errors import NoParametersError
from onnxgc.model.core.name_globs import matches
from onnxgc.model.weight_roles.role_notes import listed
from onnxgc.model.weight_roles.roles import ParameterDecision, Role

_ADDITION = "+"
"""The prefix of a glob that trains in addition to the inferred parameters."""


def with_overrides(
    decisions: Sequence[ParameterDecision], trainable: Sequence[str], freeze: Sequence[str]
) -> tuple[ParameterDecision, ...]:
    """The decisions with the roles that the globs choose.

    Raises:
        NoParametersError: a glob matches no float weight, or is to train only running statistics.
    """
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
        raise _unmatched(option, glob, [decision.name for decision in floating])
    if option == "--trainable" and all(decision.role is Role.STATISTIC for decision in matched):
        raise _only_statistics(glob, matched[0])


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
    found = [glob for glob in freeze if matches(decision.name, glob)]
    return replace(decision, role=Role.FROZEN, reason=f"--freeze {found[0]}") if found else decision


def _unmatched(option: str, glob: str, names: Sequence[str]) -> NoParametersError:
    stem = glob.strip("*?")
    close = difflib.get_close_matches(stem, names, n=3, cutoff=0.3) or list(names[:3])
    known = (
        f"closest names: {', '.join(repr(name) for name in close)}"
        if close
        else "the model has no float weights"
    )
    return NoParametersError(f"{option} '{glob}' matches no weight of the model; {known}")


def _only_statistics(glob: str, statistic: ParameterDecision) -> NoParametersError:
    return NoParametersError(
        f"--trainable '{glob}' matches only running statistics, such as '{statistic.name}' of "
        f"{listed(statistic.used_by)}: they have no gradient; the step updates them from the batch, "
        "or keeps them with --freeze-bn"
    )
