"""A training step reduced to its forward tensors, for one order of vertices.

Under every plan, backward runs the same operators in the same order; plans differ only in the forward
tensors that are live at each time. The bytes of gradients and temporaries are therefore taken from the
simulated profile of the baseline. All sizes are in bytes; positions of vertices are counted from 0.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.joint_graph import vertex_of_operators
from onnxgc.planning.schedule import StepGraph, build_schedule
from onnxgc.planning.simulate import simulate

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepOperator:
    """A forward operator; `reuses` is the storage that it overwrites in place, if that ends there."""

    position: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    workspace_bytes: int
    flops: int
    reuses: int | None
    once: bool
    needs_all_outputs: bool

    def allocated(self, is_used: Callable[[int], bool]) -> tuple[int, ...]:
        """The storages that the operator allocates: trailing ones without use are omitted."""
        count = len(self.writes)
        while count > 1 and not self.needs_all_outputs and not is_used(self.writes[count - 1]):
            count -= 1
        return self.writes[:count]


@dataclass(slots=True)
class StepStorage:
    """Memory of one forward tensor and its views, with its readers in forward and backward, both rising."""

    size: int
    position: int
    producer: int
    readers: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of backward of one position; recomputation is possible only before and after it.

    `start_bytes` and `peak_bytes` are the live bytes of the baseline at the slot's beginning and at its
    peak, without forward tensors.
    """

    position: int
    reads: frozenset[int]
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StepModel:
    """One training step reduced to its forward storages.

    `forward_base` gives the live bytes outside of storages during the first run of each forward operator.
    `first_slot[p]` is the first slot of a position at or below p - 1, so `first_slot[0]` is the number of
    slots. `last_reader` is the position of a vertex's last reader in forward, or the number of positions if
    the vertex cannot be recomputed.
    """

    positions: int
    operators: tuple[StepOperator, ...]
    storages: tuple[StepStorage, ...]
    slots: tuple[Slot, ...]
    forward_base: tuple[int, ...]
    first_slot: tuple[int, ...]
    operators_of: tuple[tuple[int, ...], ...]
    storages_of: tuple[tuple[int, ...], ...]
    last_reader: tuple[int, ...]

    def crosses(self, position: int, cut: int) -> bool:
        """Whether a cut keeps the vertex at a position."""
        return position <= cut < self.last_reader[position]

    def is_wanted_after(self, number: int, cut: int) -> bool:
        """Whether forward after the cut, or backward of positions above it, reads the storage."""
        storage = self.storages[number]
        if storage.readers and self.operators[storage.readers[-1]].position > cut:
            return True
        return bool(storage.slots) and storage.slots[0] < self.first_slot[cut + 1]


def step_model(step: StepGraph, members: Mapping[Vertex, tuple[str, ...]], order: Sequence[Vertex]) -> StepModel:
    """The model of a step whose forward operators are sorted by the vertices of `order`."""
    positions = vertex_of_operators(step, members, order)
    position_of = {tensor: number for number, vertex in enumerate(order) for tensor in members[vertex]}
    operators, storages, storage_of = _operators_and_storages(step, positions, position_of)
    slots = _slots(step, positions, storage_of, storages)
    count = len(order)
    position_after = [-slot.position for slot in slots]
    last_reader = [0] * count
    for storage in storages:
        last = operators[storage.readers[-1]].position if storage.readers else 0
        if operators[storage.producer].once:
            last = count
        last_reader[storage.position] = max(last_reader[storage.position], last)
    return StepModel(
        count,
        tuple(operators),
        tuple(storages),
        tuple(slots),
        tuple(_forward_base(step, operators, storages)),
        tuple(bisect_left(position_after, 1 - position) for position in range(count + 1)),
        _grouped(count, [operator.position for operator in operators]),
        _grouped(count, [storage.position for storage in storages]),
        tuple(last_reader),
    )


