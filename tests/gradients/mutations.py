"""Gradient rules made slightly wrong on purpose, to see whether the gradient cases notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from onnxgc.errors import OnnxgcError
from onnxgc.gradients import registry
from onnxgc.gradients.engine import GradientContext, Rule
from tests.gradients.gradient_case import Case, emitted, errors

EXCESS = 0.01
RUNTIME_ERRORS = (RuntimeError, Fail, InvalidArgument)


@contextmanager
def mutated(rule: str, index: int | None = None) -> Iterator[None]:
    """Within it, `rule` gives 1.01 times its gradients, or its gradient of input `index` only."""

    def wrong(g: GradientContext) -> None:
        original(g)
        # Gradients of one tensor are added, so a hundredth given again makes 1.01 of it.
        for given, gradient, _ in tuple(g.chunks):
            if index is None or given == index:
                g.give(given, g.emit("Mul", gradient, g.scalar(EXCESS, like=given)))

    original = registry.RULES[rule]
    with _replaced(rule, wrong):
        yield


@contextmanager
def without_term(rule: str, position: int, operand: int) -> Iterator[None]:
    """Within it, `rule` takes its addition or subtraction number `position` for that operand alone."""

    def wrong(g: GradientContext) -> None:
        with patch.object(GradientContext, "emit", _Terms(position, operand).emit):
            original(g)

    original = registry.RULES[rule]
    with _replaced(rule, wrong):
        yield


class _Terms:
    """Counts additions and subtractions as a rule emits them, and leaves one of them out."""

    def __init__(self, dropped: int | None = None, operand: int = 0) -> None:
        self.count = 0
        self._dropped, self._operand = dropped, operand
        self._original = GradientContext.emit

    @property
    def emit(self) -> Callable[..., str]:
        def emit(g: GradientContext, op: str, *inputs: str, **attributes: Any) -> str:
            if op not in ("Add", "Sub"):
                return self._original(g, op, *inputs, **attributes)
            self.count += 1
            if self.count - 1 == self._dropped:
                return inputs[self._operand]
            return self._original(g, op, *inputs, **attributes)

        return emit


def terms_in(rule: str, case: Case) -> int:
    """The most additions and subtractions that a rule emits for one node of a case."""
    most = 0

    def watched(g: GradientContext) -> None:
        nonlocal most
        terms = _Terms()
        with patch.object(GradientContext, "emit", terms.emit):
            original(g)
        most = max(most, terms.count)

    original = registry.RULES[rule]
    with _replaced(rule, watched):
        emitted(case)
    return most


def unnoticed_terms(rule: str, cases: Sequence[Case]) -> list[str]:
    """The terms of a rule that can be missing unseen: no case that has them fails without them.

    Terms are told apart by how many the rule emits in all, which is the form that it takes.
    """
    forms: dict[int, list[Case]] = {}
    for case in cases:
        forms.setdefault(terms_in(rule, case), []).append(case)
    found = []
    for count, group in forms.items():
        for position in range(count):
            for operand in (0, 1):
                with without_term(rule, position, operand):
                    if not any(notices(case) for case in group):
                        found.append(
                            f"no case notices that {rule} keeps only operand {operand} of its "
                            f"addition {position + 1} of {count}"
                        )
    return found


@contextmanager
def _replaced(rule: str, function: Rule) -> Iterator[None]:
    with patch.object(registry, "RULES", {**registry.RULES, rule: function}):
        yield


def given_inputs(rule: str, cases: Sequence[Case]) -> tuple[int, ...]:
    """The inputs that a rule gives gradients with elements of in any of the cases."""
    seen: set[int] = set()

    def watched(g: GradientContext) -> None:
        original(g)
        seen.update(index for index, _, _ in g.chunks if g.input_type(index).element_count)

    original = registry.RULES[rule]
    with _replaced(rule, watched):
        for case in cases:
            emitted(case)
    return tuple(sorted(seen))


def notices(case: Case) -> bool:
    """Whether a case fails; to be asked while a rule is mutated."""
    try:
        return not all(error <= case.tolerance for error in errors(case).values())
    except (OnnxgcError, *RUNTIME_ERRORS):
        # A gradient of the wrong shape does not get as far as a figure.
        return True


def unnoticed(rule: str, cases: Sequence[Case]) -> list[str]:
    """What of a rule can be wrong unseen: cases blind to it, and inputs that no case looks at."""
    # A gradient without elements cannot be wrong, only of the wrong shape.
    telling = [case for case in cases if given_inputs(rule, [case])]
    with mutated(rule):
        found = [
            f"case '{case}' does not notice that {rule} is wrong" for case in telling if not notices(case)
        ]
    for index in given_inputs(rule, cases):
        with mutated(rule, index):
            if not any(notices(case) for case in cases):
                found.append(f"no case notices that {rule} gives input {index} a wrong gradient")
    return found if cases else [f"{rule} has no case"]
