"""What a schedule asks of an allocator, operator by operator.

Every allocation stands for one that the runtime makes: a tensor from the operator that writes it to the
release after its last reader; a view for nothing; an operator in place for nothing where its input
dies there; an output for itself even where it is a view; a workspace while its operator runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxgc.planning.schedule import Operator, Release, Schedule, StepGraph


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory that one tensor was made in, and that others may share; each is its own."""

    tensor: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Allocations:
    """One operator: the storages that it makes, and those that nobody needs after it."""

    operator: Operator
    made: tuple[Storage, ...]
    freed: tuple[Storage, ...]


def allocations(schedule: Schedule, graph: StepGraph) -> Iterator[Allocations]:
    """Storages made and freed by each operator of a schedule, in order.

    Parameters and fed tensors have none, and what is still there at the end is the outputs.
    """
    storages = _Storages(schedule, graph)
    steps = schedule.steps
    for index, step in enumerate(steps):
        if isinstance(step, Release):
            continue
        following = steps[index + 1] if index + 1 < len(steps) else None
        dying = following.tensors if isinstance(following, Release) else ()
        made = storages.run(step.operator, dying)
        yield Allocations(step.operator, made, storages.release(dying))


class _Storages:
    """The storages that are there, each with the number of tensors that live in it."""

    def __init__(self, schedule: Schedule, graph: StepGraph) -> None:
        self._sizes = graph.sizes
        self._outputs = frozenset(graph.outputs)
        self._original_of = schedule.original_of
        self._storage_of: dict[str, Storage] = {}
        self._tensors_in: dict[Storage, int] = {}

    def run(self, operator: Operator, dying: tuple[str, ...]) -> tuple[Storage, ...]:
        """Put the operator's outputs somewhere; returns the storages that were made for it."""
        made = []
        for position, name in enumerate(operator.outputs):
            if position == 0 and name not in self._outputs and self._shares(operator, dying):
                self._share(name, operator.inputs[0])
            else:
                storage = Storage(name, self._size(name))
                self._storage_of[name] = storage
                self._tensors_in[storage] = 1
                made.append(storage)
        return tuple(made)

    def _shares(self, operator: Operator, dying: tuple[str, ...]) -> bool:
        return operator.is_view or (operator.in_place and self._takes_over(operator, dying))

    def _takes_over(self, operator: Operator, dying: tuple[str, ...]) -> bool:
        """Whether the first input's storage has no other use than this operator's."""
        source = operator.inputs[0]
        storage = self._storage_of.get(source)
        if storage is None or source not in dying or self._size(source) != self._size(operator.outputs[0]):
            return False
        return self._tensors_in[storage] == sum(self._storage_of.get(name) is storage for name in dying)

    def _size(self, name: str) -> int:
        return self._sizes[self._original_of.get(name, name)]

    def _share(self, name: str, source: str) -> None:
        storage = self._storage_of.get(source)
        if storage is None:
            return  # a view of something resident
        self._storage_of[name] = storage
        self._tensors_in[storage] += 1

    def release(self, tensors: tuple[str, ...]) -> tuple[Storage, ...]:
        """Let tensors go; returns the storages that nobody is left in."""
        freed = []
        for name in tensors:
            storage = self._storage_of.pop(name, None)
            if storage is None:
                continue
            self._tensors_in[storage] -= 1
            if self._tensors_in[storage] == 0:
                del self._tensors_in[storage]
                freed.append(storage)
        return tuple(freed)
