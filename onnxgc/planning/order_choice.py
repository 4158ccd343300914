"""The order of first runs that a search may choose."""

from collections.abc import Sequence
from enum import Enum

from onnxgc.errors import PlanError


class Order(Enum):
    """The order in which operators may run for the first time."""

    FREE = "free"
    """Any order that the data allow."""
    FIXED = "fixed"
    """The given order."""

    @classmethod
    def named(cls, name: str) -> "Order":
        """The order of that name.

        Raises:
            PlanError: the name is unknown.
        """
        known = [order.value for order in cls]
        if name not in known:
            raise PlanError(f"order '{name}' is not one of {', '.join(known)}; pass one of them to --order")
        return cls(name)

    def allows(self, sequence: Sequence[int]) -> bool:
        """Whether the first runs of a sequence are in a permitted order."""
        first_runs = list(dict.fromkeys(sequence))
        return self is Order.FREE or first_runs == sorted(first_runs)
