"""The table of gradient cases: every rule in every setting that changes its formula."""

from tests.gradients.activation_cases import ACTIVATION_CASES
from tests.gradients.attention_cases import ATTENTION_CASES
from tests.gradients.convolution_cases import CONVOLUTION_CASES, EINSUM_CASES, PRODUCT_CASES, TRANSPOSED_CASES
from tests.gradients.elementwise_cases import ELEMENTWISE_CASES
from tests.gradients.gathering_cases import GATHERING_CASES
from tests.gradients.gradient_case import Case
from tests.gradients.loss_cases import LOSS_CASES
from tests.gradients.normalization_cases import NORMALIZATION_CASES
from tests.gradients.pooling_cases import POOLING_CASES
from tests.gradients.reduction_cases import REDUCTION_CASES
from tests.gradients.resampling_cases import RESAMPLING_CASES
from tests.gradients.scattering_cases import SCATTERING_CASES
from tests.gradients.shape_cases import SHAPE_CASES
from tests.gradients.slicing_cases import SLICING_CASES

CASES: tuple[Case, ...] = (
    *ATTENTION_CASES,
    *CONVOLUTION_CASES,
    *TRANSPOSED_CASES,
    *EINSUM_CASES,
    *PRODUCT_CASES,
    *POOLING_CASES,
    *NORMALIZATION_CASES,
    *REDUCTION_CASES,
    *ELEMENTWISE_CASES,
    *ACTIVATION_CASES,
    *LOSS_CASES,
    *SHAPE_CASES,
    *SLICING_CASES,
    *GATHERING_CASES,
    *SCATTERING_CASES,
    *RESAMPLING_CASES,
)


def cases_of(rule: str) -> tuple[Case, ...]:
    return tuple(entry for entry in CASES if entry.rule == rule)
