"""Interleaved timing: a slow moment of the machine affects all contenders equally."""

import gc
import time
from collections.abc import Callable, Mapping

# ONNX Runtime's threads spin for a moment after a step.
_PAUSE_SECONDS = 0.2


def interleaved_seconds(
    steps: Mapping[str, Callable[[], object]], rounds: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of one step of each contender in each round, after one round of warm-up."""
    seconds: dict[str, list[float]] = {contender: [] for contender in steps}
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}")
        for contender, step in steps.items():
            # The graph of an earlier step of torch is a cycle of gigabytes.
            gc.collect()
            time.sleep(_PAUSE_SECONDS)
            started = time.perf_counter()
            step()
            if number:
                seconds[contender].append(time.perf_counter() - started)
    return seconds
