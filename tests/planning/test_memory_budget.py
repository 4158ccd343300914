import numpy as np
import pytest

from onnxgc.errors import BudgetFormError
from onnxgc.planning.memory_budget import Budget, parse_budget

REGULAR = 1000
"""The baseline's peak, to which shares refer."""


@pytest.mark.parametrize(
    "given, expected_bytes",
    [
        ("8GiB", 8 * 2**30),
        (" 1.5MiB ", 3 * 2**19),
        ("2KiB", 2048),
        ("500MB", 500 * 10**6),
        ("3kB", 3000),
        (".5GB", 500_000_000),
        ("1TB", 10**12),
        ("12B", 12),
        ("8000000", 8_000_000),
        (8_000_000, 8_000_000),
        (np.int64(8_000_000), 8_000_000),
        (np.float32(0.5), 500),
        ("1", 1),
        ("60%", 600),
        ("12.5 %", 125),
        (".8", 800),
        (0.8, 800),
        (1.0, REGULAR),
        ("150%", 1500),
    ],
)
def test_a_budget_in_bytes(given: str | float, expected_bytes: int):
    budget = parse_budget(given)
    assert not budget.is_least
    assert budget.bytes_of(REGULAR) == expected_bytes


@pytest.mark.parametrize("given", ["min", " MIN "])
def test_the_least_budget(given: str):
    assert parse_budget(given) == Budget()
    assert parse_budget(given).is_least


@pytest.mark.parametrize(
    "given",
    [
        "", "abc", "8 Gi B", "8GiB!", "8Q", "GiB", "-8GiB", "+8GiB", "1e9", "8,5GB", "60%%", "nan", "minimum", "0",
        "0%", "0.0", "0GiB", 0, -0.5, float("nan"), float("inf"), True, "1.5", 8e9, "9" * 400, "9" * 400 + "%",
        ".0000001B",
    ],
)  # fmt: skip
def test_an_invalid_budget_raises_with_the_valid_forms(given: str | float):
    with pytest.raises(BudgetFormError, match=r"write 8GiB, 500MB, 60% .*min") as caught:
        parse_budget(given)
    assert "\n" not in str(caught.value)
