"""The gradient cases detect wrong rules.

A rule that is wrong by one percent fails all of its cases, and a rule that lacks a term fails some.
"""

from unittest.mock import patch

import pytest

from onnxgc.gradients import registry
from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_cases import cases_of
from tests.gradients.mutations import unnoticed, unnoticed_terms

# Rules with sums over broadcast axes, several inputs, several terms or scattered additions. The others run
# nightly.
DEFAULT_RULES = ("Div", "Gemm", "GatherElements", "LayerNormalization", "LRN", "ReduceProd", "Softmax", "Swish")
_ALL_RULES = [rule if rule in DEFAULT_RULES else pytest.param(rule, marks=pytest.mark.slow) for rule in sorted(RULES)]


@pytest.mark.parametrize("rule", _ALL_RULES)
def test_the_cases_detect_a_wrong_rule(rule: str):
    assert unnoticed(rule, cases_of(rule)) == []


@pytest.mark.parametrize("rule", _ALL_RULES)
def test_the_cases_detect_a_missing_term(rule: str):
    assert unnoticed_terms(rule, cases_of(rule)) == []


def test_the_default_rules_exist():
    assert set(DEFAULT_RULES) <= set(RULES)


def test_a_term_without_effect_is_reported():
    def padded(g: GradientContext) -> None:
        zero = g.emit("Mul", g.dy, g.scalar(0.0))
        g.give(0, g.emit("Add", g.emit("Neg", g.dy), zero))

    with patch.object(registry, "RULES", {**RULES, "Neg": padded}):
        (found,) = unnoticed_terms("Neg", cases_of("Neg"))
    assert found.startswith("no case detects that Neg keeps only operand 0 of its addition 1 of 1")
