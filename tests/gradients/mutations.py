"""Mutation of gradient rules, to test that the gradient cases detect wrong rules."""

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
from onnxgc.gradients.differentiate import GradientContext, Rule
from tests.gradients.gradient_case import Case, emitted, errors

EXCESS = 0.01
RULES_FOLDER = str(Path(registry.__file__).parent)
RUNTIME_ERRORS = (RuntimeError, Fail, InvalidArgument)


@contextmanager
def mutated(rule: str, index: int | None = None) -> Iterator[None]:
    """A context in which `rule` gives 1.01 times its gradients, or only that of input `index`."""

    def wrong(g: GradientContext) -> None:
        original(g)
        # Gradients of one tensor are added, so giving another hundredth results in a factor of 1.01.
        for given, gradient, _ in tuple(g.chunks):
            if index is None or given == index:
                g.give(given, g.emit("Mul", gradient, g.scalar(EXCESS, like=given)))

    original = registry.RULES[rule]
    with _replaced(rule, wrong):
        yield


@dataclass(frozen=True, slots=True)
class Term:
    """An addition or subtraction that a rule emits.

    It is identified by the lines of code that lead to it, innermost first, by the number of additions that a
    node gets from these lines (which depends on the form that the rule uses), and by its place among them.
    """

    lines: tuple[tuple[str, int], ...]
    count: int
    place: int

    def __str__(self) -> str:
        path, line = self.lines[0]
        return f"addition {self.place + 1} of {self.count} in {path.rpartition('/')[2]}, line {line}"


@contextmanager
def without_term(rule: str, term: Term, operand: int) -> Iterator[None]:
    def wrong(g: GradientContext) -> None:
        with patch.object(GradientContext, "emit", _TermCounter(term, operand).emit):
            original(g)

    original = registry.RULES[rule]
    with _replaced(rule, wrong):
        yield


class _TermCounter:
    """Counts the additions and subtractions that a rule emits, and drops one of them."""

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
    """The stack frames in the modules of the rules, innermost first."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(RULES_FOLDER):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def terms_in(rule: str, case: Case) -> list[Term]:
    found: dict[Term, None] = {}

    def observed(g: GradientContext) -> None:
        terms = _TermCounter()
        with patch.object(GradientContext, "emit", terms.emit):
            original(g)
        for lines, count in terms.counts.items():
            found.update((Term(lines, count, place), None) for place in range(count))

    original = registry.RULES[rule]
    with _replaced(rule, observed):
        emitted(case)
    return list(found)


def unnoticed_terms(rule: str, cases: Sequence[Case]) -> list[str]:
    cases_with: dict[Term, list[Case]] = {}
    for case in map(_without_search, cases):
        for term in terms_in(rule, case):
            cases_with.setdefault(term, []).append(case)
    found = []
    for term, group in cases_with.items():
        for operand in (0, 1):
            with without_term(rule, term, operand):
                if not any(fails(case) for case in group):
                    found.append(f"no case detects that {rule} keeps only operand {operand} of its {term}")
    return found


@contextmanager
def _replaced(rule: str, function: Rule) -> Iterator[None]:
    with patch.object(registry, "RULES", {**registry.RULES, rule: function}):
        yield


def given_inputs(rule: str, cases: Sequence[Case]) -> tuple[int, ...]:
    seen: set[int] = set()

    def observed(g: GradientContext) -> None:
        original(g)
        seen.update(index for index, _, _ in g.chunks if g.input_type(index).element_count)

    original = registry.RULES[rule]
    with _replaced(rule, observed):
        for case in cases:
            emitted(case)
    return tuple(sorted(seen))


def fails(case: Case) -> bool:
    try:
        return not all(error <= case.tolerance for error in errors(case).values())
    except (OnnxgcError, *RUNTIME_ERRORS):
        # A gradient of the wrong shape raises before errors are computed.
        return True


def _without_search(case: Case) -> Case:
    return replace(case, solver="store-all")


def unnoticed(rule: str, cases: Sequence[Case]) -> list[str]:
    """The cases that do not detect a wrong rule, and the inputs whose wrong gradient no case detects."""
    cases = [_without_search(case) for case in cases]
    # An empty gradient can be wrong only in its shape.
    nonempty = [case for case in cases if given_inputs(rule, [case])]
    with mutated(rule):
        found = [f"case '{case}' does not detect that {rule} is wrong" for case in nonempty if not fails(case)]
    for index in given_inputs(rule, cases):
        with mutated(rule, index):
            if not any(fails(case) for case in cases):
                found.append(f"no case detects that {rule} gives input {index} a wrong gradient")
    return found if cases else [f"{rule} has no case"]
