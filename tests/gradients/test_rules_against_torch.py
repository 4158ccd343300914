"""Every gradient rule in every setting against torch float64."""

from __future__ import annotations

from collections import Counter

import pytest

from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_case import Case, errors
from tests.gradients.gradient_cases import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_torch(case: Case) -> None:
    found = errors(case)
    wrong = {name: error for name, error in found.items() if not error <= case.tolerance}
    assert wrong == {}


def test_every_rule_has_a_case() -> None:
    assert set(RULES) - {case.rule for case in CASES} == set()


def test_no_two_cases_have_one_name() -> None:
    assert [name for name, count in Counter(map(str, CASES)).items() if count > 1] == []
