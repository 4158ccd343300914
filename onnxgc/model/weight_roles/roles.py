"""The role of a weight in training."""

from dataclasses import dataclass
from enum import StrEnum

from onnxgc.model.core.ir import TensorType


class Role(StrEnum):
    """Parameters train and statistics are updated; frozen weights are parameters excluded by the user."""

    PARAMETER = "parameter"
    CONSTANT = "constant"
    STATISTIC = "statistic"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class ParameterDecision:
    """A weight, its role, and the reason.

    `used_by` names the nodes that read it. `doubt` asks the user to check the role if the use alone
    does not determine it.
    """

    name: str
    type: TensorType
    role: Role
    reason: str
    used_by: tuple[str, ...] = ()
    doubt: str = ""
