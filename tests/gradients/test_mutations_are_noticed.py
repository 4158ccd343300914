"""The gradient cases can fail: a rule that is wrong by one percent fails every case of its own."""

from __future__ import annotations

import pytest

from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_cases import cases_of
from tests.gradients.mutations import unnoticed


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_wrong_rule_is_noticed(rule: str) -> None:
    assert unnoticed(rule, cases_of(rule)) == []
