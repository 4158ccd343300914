"""The judge: exact memory of a schedule, step by step.

Every allocation it counts stands for one that the runtime makes: a tensor from the operator that
writes it to the release after its last reader; a view for nothing; an operator in place for
nothing where its input dies there; an output for itself even where it is a view; a workspace while its
operator runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxgc.planning.schedule import Operator, Release, Schedule, StepGraph


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes over one training step.

    `timeline` has one entry for each operator that runs: bytes held while it runs; `held_before`
    what is held when it begins. Parameters and fed tensors are not counted. `activation_peak_bytes`
    is the peak without the parameters' gradients, as the literature reports it.
    """

    peak_bytes: int
    peak_step: str
    activation_peak_bytes: int
    parameter_gradient_bytes: int
    timeline: tuple[int, ...]
    held_before: tuple[int, ...]


def simulate(schedule: Schedule, graph: StepGraph) -> MemoryProfile:
    """Memory profile of a schedule, sizes in bytes as requested from the allocator."""
    memory = _Memory(schedule, graph)
    timeline: list[int] = []
    held_before: list[int] = []
    activation_peak = peak = 0
    peak_step = ""
    steps = schedule.steps
    for index, step in enumerate(steps):
        if isinstance(step, Release):
            memory.release(step.tensors)
            continue
        following = steps[index + 1] if index + 1 < len(steps) else None
        dying = following.tensors if isinstance(following, Release) else ()
        held_before.append(memory.live_bytes)
        memory.run(step.operator, dying)
        held = memory.live_bytes + step.operator.workspace_bytes
        timeline.append(held)
        if held > peak:
            peak, peak_step = held, step.operator.name
        activation_peak = max(activation_peak, held - memory.parameter_gradient_bytes)
    return MemoryProfile(
        peak,
        peak_step,
        activation_peak,
        memory.parameter_gradient_bytes,
        tuple(timeline),
        tuple(held_before),
    )


class _Memory:
    """Storages, each with the tensors that live in it."""

    def __init__(self, schedule: Schedule, graph: StepGraph) -> None:
        self._graph = graph
        self._outputs = frozenset(graph.outputs)
        self._original_of = schedule.original_of
        self._storage_of: dict[str, int] = {}
        self._tensors_in: list[int] = []
        self._size_of: list[int] = []
        self.live_bytes = 0
        self.parameter_gradient_bytes = 0

    def run(self, operator: Operator, dying: tuple[str, ...]) -> None:
        for position, name in enumerate(operator.outputs):
            if position == 0 and name not in self._outputs and self._shares(operator, dying):
                self._share(name, operator.inputs[0])
            else:
                self._allocate(name)

    def _shares(self, operator: Operator, dying: tuple[str, ...]) -> bool:
        return operator.is_view or (operator.in_place and self._takes_over(operator, dying))

    def _takes_over(self, operator: Operator, dying: tuple[str, ...]) -> bool:
        """Whether the first input's storage has no other use than this operator's."""
        source = operator.inputs[0]
        storage = self._storage_of.get(source)
        if storage is None or source not in dying or self._size(source) != self._size(operator.outputs[0]):
            return False
        return self._tensors_in[storage] == sum(self._storage_of.get(name) == storage for name in dying)

    def _size(self, name: str) -> int:
        return self._graph.sizes[self._original_of.get(name, name)]

    def _allocate(self, name: str) -> None:
        size = self._size(name)
        self._storage_of[name] = len(self._size_of)
        self._tensors_in.append(1)
        self._size_of.append(size)
        self.live_bytes += size
        if name in self._graph.parameter_gradients:
            self.parameter_gradient_bytes += size

    def _share(self, name: str, source: str) -> None:
        storage = self._storage_of.get(source)
        if storage is None:
            return  # a view of something resident
        self._storage_of[name] = storage
        self._tensors_in[storage] += 1

    def release(self, tensors: tuple[str, ...]) -> None:
        for name in tensors:
            storage = self._storage_of.pop(name, None)
            if storage is None:
                continue
            self._tensors_in[storage] -= 1
            if self._tensors_in[storage] == 0:
                self.live_bytes -= self._size_of[storage]
