import pytest

from onnxgc.gradients.registry import RULES
from tests.gradients.gradient_case import Case, wrong
from tests.gradients.gradient_cases import cases_of
from tests.gradients.half_precision import computed_in_float16, is_in_one_type, stored_in_float16

MAX_CASES_PER_RULE = 2


def _selected(rule: str) -> list[Case]:
    cases = [case for case in cases_of(rule) if is_in_one_type(case)][:MAX_CASES_PER_RULE]
    return [*map(stored_in_float16, cases), *map(computed_in_float16, cases[-1:])]


@pytest.mark.parametrize("entry", [case for rule in RULES for case in _selected(rule)], ids=str)
def test_gradients_in_float16_equal_those_of_torch(entry: Case):
    assert wrong(entry) == {}
