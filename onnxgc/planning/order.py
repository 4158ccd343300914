"""Whether a search may change the order of operators."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from onnxgc.errors import PlanError


class Order(Enum):
    """In which order operators may run for the first time."""

    FREE = "free"
    """In any that the data allows."""
    FIXED = "fixed"
    """In the given one."""

    @classmethod
    def named(cls, name: str) -> Order:
        """The order of that name.

        Raises:
            PlanError: there is no such order.
        """
        known = [order.value for order in cls]
        if name not in known:
            raise PlanError(f"order '{name}' is none of {', '.join(known)}; pass one of them to --order")
        return cls(name)

    def allows(self, sequence: Sequence[int]) -> bool:
        """Whether the first runs of a sequence come in such an order."""
        first_runs = list(dict.fromkeys(sequence))
        return self is Order.FREE or first_runs == sorted(first_runs)
