"""The gradient cases can fail: a rule that is wrong by one percent fails every case of its own, and a rule
that lacks a term fails some."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from onnxgc.gradients import registry
from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_cases import cases_of
from tests.gradients.mutations import unnoticed, unnoticed_terms


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_wrong_rule_is_noticed(rule: str) -> None:
    assert unnoticed(rule, cases_of(rule)) == []


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_missing_term_is_noticed(rule: str) -> None:
    assert unnoticed_terms(rule, cases_of(rule)) == []


def test_a_term_that_no_case_needs_is_told() -> None:
    def padded(g: GradientContext) -> None:
        zero = g.emit("Mul", g.dy, g.scalar(0.0))
        g.give(0, g.emit("Add", g.emit("Neg", g.dy), zero))

    with patch.object(registry, "RULES", {**RULES, "Neg": padded}):
        (found,) = unnoticed_terms("Neg", cases_of("Neg"))
    assert found.startswith("no case notices that Neg keeps only operand 0 of its addition 1 of 1")
