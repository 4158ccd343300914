"""Every gradient rule in every setting against torch float64 and against differences of the loss."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from onnxgc.gradients.registry import RULES
from tests.gradients.finite_differences import (
    BEYOND_THE_EVALUATOR,
    TOLERANCE,
    difference_error,
    has_differences,
)
from tests.gradients.gathering_cases import gathered
from tests.gradients.gradient_case import Case, case, errors, normal, outcome
from tests.gradients.gradient_cases import CASES


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_gradients_equal_those_of_torch(entry: Case) -> None:
    wrong = {name: error for name, error in errors(entry).items() if not error <= entry.tolerance}
    assert wrong == {}


_WITH_DIFFERENCES = [entry for entry in CASES if has_differences(entry)]


@pytest.mark.parametrize("entry", _WITH_DIFFERENCES, ids=str)
def test_gradients_equal_differences_of_the_loss(entry: Case) -> None:
    error = difference_error(entry, outcome(entry))
    if error is None:
        pytest.skip("the reference evaluator computes another loss")
    assert error <= TOLERANCE


def test_every_rule_has_a_case_with_differences() -> None:
    rules = set(RULES) - set(BEYOND_THE_EVALUATOR)
    for entry in sorted(_WITH_DIFFERENCES, key=lambda entry: entry.opset != 18):
        if entry.rule in rules and difference_error(entry, outcome(entry)) is not None:
            rules.remove(entry.rule)
    assert rules == set()


_MANY = np.random.default_rng(0).integers(-128, 128, (2, 8192)).tolist()
_RACES = (
    case(
        "GatherElements",
        "many duplicates",
        "y = GatherElements<axis=1>(x, indices)",
        x=normal(2, 128),
        indices=_MANY,
        formula=gathered(_MANY, 1),
    ),
    case(
        "MaxPool",
        "many windows",
        "y = MaxPool<kernel_shape=[5,5], pads=[2,2,2,2]>(x)",
        x=normal(2, 8, 40, 40),
    ),
)


@pytest.mark.parametrize("race", _RACES, ids=str)
def test_scattered_sums_are_right_on_several_threads(race: Case) -> None:
    # ScatterND would lose additions here, in most runs but not in all.
    for _ in range(3):
        assert max(errors(race, threads=4).values()) <= race.tolerance


def test_every_rule_has_a_case() -> None:
    assert set(RULES) - {entry.rule for entry in CASES} == set()


def test_no_two_cases_have_one_name() -> None:
    assert [name for name, count in Counter(map(str, CASES)).items() if count > 1] == []
