"""Exact memory of backward between two cuts of a forward order.

Vertices are computed in a fixed order. A *cut* after position c keeps every tensor that is computed at or
before c and read after it. Backward runs through the *phases* between neighbouring cuts from the last
to the first. In the phase (b, d] it recomputes the tensors computed after b and up to d that cut d does
not keep, each right before its first reader.

The memory of a phase in addition to the tensors kept for lower phases depends only on b and d, except for
the tensors of cut b that no lower phase uses (`Waiting`): these are released after their last use in
this phase. So the peak of a plan is the maximum, over its phases, of the bytes kept for lower phases plus
the phase's own memory.

`onnxgc.solvers.peak.step_model` gives the live bytes of all other tensors. All sizes are in bytes, positions
are counted from 0, and the cut before the first position is -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from onnxgc.solvers.peak.forward_memory import FirstForward
from onnxgc.solvers.peak.phase_events import EventWriter, PhaseEvents
from onnxgc.solvers.peak.step_model import IntArray, StepModel

Waiting: TypeAlias = frozenset[int]
"""Storages kept by a cut that no lower phase uses."""

MAX_PHASE = 1024
"""Largest number of positions in a phase."""
_PATIENCE = 24
"""A row of phases ends after this many consecutive phases above the limit, and at least `_PATIENT_CUTS` cuts."""
_PATIENT_CUTS = 3
_UNKNOWN = np.iinfo(np.int64).max // 4
"""Memory of a phase from a position that is no cut."""
_LEAST = np.iinfo(np.int64).min // 4


@dataclass(frozen=True, slots=True)
class _WaitingUses:
    """How the phases of a row use the storages that usually wait at their lower cuts.

    By phase: bytes of used storages, number of storages that keep waiting, and whether one is released in
    forward. `live` has entries (start, stop, event, bytes): in rows start..stop, these bytes are live up to
    the event.
    """

    used_bytes: IntArray
    still: IntArray
    idle: np.ndarray[Any, np.dtype[np.bool_]]
    live: list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The phases that end at one cut: entry k has the lower cut `cut - 1 - k`, if that is one of the cuts.

    With the usual waiting storages at the lower cut: `need` is the memory of a phase in addition to the
    bytes kept for lower phases, `adds` its contribution to the bytes kept for higher phases, and `flops` its
    recomputation. `is_usual` if the usual storages wait at the upper cut too.
    """

    need: IntArray
    adds: IntArray
    flops: IntArray
    is_usual: np.ndarray[Any, np.dtype[np.bool_]]


