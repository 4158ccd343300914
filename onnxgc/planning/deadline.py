"""The time limit of a search, and the shares of it that its phases receive."""

import math
import time
from dataclasses import dataclass, field, replace

FIRST_PLAN_SHARE = 0.3
"""The plan of the solver `peak` as a start for a search under a budget."""
BOUND_SHARE = 0.2
"""Each lower bound of a search under a budget."""
REORDERING_SHARE = 0.1
"""The lowest peak without recomputation."""
LEAST_PEAK_SHARE = 0.4
"""The least peak as the lower end of a trade-off."""
TRADE_OFF_END = 0.7
"""The trade-off, if a search under a budget follows."""
QUICK_DESCENT_END = 0.4
"""In a search for the least peak: a descent of budgets by repairs alone."""
DESCENT_END = 0.6
"""In a search for the least peak: the descent of budgets."""
REFINEMENT_END = 0.8
"""In a search for the least peak: the descent and the search for little extra time; proofs follow."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit in seconds, None for none, counted from `started` on the clock `time.perf_counter`.

    A share is a fraction of the whole limit, not of the time left.

    >>> Deadline(30.0).share(BOUND_SHARE)
    6.0
    """

    limit: float | None
    started: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def is_over(self) -> bool:
        return time.perf_counter() >= self.end

    @property
    def end(self) -> float:
        """The moment at which the limit is reached; infinity without a limit."""
        return math.inf if self.limit is None else self.started + self.limit

    def share(self, share: float) -> float | None:
        """Seconds that a share of the limit is."""
        return None if self.limit is None else share * self.limit

    def left(self, until: float = 1.0) -> float | None:
        """Seconds until a share of the limit has passed since the start, at least 0."""
        return None if self.limit is None else max(0.0, until * self.limit - self.elapsed())

    def phase(self, share: float) -> "Deadline":
        """The deadline of a phase that begins now and takes up to a share of the limit."""
        return Deadline(self.share(share), time.perf_counter())

    def extended(self, seconds: float) -> "Deadline":
        """The same with a limit that is later."""
        return self if self.limit is None else replace(self, limit=self.limit + seconds)
