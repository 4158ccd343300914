"""A training step as seen from the forward tensors that it holds, for one order of vertices.

The bytes of gradients and temporaries are those of the judge's profile of the step that stores
everything: backward does the same in the same order under every plan, and only the forward tensors
that are there at the time differ. All sizes are in bytes, places of vertices are counted from 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.joint import vertex_of_operators
from onnxgc.planning.schedule import StepGraph, build_schedule
from onnxgc.planning.simulate import simulate

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepOperator:
    """A forward operator; `reuses` is the storage in which it works, if that ends there."""

    place: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    workspace_bytes: int
    flops: int
    reuses: int | None
    once: bool
    needs_all_outputs: bool


@dataclass(slots=True)
class StepStorage:
    """Memory of one forward tensor and its views; `readers` and `slots` read it, in rising order."""

    size: int
    place: int
    producer: int
    readers: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slot:
    """Backward of one place between two moments at which something may be computed again.

    `start_bytes` and `peak_bytes` are what the step that stores everything holds when the slot
    begins, and at its worst, without the forward tensors.
    """

    place: int
    reads: frozenset[int]
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StepModel:
    """One training step as seen from its forward storages.

    `forward_base` is what is held beside storages while a forward operator runs for the first time.
    `first_slot[p]` is the first slot of a place at or below p - 1, so `first_slot[0]` is their number.
    `last_reader` is the place of a vertex's last reader in forward; the number of places where the
    vertex cannot be computed again.
    """

    places: int
    operators: tuple[StepOperator, ...]
    storages: tuple[StepStorage, ...]
    slots: tuple[Slot, ...]
    forward_base: tuple[int, ...]
    first_slot: tuple[int, ...]
    operators_of: tuple[tuple[int, ...], ...]
    storages_of: tuple[tuple[int, ...], ...]
    last_reader: tuple[int, ...]

    def crosses(self, place: int, cut: int) -> bool:
        """Whether a cut keeps the vertex at a place."""
        return place <= cut < self.last_reader[place]

    def is_wanted_after(self, number: int, cut: int) -> bool:
        """Whether anything reads a storage in forward after a cut, or in backward above it."""
        storage = self.storages[number]
        if storage.readers and self.operators[storage.readers[-1]].place > cut:
            return True
        return bool(storage.slots) and storage.slots[0] < self.first_slot[cut + 1]


def step_model(
    step: StepGraph, members: Mapping[Vertex, tuple[str, ...]], order: Sequence[Vertex]
) -> StepModel:
    """The model of a step whose forward operators come vertex after vertex in `order`."""
    places = vertex_of_operators(step, members, order)
    place_of = {tensor: number for number, vertex in enumerate(order) for tensor in members[vertex]}
    storage_of: dict[str, int] = {}
    storages: list[StepStorage] = []
    operators: list[StepOperator] = []
    for index, (operator, place) in enumerate(zip(step.forward, places, strict=True)):
        reads = sorted({storage_of[name] for name in operator.inputs if name in storage_of})
        source = storage_of.get(operator.inputs[0]) if operator.inputs else None
        writes: list[int] = []
        reuses = None
        for position, name in enumerate(operator.outputs):
            if name in step.outputs:
                continue
            if position == 0 and operator.is_view:
                if source is not None:
                    storage_of[name] = source
                continue
            if name not in place_of:
                continue
            storage_of[name] = len(storages)
            writes.append(len(storages))
            storages.append(StepStorage(step.sizes[name], place_of[name], index))
            if position == 0 and operator.in_place and source is not None:
                reuses = source if storages[source].size == step.sizes[name] else None
        for storage in reads:
            storages[storage].readers.append(index)
        operators.append(
            StepOperator(
                place,
                tuple(writes),
                tuple(reads),
                operator.workspace_bytes,
                operator.flops,
                reuses,
                operator.once,
                operator.needs_all_outputs,
            )
        )
    slots = _slots(step, places, storage_of, storages)
    count = len(order)
    place_after = [-slot.place for slot in slots]
    last_reader = [0] * count
    for stored in storages:
        seen = operators[stored.readers[-1]].place if stored.readers else 0
        last = count if operators[stored.producer].once else seen
        last_reader[stored.place] = max(last_reader[stored.place], last)
    return StepModel(
        count,
        tuple(operators),
        tuple(storages),
        tuple(slots),
        tuple(_forward_base(step, operators, storages)),
        tuple(bisect_left(place_after, 1 - place) for place in range(count + 1)),
        _grouped(count, [operator.place for operator in operators]),
        _grouped(count, [storage.place for storage in storages]),
        tuple(last_reader),
    )


def _grouped(count: int, places: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = [[] for _ in range(count)]
    for index, place in enumerate(places):
        groups[place].append(index)
    return tuple(map(tuple, groups))


def _slots(
    step: StepGraph, places: Sequence[int], storage_of: dict[str, int], storages: Sequence[StepStorage]
) -> list[Slot]:
    """Backward, cut where a chunk reads what the one before it did not, or no longer what it did."""
    profile = simulate(build_schedule(step, frozenset(), str), step)
    place_of = {operator.name: place for operator, place in zip(step.forward, places, strict=True)}
    chunks: list[tuple[int, frozenset[int], int, int]] = []
    last_chunk: dict[int, int] = {}
    position = len(step.forward)
    for chunk, source in zip(step.chunks, step.sources, strict=True):
        if not chunk:
            continue
        reads: set[int] = set()
        for operator in chunk:
            reads.update(storage_of[name] for name in operator.inputs if name in storage_of)
            if operator.is_view and operator.inputs[0] in storage_of:
                storage_of[operator.outputs[0]] = storage_of[operator.inputs[0]]
        last_chunk.update(dict.fromkeys(reads, len(chunks)))
        peak = max(profile.timeline[position : position + len(chunk)])
        chunks.append((place_of[source], frozenset(reads), profile.held_before[position], peak))
        position += len(chunk)
    parts: list[tuple[int, frozenset[int], int, int]] = []
    for number, (place, read, start, peak) in enumerate(chunks):
        if parts and parts[-1][0] == place and parts[-1][1] >= read:
            _, before, earlier_start, earlier_peak = parts[-1]
            # What ends there may have to stay under a plan that computes something from it again.
            if all(last_chunk[storage] >= number for storage in before):
                parts[-1] = (place, before, earlier_start, max(peak, earlier_peak))
                continue
        parts.append((place, read, start, peak))
    for index, (_, read, _, _) in enumerate(parts):
        for storage in read:
            storages[storage].slots.append(index)
    held = sum(storage.size for storage in storages if storage.slots)
    slots: list[Slot] = []
    for index, (place, read, start, peak) in enumerate(parts):
        slots.append(Slot(place, read, start - held, peak - held))
        held -= sum(storages[storage].size for storage in read if storages[storage].slots[-1] == index)
    return slots


def _forward_base(
    step: StepGraph, operators: Sequence[StepOperator], storages: Sequence[StepStorage]
) -> list[int]:
    alone = StepGraph(step.forward, (), (), step.sizes, step.resident, step.outputs, step.parameter_gradients)
    profile = simulate(build_schedule(alone, frozenset(), str), alone)
    base: list[int] = []
    alive = 0
    for index, (operator, held) in enumerate(zip(operators, profile.timeline, strict=True)):
        written = [storages[number] for number in allocated(operator, storages)]
        alive += sum(storage.size for storage in written)
        reused = operator.reuses is not None and storages[operator.reuses].readers[-1] == index
        base.append(
            held - alive + (storages[operator.reuses].size if reused and operator.reuses is not None else 0)
        )
        alive -= sum(
            storages[number].size for number in operator.reads if storages[number].readers[-1] == index
        )
        alive -= sum(storage.size for storage in written if not storage.readers)
    return base


def allocated(
    operator: StepOperator, storages: Sequence[StepStorage], *, for_backward: bool = False
) -> list[int]:
    """What an operator writes in forward: trailing outputs are left out where nobody reads them.

    Backward reads them only if they are kept `for_backward`.
    """
    writes = list(operator.writes)
    while len(writes) > 1 and not operator.needs_all_outputs:
        last = storages[writes[-1]]
        if last.readers or (for_backward and last.slots):
            break
        writes.pop()
    return writes
