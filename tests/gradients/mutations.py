"""Gradient rules made slightly wrong on purpose, to see whether the gradient cases notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from onnxgc.gradients import registry
from onnxgc.gradients.engine import GradientContext, Rule
from tests.gradients.gradient_case import Case, emitted, errors

EXCESS = 0.01


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
    return not all(error <= case.tolerance for error in errors(case).values())


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
