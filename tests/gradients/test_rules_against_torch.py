"""Every gradient rule in every setting, against torch float64 and finite differences of the loss."""

from collections import Counter

import numpy as np
import pytest

from onnxgc.gradients.registry import RULES, differentiate
from onnxgc.model.read import read_model
from tests.gradients.finite_differences import BEYOND_THE_EVALUATOR, TOLERANCE, difference_error, has_differences
from tests.gradients.gradient_case import Case, case, errors_of, linear_case, outcome, wrong
from tests.gradients.gradient_cases import CASES


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_gradients_equal_those_of_torch_and_finite_differences(entry: Case):
    found = outcome(entry)
    assert {name: error for name, error in errors_of(entry, found).items() if not error <= entry.tolerance} == {}
    if has_differences(entry):
        error = difference_error(entry, found)
        assert error is None or error <= TOLERANCE


# Rules with a form for CUDA, of their own or through sums and products.
WITH_FORMS = frozenset(
    {
        "Add", "Attention", "BatchNormalization", "BatchNormalization.batch", "Conv", "ConvTranspose", "Div",
        "Expand", "GatherElements", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
        "MatMul", "Max", "MeanVarianceNormalization", "Min", "Mul", "PRelu", "Pow", "RMSNormalization",
        "Relu", "ScatterElements", "ScatterND", "Sub", "Sum",
    }
)  # fmt: skip


def _backward(entry: Case, provider: str) -> list[tuple[object, ...]]:
    frozen = [f"{name}*" for name in entry.frozen]
    model = read_model(entry.model(), loss=entry.loss, trainable=entry.parameters, freeze=frozen, provider=provider)
    step = differentiate(model if entry.change is None else entry.change(model))
    return [(node.op, node.inputs, node.outputs) for node in (*step.forward, *step.backward)]


_BY_SUMS = {"Div", "Expand", "GatherElements", "Max", "Min", "Mul", "PRelu", "Pow", "ScatterElements", "Sub"}


def _forms_case(entry: Case) -> object:
    return pytest.param(entry, marks=[pytest.mark.slow] * (entry.rule in _BY_SUMS), id=str(entry))


@pytest.mark.parametrize("entry", [_forms_case(entry) for entry in CASES if entry.rule in WITH_FORMS])
def test_gradients_in_the_forms_for_cuda_equal_those_of_torch(entry: Case):
    if _backward(entry, "cuda") == _backward(entry, "cpu"):
        return
    assert wrong(entry, forms="cuda") == {}


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry for entry in CASES if entry.rule not in WITH_FORMS], ids=str)
def test_other_rules_have_one_form(entry: Case):
    assert _backward(entry, "cuda") == _backward(entry, "cpu")


@pytest.mark.slow
def test_every_rule_has_a_case_with_finite_differences():
    rules = set(RULES) - set(BEYOND_THE_EVALUATOR)
    for entry in sorted(filter(has_differences, CASES), key=lambda entry: entry.opset != 18):
        if entry.rule in rules and difference_error(entry, outcome(entry)) is not None:
            rules.remove(entry.rule)
    assert rules == set()


_MANY = np.random.default_rng(0).integers(-128, 128, (2, 8192)).tolist()
_RACES = (
    linear_case("GatherElements", "many duplicates", "GatherElements<axis=1>(x, i)", (2, 128), i=_MANY),
    case("MaxPool", "many windows", "y = MaxPool<kernel_shape=[5,5], pads=[2,2,2,2]>(x)", x=(2, 8, 40, 40)),
)


@pytest.mark.parametrize("race", _RACES, ids=str)
def test_scattered_sums_are_correct_on_several_threads(race: Case):
    # ScatterND would lose additions here in most runs, but not in all.
    for _ in range(3):
        assert wrong(race, threads=4) == {}


def test_every_rule_has_a_case():
    assert set(RULES) - {entry.rule for entry in CASES} == set()


def test_names_of_cases_are_unique():
    assert [name for name, count in Counter(map(str, CASES)).items() if count > 1] == []
