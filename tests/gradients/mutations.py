"""Gradient rules made slightly wrong on purpose, to see whether the gradient cases notice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from onnxgc.errors import OnnxgcError
from onnxgc.gradients import registry
from onnxgc.gradients.engine import GradientContext, Rule
from tests.gradients.gradient_case import Case, emitted, errors

EXCESS = 0.01
RULES_FOLDER = str(Path(registry.__file__).parent)
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


@dataclass(frozen=True, slots=True)
class Term:
    """An addition or subtraction that a rule emits.

    Told apart by the lines of code that lead to it, innermost first, by how many a node gets from them in
    all, which is the form that the rule takes there, and by its place among these.
    """

    lines: tuple[tuple[str, int], ...]
    count: int
    place: int

    def __str__(self) -> str:
        path, line = self.lines[0]
        return f"addition {self.place + 1} of {self.count} in {path.rpartition('/')[2]}, line {line}"


@contextmanager
def without_term(rule: str, term: Term, operand: int) -> Iterator[None]:
    """Within it, `rule` takes that operand of a term in place of the term."""

    def wrong(g: GradientContext) -> None:
        with patch.object(GradientContext, "emit", _Terms(term, operand).emit):
            original(g)

    original = registry.RULES[rule]
    with _replaced(rule, wrong):
        yield


class _Terms:
    """Counts additions and subtractions as a rule emits them, and leaves one of them out."""

    def __init__(self, dropped: Term | None = None, operand: int = 0) -> None:
        self.counts: Counter[tuple[tuple[str, int], ...]] = Counter()
        self._dropped, self._operand = dropped, operand
        self._original = GradientContext.emit

    @property
    def emit(self) -> Callable[..., str]:
        def emit(g: GradientContext, op: str, *inputs: str, **attributes: Any) -> str:
            if op not in ("Add", "Sub"):
                return self._original(g, op, *inputs, **attributes)
            lines = _lines_of_rules()
            place = self.counts[lines]
            self.counts[lines] += 1
            if self._dropped and (lines, place) == (self._dropped.lines, self._dropped.place):
                return inputs[self._operand]
            return self._original(g, op, *inputs, **attributes)

        return emit


def _lines_of_rules() -> tuple[tuple[str, int], ...]:
    """The calls under way in the modules of the rules, innermost first."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(RULES_FOLDER):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def terms_in(rule: str, case: Case) -> list[Term]:
    """The additions and subtractions that a rule emits for the nodes of a case."""
    found: dict[Term, None] = {}

    def watched(g: GradientContext) -> None:
        terms = _Terms()
        with patch.object(GradientContext, "emit", terms.emit):
            original(g)
        for lines, count in terms.counts.items():
            found.update((Term(lines, count, place), None) for place in range(count))

    original = registry.RULES[rule]
    with _replaced(rule, watched):
        emitted(case)
    return list(found)


def unnoticed_terms(rule: str, cases: Sequence[Case]) -> list[str]:
    """The terms of a rule that can be missing unseen: no case that has them fails without them."""
    cases_with: dict[Term, list[Case]] = {}
    for case in map(_unplanned, cases):
        for term in terms_in(rule, case):
            cases_with.setdefault(term, []).append(case)
    found = []
    for term, group in cases_with.items():
        for operand in (0, 1):
            with without_term(rule, term, operand):
                if not any(notices(case) for case in group):
                    found.append(f"no case notices that {rule} keeps only operand {operand} of its {term}")
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


def _unplanned(case: Case) -> Case:
    """The case without a search for a plan: gradients do not depend on it, and there are many mutations."""
    return replace(case, solver="store-all")


def unnoticed(rule: str, cases: Sequence[Case]) -> list[str]:
    """What of a rule can be wrong unseen: cases blind to it, and inputs that no case looks at."""
    cases = [_unplanned(case) for case in cases]
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
