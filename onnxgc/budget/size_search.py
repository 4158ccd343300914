"""The largest size, such as a batch, for which a step fits."""

import math
from collections.abc import Callable
from dataclasses import dataclass

_PRECISION = 100
"""The search ends at an interval of one part in this number."""
_MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class SizePoint:
    """A size with the fastest plan found for it.

    `extra_time_ratio` is a share of the baseline's time, `seconds` the expected time of a step by the
    durations of the device, `total_bytes` all memory on it.
    """

    size: int
    total_bytes: int
    extra_time_ratio: float
    seconds: float

    @property
    def per_second(self) -> float:
        """Sizes a second: samples, for a batch."""
        return self.size / self.seconds if self.seconds else math.inf


def largest_fitting(fits: Callable[[int], bool], start: int) -> int:
    """The largest size that fits, to one part in 100, or 0: by doubling from `start` and bisection."""
    low, high = 0, 0
    size = start
    while not high or high - low > max(1, low // _PRECISION):
        if fits(size):
            low = size
        else:
            high = size
        if not high and size >= _MAX_SIZE:
            break
        size = (low + high) // 2 if high else 2 * low
    return low
