"""The table of gradient cases: every rule in every setting that changes its formula."""

from __future__ import annotations

from tests.gradients.convolution_cases import CONVOLUTION_CASES, PRODUCT_CASES
from tests.gradients.elementwise_cases import ELEMENTWISE_CASES, LOSS_CASES
from tests.gradients.gradient_case import Case
from tests.gradients.pooling_cases import NORMALIZATION_CASES, POOLING_CASES
from tests.gradients.shape_cases import SHAPE_CASES

CASES: tuple[Case, ...] = (
    *CONVOLUTION_CASES,
    *PRODUCT_CASES,
    *POOLING_CASES,
    *NORMALIZATION_CASES,
    *ELEMENTWISE_CASES,
    *LOSS_CASES,
    *SHAPE_CASES,
)


def cases_of(rule: str) -> tuple[Case, ...]:
    return tuple(entry for entry in CASES if entry.rule == rule)
