"""Memory that is free while the gradient of a convolution's weight is computed, from a schedule.

On CUDA that gradient needs columns larger than the convolution's input. A plan is made with small ones: those
of a part of the batch at a time, each part with kernels of its own. Afterwards each convolution may use the
memory below the peak, so that it needs few parts.
"""

from collections.abc import Mapping

from onnxgc.planning.schedule import Compute, Release, Schedule, StepGraph
from onnxgc.planning.simulate import MemoryProfile


def free_bytes(schedule: Schedule, graph: StepGraph, profile: MemoryProfile) -> Mapping[str, int]:
    """Bytes below the peak when a chunk of backward begins, the least of all chunks by source."""
    free: dict[str, int] = {}
    runs = (entry for entry in schedule.instructions if not isinstance(entry, Release))
    first_of_chunk = {chunk[0].name for chunk in graph.chunks if chunk}
    for run, live in zip(runs, profile.live_before, strict=True):
        if isinstance(run, Compute) and run.chunk is not None and run.operator.name in first_of_chunk:
            source = graph.sources[run.chunk]
            free[source] = min(free.get(source, profile.peak_bytes), profile.peak_bytes - live)
    return free