def _operators_and_storages(
    step: StepGraph, positions: Sequence[int], position_of: Mapping[str, int]
) -> tuple[list[StepOperator], list[StepStorage], dict[str, int]]:
    """Forward operators, storages, and the storage of each tensor; views share the storage of their source.

    Step outputs and tensors of no vertex have no storage.
    """
    storage_of: dict[str, int] = {}
    storages: list[StepStorage] = []
    operators: list[StepOperator] = []
    for index, (operator, position) in enumerate(zip(step.forward, positions, strict=True)):
        reads = sorted({storage_of[name] for name in operator.inputs if name in storage_of})
        source = storage_of.get(operator.inputs[0]) if operator.inputs else None
        writes: list[int] = []
        reuses = None
        for number, name in enumerate(operator.outputs):
            if name in step.output_set:
                continue
            if number == 0 and operator.is_view:
                if source is not None:
                    storage_of[name] = source
                continue
            if name not in position_of:
                continue
            storage_of[name] = len(storages)
            writes.append(len(storages))
            storages.append(StepStorage(step.sizes[name], position_of[name], index))
            if number == 0 and operator.in_place and source is not None:
                reuses = source if storages[source].size == step.sizes[name] else None
        for number in reads:
            storages[number].readers.append(index)
        operators.append(
            StepOperator(
                position,
                tuple(writes),
                tuple(reads),
                operator.workspace_bytes,
                operator.flops,
                reuses,
                operator.once,
                operator.needs_all_outputs,
            )
        )
    return operators, storages, storage_of


def _grouped(count: int, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = [[] for _ in range(count)]
    for index, position in enumerate(positions):
        groups[position].append(index)
    return tuple(map(tuple, groups))


def _slots(
    step: StepGraph, positions: Sequence[int], storage_of: dict[str, int], storages: Sequence[StepStorage]
) -> list[Slot]:
    """Backward, divided before each chunk that reads other storages than the chunk before it."""
    profile = simulate(build_schedule(step, frozenset(), str), step)
    position_of = {operator.name: position for operator, position in zip(step.forward, positions, strict=True)}
    chunks: list[tuple[int, frozenset[int], int, int]] = []
    last_chunk: dict[int, int] = {}
    run = len(step.forward)
    for chunk, source in zip(step.chunks, step.sources, strict=True):
        if not chunk:
            continue
        reads: set[int] = set()
        for operator in chunk:
            reads.update(storage_of[name] for name in operator.inputs if name in storage_of)
            if operator.is_view and operator.inputs[0] in storage_of:
                storage_of[operator.outputs[0]] = storage_of[operator.inputs[0]]
        last_chunk.update(dict.fromkeys(reads, len(chunks)))
        peak = max(profile.timeline[run : run + len(chunk)])
        chunks.append((position_of[source], frozenset(reads), profile.live_before[run], peak))
        run += len(chunk)
    parts: list[tuple[int, frozenset[int], int, int]] = []
    for number, (position, read, start, peak) in enumerate(chunks):
        if parts and parts[-1][0] == position and parts[-1][1] >= read:
            _, before, earlier_start, earlier_peak = parts[-1]
            # A storage that ends there may stay live under a plan that recomputes a tensor from it.
            if all(last_chunk[storage] >= number for storage in before):
                parts[-1] = (position, before, earlier_start, max(peak, earlier_peak))
                continue
        parts.append((position, read, start, peak))
    for index, (_, read, _, _) in enumerate(parts):
        for storage in read:
            storages[storage].slots.append(index)
    kept_bytes = sum(storage.size for storage in storages if storage.slots)
    slots: list[Slot] = []
    for index, (position, read, start, peak) in enumerate(parts):
        slots.append(Slot(position, read, start - kept_bytes, peak - kept_bytes))
        kept_bytes -= sum(storages[storage].size for storage in read if storages[storage].slots[-1] == index)
    return slots


def _forward_base(step: StepGraph, operators: Sequence[StepOperator], storages: Sequence[StepStorage]) -> list[int]:
    alone = StepGraph(step.forward, (), (), step.sizes, step.resident, step.outputs, step.parameter_gradients)
    profile = simulate(build_schedule(alone, frozenset(), str), alone)
    base: list[int] = []
    live = 0
    for index, (operator, live_bytes) in enumerate(zip(operators, profile.timeline, strict=True)):
        written = [storages[number] for number in allocated(operator, storages)]
        live += sum(storage.size for storage in written)
        base.append(live_bytes - live)
        if operator.reuses is not None and storages[operator.reuses].readers[-1] == index:
            base[-1] += storages[operator.reuses].size
        live -= sum(storages[number].size for number in operator.reads if storages[number].readers[-1] == index)
        live -= sum(storage.size for storage in written if not storage.readers)
    return base


def allocated(
    operator: StepOperator, storages: Sequence[StepStorage], *, for_backward: bool = False
) -> tuple[int, ...]:
    """The storages that an operator allocates in forward; trailing outputs without readers are omitted.

    Backward counts as a reader only with `for_backward`.
    """
    return operator.allocated(
        lambda number: bool(storages[number].readers or (for_backward and storages[number].slots))
    )
