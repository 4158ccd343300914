"""Interleaved timing: a slow moment of the machine affects all contenders equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def interleaved_seconds(
    steps: Mapping[str, Callable[[], object]], rounds: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of one step of each contender in each round, after one round of warm-up."""
    seconds: dict[str, list[float]] = {contender: [] for contender in steps}
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}")
        for contender, step in steps.items():
            started = time.perf_counter()
            step()
            if number:
                seconds[contender].append(time.perf_counter() - started)
    return seconds
