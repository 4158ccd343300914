"""Allocations and releases of a schedule, operator by operator.

Each corresponds to one of the runtime: a tensor is live from the operator that writes it to the release
after its last reader; a view allocates nothing; an operator in place allocates nothing if the lifetime
of its input ends; an output of the step is allocated even if it is a view; a workspace is live while its
operator runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from onnxgc.planning.schedule import Operator, Release, Schedule, StepGraph


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory allocated for one tensor, which others may share; compared by identity."""

    tensor: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Allocations:
    """One operator: the storages that it allocates, and those whose last use it is."""

    operator: Operator
    made: tuple[Storage, ...]
    freed: tuple[Storage, ...]


def allocations(schedule: Schedule, graph: StepGraph) -> Iterator[Allocations]:
    """Storages allocated and freed by each operator of a schedule, in order.

    Parameters and fed tensors have none. The outputs are live at the end.
    """
    storages = _Storages(schedule, graph)
    instructions = schedule.instructions
    for index, entry in enumerate(instructions):
        if isinstance(entry, Release):
            continue
        following = instructions[index + 1] if index + 1 < len(instructions) else None
        dying = following.tensors if isinstance(following, Release) else ()
        made = storages.run(entry.operator, dying)
        yield Allocations(entry.operator, made, storages.release(dying))


class _Storages:
    """The live storages, each with the number of tensors in it."""

    def __init__(self, schedule: Schedule, graph: StepGraph) -> None:
        self._sizes = graph.sizes
        self._outputs = frozenset(graph.outputs)
        self._original_of = schedule.original_of
        self._storage_of: dict[str, Storage] = {}
        self._tensors_in: dict[Storage, int] = {}

    def run(self, operator: Operator, dying: tuple[str, ...]) -> tuple[Storage, ...]:
        """Assign storages to the operator's outputs; return those that it allocates."""
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
        return operator.is_view or (operator.in_place and self._reuses_input(operator, dying))

    def _reuses_input(self, operator: Operator, dying: tuple[str, ...]) -> bool:
        """Whether this operator is the last use of the first input's storage."""
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
            return  # A view of a resident tensor.
        self._storage_of[name] = storage
        self._tensors_in[storage] += 1

    def release(self, tensors: tuple[str, ...]) -> tuple[Storage, ...]:
        """Release tensors; return the storages without tensors."""
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
