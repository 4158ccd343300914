"""The gradient cases can fail: a rule that is wrong by one percent fails every case of its own, and a rule
that lacks a term fails some."""

from __future__ import annotations

import pytest

from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_cases import cases_of
from tests.gradients.mutations import unnoticed, unnoticed_terms


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_wrong_rule_is_noticed(rule: str) -> None:
    assert unnoticed(rule, cases_of(rule)) == []


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_missing_term_is_noticed(rule: str) -> None:
    assert unnoticed_terms(rule, cases_of(rule)) == []
