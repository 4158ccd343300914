"""Allocations and releases of backward between two cuts of an order, in order of time."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onnxgc.solvers.peak.step_model import IntArray, StepModel


@dataclass(frozen=True, slots=True)
class PhaseEvents:
    """The events of the phases that end at one cut, down to a lowest position.

    Events (recomputed operators and slots) are in order of time. The events of a phase are those with an
    `event_position` above its lower cut. Live storage number n, of `live_position[n]` and `live_size[n]`, is
    live from event `begin[n]` to event `end[n]`, both included.
    """

    lowest: int
    event_position: IntArray
    base: IntArray
    live_position: IntArray
    live_size: IntArray
    begin: IntArray
    end: IntArray
    operator_at: Mapping[int, int]
    slot_at: Mapping[int, int]
    first_slot: int
    kept_used: tuple[int, ...]
    kept_unused: tuple[int, ...]


class EventWriter:
    """Builds the events of phases of one model."""

    def __init__(self, model: StepModel) -> None:
        self.model = model

    def of_phases(self, cut: int, lowest: int) -> PhaseEvents:
        """Backward below a cut; each discarded tensor is recomputed right before its first reader."""
        model = self.model
        first = model.first_slot[cut + 1]
        end = model.first_slot[lowest]
        wanted: dict[int, int] = {}
        recomputed: list[tuple[int, int]] = []
        for position in range(cut, lowest - 1, -1):
            if model.crosses(position, cut):
                continue
            for index in reversed(model.operators_of[position]):
                operator = model.operators[index]
                if operator.once:
                    continue
                slots = [slot for s in operator.writes if (slot := self._first_need(s, first, wanted)) is not None]
                if not slots:
                    continue
                slot = min(slots)
                recomputed.append((slot, index))
                for storage in operator.reads:
                    wanted[storage] = min(wanted.get(storage, slot), slot)
        recomputed.sort()
        operator_at: dict[int, int] = {}
        slot_at: dict[int, int] = {}
        positions: list[int] = []
        base: list[int] = []
        upcoming = 0
        for number, at in enumerate(model.slots[first:end], start=first):
            while upcoming < len(recomputed) and recomputed[upcoming][0] == number:
                index = recomputed[upcoming][1]
                operator_at[index] = len(base)
                positions.append(model.operators[index].position)
                base.append(at.start_bytes + model.operators[index].workspace_bytes)
                upcoming += 1
            slot_at[number] = len(base)
            positions.append(at.position)
            base.append(at.peak_bytes)
        kept = [
            s
            for position in range(cut, lowest - 1, -1)
            if model.crosses(position, cut)
            for s in model.storages_of[position]
        ]
        begin = dict.fromkeys(kept, 0)
        begin.update(
            (s, at) for index, at in operator_at.items() for s in model.operators[index].writes if s not in begin
        )
        return self._as_arrays(lowest, cut, positions, base, begin, frozenset(kept), operator_at, slot_at)

    def _as_arrays(
        self,
        lowest: int,
        cut: int,
        positions: list[int],
        base: list[int],
        begin: Mapping[int, int],
        kept: frozenset[int],
        operator_at: Mapping[int, int],
        slot_at: Mapping[int, int],
    ) -> PhaseEvents:
        """The events as arrays; `begin` gives the first event of each storage."""
        storages = self.model.storages
        first = self.model.first_slot[cut + 1]
        last = {number: self.last_event(number, first, operator_at, slot_at) for number in begin}
        live: list[tuple[int, int, int, int]] = []
        for number, start in begin.items():
            end = last[number]
            if end is None and number not in kept:
                # A storage without reader is allocated too, unless it is a trailing output.
                operator = self.model.operators[storages[number].producer]
                if number in operator.allocated(lambda other: last[other] is not None):
                    end = start
            if end is not None:
                live.append((storages[number].position, storages[number].size, start, end))
        columns = np.asarray(live, np.int64).reshape(-1, 4).T
        return PhaseEvents(
            lowest,
            np.asarray(positions, np.int64),
            np.asarray(base, np.int64),
            columns[0],
            columns[1],
            columns[2],
            columns[3],
            operator_at,
            slot_at,
            first,
            tuple(s for s in sorted(kept) if last[s] is not None),
            tuple(s for s in sorted(kept) if last[s] is None and self.model.is_wanted_after(s, cut)),
        )

    def _first_need(self, number: int, first: int, wanted: Mapping[int, int]) -> int | None:
        """The first slot that needs a storage."""
        slots = self.model.storages[number].slots
        index = bisect_left(slots, first)
        by_slot = slots[index] if index < len(slots) else None
        by_operator = wanted.get(number)
        if by_slot is None or by_operator is None:
            return by_operator if by_slot is None else by_slot
        return min(by_slot, by_operator)

    def last_event(
        self, number: int, first: int, operator_at: Mapping[int, int], slot_at: Mapping[int, int], lower: int = -1
    ) -> int | None:
        """The last event above the cut `lower` at which a storage is live, from the slot `first` on."""
        model, storage = self.model, self.model.storages[number]
        last = None
        index = bisect_left(storage.slots, model.first_slot[lower + 1]) - 1
        if index >= 0 and storage.slots[index] >= first:
            last = slot_at[storage.slots[index]]
        for reader in reversed(storage.readers):
            operator = model.operators[reader]
            if operator.position <= lower:
                break
            at = operator_at.get(reader)
            if at is not None and (last is None or at > last):
                last = at - 1 if operator.reuses == number else at
        return last

    def of_last_phase(self, lowest: int) -> PhaseEvents:
        """The last phase: first forward, which keeps every tensor, then backward."""
        model = self.model
        indices = [i for position in range(lowest, model.positions) for i in model.operators_of[position]]
        operator_at = {index: at for at, index in enumerate(indices)}
        positions = [model.operators[index].position for index in indices]
        base = [model.forward_base[index] for index in indices]
        end = model.first_slot[lowest]
        slot_at = {number: len(base) + number for number in range(end)}
        positions += [slot.position for slot in model.slots[:end]]
        base += [slot.peak_bytes for slot in model.slots[:end]]
        begin = {s: at for index, at in operator_at.items() for s in model.operators[index].writes}
        return self._as_arrays(lowest, model.positions - 1, positions, base, begin, frozenset(), operator_at, slot_at)
