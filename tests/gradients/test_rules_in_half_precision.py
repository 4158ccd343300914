"""Every gradient rule on float16 tensors: whole models of that type, and mixed ones that cast to it."""

from __future__ import annotations

import pytest

from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_case import Case, errors
from tests.gradients.gradient_cases import cases_of
from tests.gradients.half_precision import computed_in_float16, is_in_one_type, stored_in_float16

CASES_OF_A_RULE = 2


def _chosen(rule: str) -> list[Case]:
    cases = [case for case in cases_of(rule) if is_in_one_type(case)][:CASES_OF_A_RULE]
    return [*map(stored_in_float16, cases), *map(computed_in_float16, cases[-1:])]


@pytest.mark.parametrize("entry", [case for rule in RULES for case in _chosen(rule)], ids=str)
def test_gradients_in_float16_are_those_of_torch(entry: Case) -> None:
    wrong = {name: error for name, error in errors(entry).items() if not error <= entry.tolerance}
    assert wrong == {}