class PhaseCosts:
    """Memory of phases between `cuts` of one order of vertices (by default all), computed on demand and cached."""

    def __init__(self, model: StepModel, cuts: Sequence[int] | None = None) -> None:
        self.model = model
        self.cuts = range(model.positions - 1) if cuts is None else cuts
        self._lower_cuts = np.asarray([-1, *self.cuts], np.int64)
        self._patience = max(_PATIENCE, _PATIENT_CUTS * int(np.diff(self._lower_cuts).max(initial=0)))
        self._events_of_cut: dict[int, PhaseEvents] = {}
        self._rows: dict[int, PhaseRow] = {}
        self._last: tuple[IntArray, PhaseEvents] | None = None
        self._usual: dict[int, Waiting] = {-1: frozenset()}
        self._latest_usual = -1
        self._waiting_bytes = np.zeros(model.positions + 1, np.int64)
        self._waits: dict[int, tuple[int, int]] = {}
        self._guess = self._patience
        self._writer = EventWriter(model)
        self._forward = FirstForward(model, MAX_PHASE, frozenset(self.cuts))
        self._memo: dict[tuple[int, int, Waiting], tuple[int, int]] = {}

    def usual_waiting(self, cut: int) -> Waiting:
        """Storages that wait at a cut when a long phase ends there; empty until its row is computed."""
        return self._usual.get(cut, frozenset())

    def row(self, cut: int, limit: int, kept: IntArray) -> PhaseRow:
        """The phases that end at a cut, at least those that may stay within `limit` bytes.

        Entry c + 1 of `kept` is the least number of bytes kept below cut c. The rows of all lower cuts that
        have a plan within the limit must be computed first.
        """
        depth = min(cut + 1, MAX_PHASE)
        row = self._rows.get(cut)
        while row is None or (len(row.need) < depth and not self._ends(cut, row, limit, kept)):
            width = len(row.need) if row is not None else 0
            guess = self._guess + 4
            row = self._compute_row(cut, cut - min(depth, guess if guess > width else width + width // 2))
            self._rows[cut] = row
        total = kept[cut + 1 - len(row.need) : cut + 1][::-1] + row.need
        self._guess = int(np.flatnonzero(total <= limit).max(initial=0)) + self._patience
        return row

    def _ends(self, cut: int, row: PhaseRow, limit: int, kept: IntArray) -> bool:
        """Whether the longest phases of a row all exceed the limit."""
        width = len(row.need)
        below = kept[cut + 1 - width : cut + 1 - max(width - self._patience, 0)][::-1]
        return bool(np.all(below + row.need[-self._patience :] > limit))

    def last_row(self, limit: int) -> IntArray:
        """Memory of the last phase, which keeps every tensor, with the usual waiting storages.

        Entry k is for the lower cut `positions - 2 - k`.
        """
        depth = self.model.positions
        width = 64 if self._last is None else len(self._last[0])
        while True:
            width = min(width, depth)
            rows = self._rows_of_cuts(depth - 1, width)
            if self._last is None or len(self._last[0]) < width:
                events = self._writer.of_last_phase(depth - width)
                uses = self._uses_of_waiting(events, depth - 1, width)
                self._last = self._needs(events, depth - 1, width, rows, uses), events
            if width == depth or int(self._last[0][rows].max(initial=0)) > limit:
                return self._last[0]
            width *= 2

    def phase(self, lower: int, cut: int, waiting: Waiting) -> tuple[int, int]:
        """Memory of one phase, and its contribution to the bytes kept for higher phases."""
        key = (lower, cut, waiting)
        if key not in self._memo:
            self._memo[key] = self._phase(lower, cut, waiting)
        return self._memo[key]

    def last_phase(self, lower: int, waiting: Waiting) -> int:
        """Memory of the phase from a cut to the end, which keeps every tensor."""
        assert self._last is not None
        return self._need(self._last[1], lower, waiting)

    # -- one phase --

    def _phase(self, lower: int, cut: int, waiting: Waiting) -> tuple[int, int]:
        model, events = self.model, self._events_of_cut[cut]
        used = self._used(events, waiting, lower)
        need = self._need(events, lower, waiting)
        need = max(need, self._forward.need(lower, cut, waiting, used, need))
        kept = [s for s in events.kept_used if model.storages[s].position > lower]
        return need, sum(model.storages[s].size for s in (*used, *kept))

    def waiting_after(self, lower: int, cut: int, waiting: Waiting) -> Waiting:
        """The waiting storages at the upper cut of a phase."""
        model, events = self.model, self._events_of_cut[cut]
        used = self._used(events, waiting, lower)
        still = (s for s in waiting if model.is_wanted_after(s, cut) and s not in used)
        new = (s for s in events.kept_unused if model.storages[s].position > lower)
        return frozenset((*still, *new))

    def _need(self, events: PhaseEvents, lower: int, waiting: Waiting) -> int:
        size = len(events.base)
        change = np.zeros(size + 1, np.int64)
        inside = events.live_position > lower
        np.add.at(change, events.begin[inside], events.live_size[inside])
        np.add.at(change, events.end[inside] + 1, -events.live_size[inside])
        for storage in waiting:
            last = self._last_use(events, storage, lower)
            if last is not None:
                change[0] += self.model.storages[storage].size
                change[last + 1] -= self.model.storages[storage].size
        live = np.cumsum(change)[:size] + events.base
        active = live[events.event_position > lower]
        return int(active.max(initial=0))

    def _last_use(self, events: PhaseEvents, number: int, lower: int) -> int | None:
        """The last event above the cut `lower` at which a storage of that cut is live."""
        return self._writer.last_event(number, events.first_slot, events.operator_at, events.slot_at, lower)

    def _used(self, events: PhaseEvents, waiting: Waiting, lower: int) -> list[int]:
        return [number for number in waiting if self._last_use(events, number, lower) is not None]

    # -- rows of phases --

    def _compute_row(self, cut: int, lowest_cut: int) -> PhaseRow:
        model = self.model
        events = self._writer.of_phases(cut, lowest_cut + 1)
        self._events_of_cut[cut] = events
        if cut not in self._usual:
            self._set_usual(cut, events)
        width = cut - lowest_cut
        adds = np.zeros(width, np.int64)
        for storage in events.kept_used:
            adds[cut - model.storages[storage].position] += model.storages[storage].size
        adds = np.cumsum(adds)
        uses = self._uses_of_waiting(events, cut, width)
        adds += uses.used_bytes
        rows = self._rows_of_cuts(cut, width)
        need = self._needs(events, cut, width, rows, uses)
        lower_cuts = cut - 1 - np.arange(width)
        forward, late = self._forward.needs(cut, width)
        forward = forward + late + self._waiting_bytes[lower_cuts + 1]
        for k in rows[((uses.idle | (late > 0)) & (forward > need))[rows]]:
            lower = cut - 1 - int(k)
            waiting = self.usual_waiting(lower)
            used = self._used(events, waiting, lower)
            forward[k] = self._forward.need(lower, cut, waiting, used, int(need[k]))
        flops = np.zeros(width, np.int64)
        for index in events.operator_at:
            flops[cut - model.operators[index].position] += model.operators[index].flops
        # The usual storages were computed after the lower cut, or wait there already.
        positions = np.sort(np.asarray([model.storages[s].position for s in self._usual[cut]], np.int64))
        is_usual = np.searchsorted(positions, lower_cuts, side="right") == uses.still
        return PhaseRow(np.maximum(need, forward), adds, np.cumsum(flops), is_usual)

    def _set_usual(self, cut: int, events: PhaseEvents) -> None:
        # Storages from before the events are known from the previous cut.
        before = self._latest_usual
        older = self.waiting_after(before, cut, self._usual[before])
        storages = self.model.storages
        waiting = frozenset(events.kept_unused).union(s for s in older if storages[s].position < events.lowest)
        self._usual[cut] = waiting
        self._latest_usual = cut
        self._waiting_bytes[cut + 1] = sum(self.model.storages[s].size for s in waiting)
        for storage in waiting:
            first, _ = self._waits.get(storage, (cut, cut))
            self._waits[storage] = first, cut

    def _uses_of_waiting(self, events: PhaseEvents, cut: int, width: int) -> _WaitingUses:
        """How the phases from the `width` cuts below `cut` use the usual waiting storages there."""
        model = self.model
        lowest_cut = cut - width
        used_bytes = np.zeros(width, np.int64)
        still = np.zeros(width, np.int64)
        idle = np.zeros(width, np.bool_)
        live: list[tuple[int, int, int, int]] = []
        first_cut = next((c for c in range(lowest_cut, cut) if c in self._usual), cut)
        made_above = (s for position in range(max(lowest_cut + 1, 0), cut) for s in model.storages_of[position])
        for number in dict.fromkeys((*self.usual_waiting(first_cut), *made_above)):
            if number not in self._waits:
                continue
            first, last = self._waits[number]
            first, last = max(first, lowest_cut), min(last, cut - 1)
            storage = model.storages[number]
            index = len(storage.slots) - 1
            by_slot = None
            if index >= 0 and storage.slots[index] >= events.first_slot:
                by_slot = events.slot_at[storage.slots[index]]
            # With falling lower cut, more readers are in the phase.
            lower = last
            at = by_slot
            readers = [r for r in reversed(storage.readers) if model.operators[r].position <= cut]
            next_reader = 0
            while lower >= first:
                while next_reader < len(readers) and model.operators[readers[next_reader]].position > lower:
                    seen = events.operator_at.get(readers[next_reader])
                    if seen is not None and (at is None or seen > at):
                        at = seen - 1 if model.operators[readers[next_reader]].reuses == number else seen
                    next_reader += 1
                stop = max(
                    first, model.operators[readers[next_reader]].position if next_reader < len(readers) else first
                )
                rows = slice(cut - 1 - lower, cut - stop)
                if at is not None:
                    used_bytes[rows] += storage.size
                    live.append((rows.start, rows.stop, at, storage.size))
                elif model.is_wanted_after(number, cut):
                    still[rows] += 1
                else:
                    idle[rows] = True
                lower = stop - 1
        return _WaitingUses(used_bytes, still, idle, live)

    def _rows_of_cuts(self, cut: int, width: int) -> IntArray:
        """The entries of a row of `width` phases whose lower cut is one of the cuts, in order."""
        first, last = np.searchsorted(self._lower_cuts, (cut - width, cut))
        rows: IntArray = cut - 1 - self._lower_cuts[first:last][::-1]
        return rows

    def _needs(self, events: PhaseEvents, cut: int, width: int, rows: IntArray, uses: _WaitingUses) -> IntArray:
        """Memory of backward in the phases from the `width` cuts below `cut`, vectorised; known for `rows`."""
        size = len(events.base)
        change = np.zeros((len(rows) + 1, size + 1), np.int64)
        row = np.searchsorted(rows, cut - events.live_position)
        np.add.at(change, (row, events.begin), events.live_size)
        np.add.at(change, (row, events.end + 1), -events.live_size)
        np.cumsum(change, axis=0, out=change)
        for start, stop, last, live_bytes in uses.live:
            used = slice(*np.searchsorted(rows, (start, stop)))
            change[used, 0] += live_bytes
            change[used, last + 1] -= live_bytes
        live = np.cumsum(change[:-1], axis=1, out=change[:-1])[:, :size]
        live += events.base
        live[events.event_position[None, :] < cut - rows[:, None]] = _LEAST
        needs = np.full(width, _UNKNOWN)
        needs[rows] = np.maximum(live.max(axis=1, initial=0), 0)
        return needs
