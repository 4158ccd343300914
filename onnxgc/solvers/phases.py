"""Exact memory of backward between two cuts of a forward order.

Vertices are computed in a fixed order. A *cut* after place c keeps every tensor that is made at or
before c and read after it. Backward runs through the *phases* between neighbouring cuts from the last
to the first: in the phase (b, d] it computes again, each right before its first reader, the tensors
made after b and up to d that cut d does not keep.

What a phase needs above the tensors kept for the phases below it depends on b and d alone, up to
the tensors of cut b that no phase below uses (`Waiting`): these go as soon as this phase has
used them. So the peak of a whole plan is the largest, over its phases, of the bytes kept below
and the phase's own need.

The bytes of gradients and temporaries are those of the judge's profile of the step that stores
everything: backward does the same in the same order under every plan, and only the forward tensors
that are there at the time differ. All sizes are in bytes, places are counted from 0, and the cut
before the first place is -1.
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

Waiting: TypeAlias = frozenset[int]
"""Storages kept by a cut that no phase below it uses."""

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

LONGEST_PHASE = 1024
"""Places of the longest phase that is looked at."""
_PATIENCE = 24
"""A row of phases ends where so many in a row need too much."""
_LEAST = np.iinfo(np.int64).min // 4


@dataclass(frozen=True, slots=True)
class Operator:
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
class Storage:
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
    operators: tuple[Operator, ...]
    storages: tuple[Storage, ...]
    slots: tuple[Slot, ...]
    forward_base: tuple[int, ...]
    first_slot: tuple[int, ...]
    operators_of: tuple[tuple[int, ...], ...]
    storages_of: tuple[tuple[int, ...], ...]
    last_reader: tuple[int, ...]

    def crosses(self, place: int, cut: int) -> bool:
        """Whether a cut keeps the vertex at a place."""
        return place <= cut < self.last_reader[place]


def step_model(
    step: StepGraph, members: Mapping[Vertex, tuple[str, ...]], order: Sequence[Vertex]
) -> StepModel:
    """The model of a step whose forward operators come vertex after vertex in `order`."""
    places = vertex_of_operators(step, members, order)
    place_of = {tensor: number for number, vertex in enumerate(order) for tensor in members[vertex]}
    storage_of: dict[str, int] = {}
    storages: list[Storage] = []
    operators: list[Operator] = []
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
            storages.append(Storage(step.sizes[name], place_of[name], index))
            if position == 0 and operator.in_place and source is not None:
                reuses = source if storages[source].size == step.sizes[name] else None
        for storage in reads:
            storages[storage].readers.append(index)
        operators.append(
            Operator(
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
    step: StepGraph, places: Sequence[int], storage_of: dict[str, int], storages: Sequence[Storage]
) -> list[Slot]:
    """Backward, cut where a chunk reads what the one before it did not."""
    profile = simulate(build_schedule(step, frozenset(), str), step)
    place_of = {operator.name: place for operator, place in zip(step.forward, places, strict=True)}
    parts: list[tuple[int, frozenset[int], int, int]] = []
    position = len(step.forward)
    for chunk, source in zip(step.chunks, step.sources, strict=True):
        if not chunk:
            continue
        reads: set[int] = set()
        for operator in chunk:
            reads.update(storage_of[name] for name in operator.inputs if name in storage_of)
            if operator.is_view and operator.inputs[0] in storage_of:
                storage_of[operator.outputs[0]] = storage_of[operator.inputs[0]]
        peak = max(profile.timeline[position : position + len(chunk)])
        start = profile.held_before[position]
        position += len(chunk)
        if parts and parts[-1][0] == place_of[source] and parts[-1][1] >= reads:
            place, before, earlier_start, earlier_peak = parts[-1]
            parts[-1] = (place, before, earlier_start, max(peak, earlier_peak))
        else:
            parts.append((place_of[source], frozenset(reads), start, peak))
    for index, (_, read, _, _) in enumerate(parts):
        for storage in read:
            storages[storage].slots.append(index)
    held = sum(storage.size for storage in storages if storage.slots)
    slots: list[Slot] = []
    for index, (place, read, start, peak) in enumerate(parts):
        slots.append(Slot(place, read, start - held, peak - held))
        held -= sum(storages[storage].size for storage in read if storages[storage].slots[-1] == index)
    return slots


def _forward_base(step: StepGraph, operators: Sequence[Operator], storages: Sequence[Storage]) -> list[int]:
    alone = StepGraph(step.forward, (), (), step.sizes, step.resident, step.outputs, step.parameter_gradients)
    profile = simulate(build_schedule(alone, frozenset(), str), alone)
    base: list[int] = []
    alive = 0
    for index, (operator, held) in enumerate(zip(operators, profile.timeline, strict=True)):
        written = [storages[number] for number in _allocated(operator, storages)]
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


def _allocated(operator: Operator, storages: Sequence[Storage]) -> list[int]:
    """What an operator writes in a forward that keeps nothing: its trailing unread outputs are left out."""
    writes = list(operator.writes)
    while len(writes) > 1 and not operator.needs_all_outputs and not storages[writes[-1]].readers:
        writes.pop()
    return writes


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What happens in the phases that end at one cut, down to a lowest place.

    Events (operators that run again, and slots) are in order of time; a phase has those whose
    `event_place` lies above its lower cut. Storage `held[n]` of place `held_place[n]` is there from event
    `begin[n]` to event `end[n]`, both included.
    """

    lowest: int
    event_place: IntArray
    base: IntArray
    held_place: IntArray
    held_size: IntArray
    begin: IntArray
    end: IntArray
    operator_at: Mapping[int, int]
    slot_at: Mapping[int, int]
    first_slot: int
    kept_used: tuple[int, ...]
    kept_unused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _WaitingUses:
    """What a row of phases does with the storages that usually wait at their lower cuts.

    By phase: the bytes of those used, the number that go on waiting, and whether one is dropped in
    forward. `held` says of rows start..stop that so many bytes are held up to an event.
    """

    used_bytes: IntArray
    still: IntArray
    idle: np.ndarray[Any, np.dtype[np.bool_]]
    held: list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The phases that end at one cut: entry k is for the lower cut `cut - 1 - k`.

    `need` is what a phase needs beside what is kept for the phases below it, `adds` what it adds to
    that for the phases above, if the lower cut has its usual waiting storages; `flops` is what it
    computes again. Where `regular`, the usual storages wait at the upper cut too.
    """

    need: IntArray
    adds: IntArray
    flops: IntArray
    regular: np.ndarray[Any, np.dtype[np.bool_]]


class PhaseCosts:
    """Needs of phases in one order of vertices, worked out when they are asked for."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self._sequences: dict[int, _Sequence] = {}
        self._rows: dict[int, PhaseRow] = {}
        self._last: tuple[IntArray, _Sequence] | None = None
        self._usual: dict[int, Waiting] = {-1: frozenset()}
        self._waiting_bytes = np.zeros(model.places + 1, np.int64)
        self._waits: dict[int, tuple[int, int]] = {}
        self._guess = _PATIENCE
        self._forward_needs = self._first_forward()
        self._memo: dict[tuple[int, int, Waiting], tuple[int, int]] = {}

    def usual_waiting(self, cut: int) -> Waiting:
        """The waiting storages of a cut if its phase is long; the row of `cut` must be there."""
        return self._usual[cut]

    def row(self, cut: int, limit: int, kept: IntArray) -> PhaseRow:
        """The phases that end at a cut, at least as far as they may stay within `limit` bytes.

        Entry c + 1 of `kept` is what is kept below cut c at least. Rows of all lower cuts must have been
        asked for.
        """
        depth = min(cut + 1, LONGEST_PHASE)
        found = self._rows.get(cut)
        while found is None or (len(found.need) < depth and not self._ends(cut, found, limit, kept)):
            width = len(found.need) if found is not None else 0
            guess = self._guess + 4
            found = self._compute_row(cut, cut - min(depth, guess if guess > width else width + width // 2))
            self._rows[cut] = found
        total = kept[cut + 1 - len(found.need) : cut + 1][::-1] + found.need
        self._guess = max(_PATIENCE, int(np.flatnonzero(total <= limit).max(initial=0)) + _PATIENCE)
        return found

    def _ends(self, cut: int, row: PhaseRow, limit: int, kept: IntArray) -> bool:
        """Whether the longest phases of a row are all too large."""
        width = len(row.need)
        below = kept[cut + 1 - width : cut + 1 - max(width - _PATIENCE, 0)][::-1]
        return bool(np.all(below + row.need[-_PATIENCE:] > limit))

    def last_row(self, limit: int) -> IntArray:
        """What the last phase needs, that stores everything, with the usual waiting storages.

        Entry k is for the lower cut `places - 2 - k`.
        """
        depth = self.model.places
        width = 64 if self._last is None else len(self._last[0])
        while True:
            width = min(width, depth)
            if self._last is None or len(self._last[0]) < width:
                sequence = self._last_sequence(depth - width)
                uses = self._uses_of_waiting(sequence, depth - 1, width)
                self._last = self._needs(sequence, depth - 1, width, uses), sequence
            if width == depth or int(self._last[0][-1]) > limit:
                return self._last[0]
            width *= 2

    def phase(self, lower: int, cut: int, waiting: Waiting) -> tuple[int, int]:
        """Need of one phase, and what it adds to the bytes kept for the phases above."""
        key = (lower, cut, waiting)
        if key not in self._memo:
            self._memo[key] = self._phase(lower, cut, waiting)
        return self._memo[key]

    def last_phase(self, lower: int, waiting: Waiting) -> int:
        """Need of the phase from a cut to the end, which stores everything."""
        assert self._last is not None
        return self._need(self._last[1], lower, self.model.places - 1, waiting)

    # -- one phase ----------------------------------------------------------------------------

    def _phase(self, lower: int, cut: int, waiting: Waiting) -> tuple[int, int]:
        model, sequence = self.model, self._sequences[cut]
        used = [s for s in waiting if self._last_use(sequence, s, lower, cut) is not None]
        need = self._need(sequence, lower, cut, waiting)
        need = max(need, self._forward_need(lower, cut, waiting, used, need))
        kept = [s for s in sequence.kept_used if model.storages[s].place > lower]
        return need, sum(model.storages[s].size for s in (*used, *kept))

    def waiting_after(self, lower: int, cut: int, waiting: Waiting) -> Waiting:
        """What waits at the upper cut of a phase."""
        model, sequence = self.model, self._sequences[cut]
        still = (
            s
            for s in waiting
            if model.crosses(model.storages[s].place, cut) and self._last_use(sequence, s, lower, cut) is None
        )
        new = (s for s in sequence.kept_unused if model.storages[s].place > lower)
        return frozenset((*still, *new))

    def _need(self, sequence: _Sequence, lower: int, cut: int, waiting: Waiting) -> int:
        size = len(sequence.base)
        change = np.zeros(size + 1, np.int64)
        inside = sequence.held_place > lower
        np.add.at(change, sequence.begin[inside], sequence.held_size[inside])
        np.add.at(change, sequence.end[inside] + 1, -sequence.held_size[inside])
        for storage in waiting:
            last = self._last_use(sequence, storage, lower, cut)
            if last is not None:
                change[0] += self.model.storages[storage].size
                change[last + 1] -= self.model.storages[storage].size
        held = np.cumsum(change)[:size] + sequence.base
        active = held[sequence.event_place > lower]
        return int(active.max(initial=0))

    def _last_use(self, sequence: _Sequence, number: int, lower: int, cut: int) -> int | None:
        """The last event of the phase (lower, cut] that holds a storage of the lower cut."""
        model = self.model
        storage = model.storages[number]
        last = None
        index = bisect_left(storage.slots, model.first_slot[lower + 1]) - 1
        if index >= 0 and storage.slots[index] >= sequence.first_slot:
            last = sequence.slot_at[storage.slots[index]]
        for reader in reversed(storage.readers):
            operator = model.operators[reader]
            if operator.place <= lower:
                break
            at = sequence.operator_at.get(reader)
            if at is not None and operator.place <= cut and (last is None or at > last):
                last = at - 1 if operator.reuses == number else at
        return last

    # -- rows of phases -----------------------------------------------------------------------

    def _compute_row(self, cut: int, lowest_cut: int) -> PhaseRow:
        model = self.model
        sequence = self._sequence(cut, lowest_cut + 1)
        self._sequences[cut] = sequence
        if cut not in self._usual:
            self._set_usual(cut, frozenset(sequence.kept_unused))
        width = cut - lowest_cut
        adds = np.zeros(width, np.int64)
        for storage in sequence.kept_used:
            adds[cut - model.storages[storage].place] += model.storages[storage].size
        adds = np.cumsum(adds)
        uses = self._uses_of_waiting(sequence, cut, width)
        adds += uses.used_bytes
        need = self._needs(sequence, cut, width, uses)
        lower_cuts = cut - 1 - np.arange(width)
        forward = self._forward_needs[cut][:width] + self._waiting_bytes[lower_cuts + 1]
        for k in np.flatnonzero(uses.idle & (forward > need)):
            lower = cut - 1 - int(k)
            waiting = self._usual[lower]
            used = [s for s in waiting if self._last_use(sequence, s, lower, cut) is not None]
            forward[k] = self._forward_need(lower, cut, waiting, used, int(need[k]))
        flops = np.zeros(width, np.int64)
        for index in sequence.operator_at:
            flops[cut - model.operators[index].place] += model.operators[index].flops
        # What waits as usual was made after the lower cut, or waits there already.
        places = np.sort(np.asarray([model.storages[s].place for s in self._usual[cut]], np.int64))
        regular = np.searchsorted(places, lower_cuts, side="right") == uses.still
        return PhaseRow(np.maximum(need, forward), adds, np.cumsum(flops), regular)

    def _set_usual(self, cut: int, waiting: Waiting) -> None:
        self._usual[cut] = waiting
        self._waiting_bytes[cut + 1] = sum(self.model.storages[s].size for s in waiting)
        for storage in waiting:
            first, _ = self._waits.get(storage, (cut, cut))
            self._waits[storage] = first, cut

    def _uses_of_waiting(self, sequence: _Sequence, cut: int, width: int) -> _WaitingUses:
        """How the phases from the `width` cuts below `cut` use what usually waits there."""
        model = self.model
        lowest_cut = cut - width
        used_bytes = np.zeros(width, np.int64)
        still = np.zeros(width, np.int64)
        idle = np.zeros(width, np.bool_)
        held: list[tuple[int, int, int, int]] = []
        made_above = (s for place in range(max(lowest_cut + 1, 0), cut) for s in model.storages_of[place])
        for number in (*self._usual[lowest_cut], *made_above):
            if number not in self._waits:
                continue
            first, last = self._waits[number]
            first, last = max(first, lowest_cut), min(last, cut - 1)
            storage = model.storages[number]
            index = len(storage.slots) - 1
            by_slot = None
            if index >= 0 and storage.slots[index] >= sequence.first_slot:
                by_slot = sequence.slot_at[storage.slots[index]]
            # From the highest cut down, ever more readers are in the phase.
            lower = last
            at = by_slot
            readers = [r for r in reversed(storage.readers) if model.operators[r].place <= cut]
            position = 0
            while lower >= first:
                while position < len(readers) and model.operators[readers[position]].place > lower:
                    seen = sequence.operator_at.get(readers[position])
                    if seen is not None and (at is None or seen > at):
                        at = seen - 1 if model.operators[readers[position]].reuses == number else seen
                    position += 1
                stop = max(
                    first, model.operators[readers[position]].place if position < len(readers) else first
                )
                rows = slice(cut - 1 - lower, cut - stop)
                if at is not None:
                    used_bytes[rows] += storage.size
                    held.append((rows.start, rows.stop, at, storage.size))
                elif model.crosses(storage.place, cut):
                    still[rows] += 1
                else:
                    idle[rows] = True
                lower = stop - 1
        return _WaitingUses(used_bytes, still, idle, held)

    def _needs(self, sequence: _Sequence, cut: int, width: int, uses: _WaitingUses) -> IntArray:
        """Needs of backward in the phases from the `width` cuts below `cut`, all at once."""
        size = len(sequence.base)
        change = np.zeros((width, size + 1), np.int64)
        row = cut - sequence.held_place
        np.add.at(change, (row, sequence.begin), sequence.held_size)
        np.add.at(change, (row, sequence.end + 1), -sequence.held_size)
        np.cumsum(change, axis=0, out=change)
        for start, stop, last, held_bytes in uses.held:
            change[start:stop, 0] += held_bytes
            change[start:stop, last + 1] -= held_bytes
        held = np.cumsum(change, axis=1, out=change)[:, :size]
        held += sequence.base
        lower_cuts = cut - 1 - np.arange(width)
        held[sequence.event_place[None, :] <= lower_cuts[:, None]] = _LEAST
        needs: IntArray = np.maximum(held.max(axis=1, initial=0), 0)
        return needs

    def _sequence(self, cut: int, lowest: int) -> _Sequence:
        """Computing again, each right before its first reader, what a cut does not keep."""
        model = self.model
        first = model.first_slot[cut + 1]
        end = model.first_slot[lowest]
        wanted: dict[int, int] = {}
        again: list[tuple[int, int]] = []
        for place in range(cut, lowest - 1, -1):
            if model.crosses(place, cut):
                continue
            for index in reversed(model.operators_of[place]):
                operator = model.operators[index]
                if operator.once:
                    continue
                slots = [
                    slot for s in operator.writes if (slot := self._first_need(s, first, wanted)) is not None
                ]
                if not slots:
                    continue
                slot = min(slots)
                again.append((slot, index))
                for storage in operator.reads:
                    wanted[storage] = min(wanted.get(storage, slot), slot)
        again.sort()
        operator_at: dict[int, int] = {}
        slot_at: dict[int, int] = {}
        places: list[int] = []
        base: list[int] = []
        position = 0
        for number, at in enumerate(model.slots[first:end], start=first):
            while position < len(again) and again[position][0] == number:
                index = again[position][1]
                operator_at[index] = len(base)
                places.append(model.operators[index].place)
                base.append(at.start_bytes + model.operators[index].workspace_bytes)
                position += 1
            slot_at[number] = len(base)
            places.append(at.place)
            base.append(at.peak_bytes)
        kept = [
            s
            for place in range(cut, lowest - 1, -1)
            if model.crosses(place, cut)
            for s in model.storages_of[place]
        ]
        begin = dict.fromkeys(kept, 0)
        begin.update(
            (s, at)
            for index, at in operator_at.items()
            for s in model.operators[index].writes
            if s not in begin
        )
        return self._assembled(lowest, first, places, base, begin, frozenset(kept), operator_at, slot_at)

    def _assembled(
        self,
        lowest: int,
        first: int,
        places: list[int],
        base: list[int],
        begin: Mapping[int, int],
        kept: frozenset[int],
        operator_at: Mapping[int, int],
        slot_at: Mapping[int, int],
    ) -> _Sequence:
        """The sequence of some events, in which storages begin as given."""
        storages = self.model.storages
        last = {number: self._last_event(number, first, operator_at, slot_at) for number in begin}
        held: list[tuple[int, int, int, int]] = []
        for number, start in begin.items():
            end = last[number]
            if end is None and number not in kept:
                # Unread, it is allocated all the same, unless it is one of the trailing outputs.
                operator = self.model.operators[storages[number].producer]
                behind = operator.writes[operator.writes.index(number) + 1 :]
                if (
                    number == operator.writes[0]
                    or operator.needs_all_outputs
                    or any(last[other] is not None for other in behind)
                ):
                    end = start
            if end is not None:
                held.append((storages[number].place, storages[number].size, start, end))
        columns = np.asarray(held, np.int64).reshape(-1, 4).T
        return _Sequence(
            lowest,
            np.asarray(places, np.int64),
            np.asarray(base, np.int64),
            columns[0],
            columns[1],
            columns[2],
            columns[3],
            operator_at,
            slot_at,
            first,
            tuple(number for number in kept if last[number] is not None),
            tuple(number for number in kept if last[number] is None),
        )

    def _first_need(self, number: int, first: int, wanted: Mapping[int, int]) -> int | None:
        """The first slot for which a storage must be there."""
        slots = self.model.storages[number].slots
        index = bisect_left(slots, first)
        by_slot = slots[index] if index < len(slots) else None
        by_operator = wanted.get(number)
        if by_slot is None or by_operator is None:
            return by_operator if by_slot is None else by_slot
        return min(by_slot, by_operator)

    def _last_event(
        self, number: int, first: int, operator_at: Mapping[int, int], slot_at: Mapping[int, int]
    ) -> int | None:
        """The last event that holds a storage of the phase."""
        storage = self.model.storages[number]
        last = slot_at[storage.slots[-1]] if storage.slots and storage.slots[-1] >= first else None
        for reader in storage.readers:
            at = operator_at.get(reader)
            if at is not None and (last is None or at > last):
                last = at - 1 if self.model.operators[reader].reuses == number else at
        return last

    def _last_sequence(self, lowest: int) -> _Sequence:
        """The last phase: forward for the first time, everything stored, then backward."""
        model = self.model
        indices = [i for place in range(lowest, model.places) for i in model.operators_of[place]]
        operator_at = {index: position for position, index in enumerate(indices)}
        places = [model.operators[index].place for index in indices]
        base = [model.forward_base[index] for index in indices]
        end = model.first_slot[lowest]
        slot_at = {number: len(base) + number for number in range(end)}
        places += [slot.place for slot in model.slots[:end]]
        base += [slot.peak_bytes for slot in model.slots[:end]]
        begin = {s: at for index, at in operator_at.items() for s in model.operators[index].writes}
        return self._assembled(lowest, 0, places, base, begin, frozenset(), operator_at, slot_at)

    # -- forward, for the first time ----------------------------------------------------------

    def _first_forward(self) -> list[IntArray]:
        """For each cut, what the first forward of the phases that end there needs.

        All of a lower cut's storages count as kept below or used by the phase.
        """
        model = self.model
        needs: list[IntArray] = []
        alive: dict[int, int] = {}  # Storages in memory, and their places.
        before = np.zeros(0, np.int64)
        for place in range(model.places):
            width = min(place + 1, LONGEST_PHASE)
            need = np.zeros(width, np.int64)
            need[1:] = before[: width - 1]
            for index in model.operators_of[place]:
                operator = model.operators[index]
                for number in _allocated(operator, model.storages):
                    alive[number] = model.storages[number].place
                # Entry k counts the storages made after the cut place - 1 - k.
                made = np.zeros(width, np.int64)
                for number, where in alive.items():
                    if where > place - width:
                        made[place - where] += model.storages[number].size
                held = np.cumsum(made) + model.forward_base[index]
                reused = operator.reuses
                if reused is not None and model.storages[reused].readers[-1] == index:
                    held[place - model.storages[reused].place :] -= model.storages[reused].size
                need = np.maximum(need, held)
                for number in (*operator.reads, *operator.writes):
                    if number in alive and self._ends_in_forward(number, index):
                        del alive[number]
            needs.append(need)
            before = need
        return needs

    def _forward_need(
        self, lower: int, cut: int, waiting: Waiting, used: Sequence[int], backward_need: int
    ) -> int:
        """The same for one phase, with what waits at its lower cut; exact above `backward_need`."""
        storages = self.model.storages
        held = sum(storages[s].size for s in waiting)
        at_most = int(self._forward_needs[cut][cut - 1 - lower]) + held
        if at_most <= backward_need:
            return at_most
        # What nothing will ever use ends with its last reader in forward.
        idle = [s for s in waiting if s not in used and not self.model.crosses(storages[s].place, cut)]
        if not idle:
            return at_most
        held -= sum(storages[s].size for s in idle)
        return held + self._forward_need_with_idle(lower, cut, idle)

    def _forward_need_with_idle(self, lower: int, cut: int, idle: Sequence[int]) -> int:
        model = self.model
        alive = {s: model.storages[s].size for s in idle}
        need = 0
        for place in range(lower + 1, cut + 1):
            for index in model.operators_of[place]:
                operator = model.operators[index]
                alive.update((s, model.storages[s].size) for s in _allocated(operator, model.storages))
                held = sum(alive.values()) + model.forward_base[index]
                reused = operator.reuses
                if reused in alive and model.storages[reused].readers[-1] == index:
                    held -= alive[reused]
                need = max(need, held)
                for number in (*operator.reads, *operator.writes):
                    if self._ends_in_forward(number, index):
                        alive.pop(number, None)
        return need

    def _ends_in_forward(self, number: int, index: int) -> bool:
        """Whether a storage that no cut keeps ends with a forward operator that touches it."""
        storage = self.model.storages[number]
        if self.model.operators[storage.producer].once and storage.slots:
            return False
        return not storage.readers or storage.readers[-1] == index
